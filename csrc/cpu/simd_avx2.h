// AVX2: vpmaddubsw would saturate with 8-bit limbs, so they have 16 bits (vpmaddwd), and codes are widened to meet
// them.
#pragma once
#include <immintrin.h>

#include "simd.h"

namespace qgemv::cpu {

struct Avx2 : Vectors<Avx2, 8> {
  static constexpr int limb_bits = 16, code_bias = 128;
  static Float real(const Half& h) { return (Float)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)h)); }
  static void store_half(uint16_t* p, Float v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Word u16(const Short& s) { return (Word)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)s)); }
  static Word signed_codes(Word v) { return v ^ 0x80808080u; }
  static Word lookup(Word index, const int8_t* table) {
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (Word)_mm256_shuffle_epi8(levels, (__m256i)index) ^ 0x80808080u;
  }
  static Float fma(Float a, Float b, Float c) { return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
  static Int round(Float v) { return (Int)_mm256_cvtps_epi32((__m256)v); }
  // x: limbs of weights 0, 2, 1, 3
  static Int dot(Int acc, Word codes, const int16_t* x) {
    int32_t even, odd;
    memcpy(&even, x, 4);
    memcpy(&odd, x + 2, 4);
    return acc + (Int)_mm256_madd_epi16((__m256i)(codes & 0x00ff00ffu), _mm256_set1_epi32(even)) +
           (Int)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8), _mm256_set1_epi32(odd));
  }
  static void interleave_words(const uint8_t* const (&rows)[lanes], size_t offset, uint32_t (*out)[lanes]) {
    auto two = [&](int r) {  // rows r and r + 4
      return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(rows[r] + offset))),
                                     _mm_loadu_si128((const __m128i*)(rows[r + 4] + offset)), 1);
    };
    const __m256i a = two(0), b = two(1), c = two(2), d = two(3);
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    _mm256_storeu_si256((__m256i*)out[0], _mm256_unpacklo_epi64(ab0, cd0));
    _mm256_storeu_si256((__m256i*)out[1], _mm256_unpackhi_epi64(ab0, cd0));
    _mm256_storeu_si256((__m256i*)out[2], _mm256_unpacklo_epi64(ab1, cd1));
    _mm256_storeu_si256((__m256i*)out[3], _mm256_unpackhi_epi64(ab1, cd1));
  }
};

}  // namespace qgemv::cpu
