// AVX-512 VNNI: vpdpbusd multiplies unsigned codes by signed 8-bit limbs of x.
#pragma once
#include <immintrin.h>

#include "simd.h"

namespace qgemv::cpu {

struct Avx512 : Vectors<Avx512, 16> {
  static constexpr int limb_bits = 8, code_bias = 128;
  static Float real(const Half& h) { return (Float)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)h)); }
  static void store_half(uint16_t* p, Float v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Word u16(const Short& s) { return (Word)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)s)); }
  static Word signed_codes(Word v) { return v ^ 0x80808080u; }
  static Word lookup(Word index, const int8_t* table) {
    const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (Word)_mm512_shuffle_epi8(levels ^ _mm512_set1_epi8(char(128)), (__m512i)index);
  }
  static Word fifth_bits(Word v) {
    const __m512i spread =
        _mm512_set_epi32(0x10101010, 0x10101000, 0x10100010, 0x10100000, 0x10001010, 0x10001000, 0x10000010, 0x10000000,
                         0x101010, 0x101000, 0x100010, 0x100000, 0x1010, 0x1000, 0x10, 0);
    return (Word)_mm512_permutexvar_epi32((__m512i)v, spread);
  }
  static Float fma(Float a, Float b, Float c) { return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
  static Int round(Float v) { return (Int)_mm512_cvtps_epi32((__m512)v); }
  static Int dot(Int acc, Word codes, const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return (Int)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(four));
  }
  static void interleave_words(const uint8_t* const (&rows)[lanes], size_t offset, uint32_t (*out)[lanes]) {
    auto load = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + offset)); };
    auto four = [&](int r) {  // rows r, r + 4, r + 8, r + 12
      __m512i v = _mm512_castsi128_si512(load(r));
      v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load(r + 4));
      v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load(r + 8));
      return _mm512_mask_broadcast_i32x4(v, 0xf000, load(r + 12));
    };
    const __m512i a = four(0), b = four(1), c = four(2), d = four(3);
    const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
    const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
    _mm512_storeu_si512(out[0], _mm512_unpacklo_epi64(ab0, cd0));
    _mm512_storeu_si512(out[1], _mm512_unpackhi_epi64(ab0, cd0));
    _mm512_storeu_si512(out[2], _mm512_unpacklo_epi64(ab1, cd1));
    _mm512_storeu_si512(out[3], _mm512_unpackhi_epi64(ab1, cd1));
  }
};

}  // namespace qgemv::cpu
