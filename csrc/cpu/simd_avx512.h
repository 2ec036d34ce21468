// AVX-512 VNNI: vpdpbusd multiplies unsigned codes by signed 8-bit limbs of x.
#pragma once
#include <immintrin.h>

#include "simd.h"

namespace qgemv::cpu {

struct Avx512 : RegisterTypes<16> {
  static constexpr int limb_bits = 8, code_bias = 128, registers = 32;
  // From so many rows of x on, chunks are unpacked, of two panels at a time. Measured with Q4_K, Q6_K and Q4_0: at 8
  // rows passes of 4 rows over the packed chunk take 0.9 to 1.1 times as long, at 12 rows 1.0 to 1.2, at 4 rows 0.8.
  static constexpr int unpack_tokens = 9, tile_panels = 2;
  using Limb = int8_t;

  static Float half(const uint16_t* h) { return (Float)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)h)); }
  static void store_half(uint16_t* p, Float v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Word u16(const uint16_t* s) { return (Word)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)s)); }
  static Int bytes(const uint8_t* p) { return (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
  static Word lookup(Word index, const int8_t* table) {
    const __m512i levels = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
    return (Word)_mm512_shuffle_epi8(levels ^ _mm512_set1_epi8(char(128)), (__m512i)index);
  }
  static FourWords lookup_16(FourWords index, const int8_t* table) {
    return (FourWords)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), (__m128i)index);
  }
  static Word fifth_bits(Word v) {
    const __m512i spread =
        _mm512_set_epi32(0x10101010, 0x10101000, 0x10100010, 0x10100000, 0x10001010, 0x10001000, 0x10000010, 0x10000000,
                         0x101010, 0x101000, 0x100010, 0x100000, 0x1010, 0x1000, 0x10, 0);
    return (Word)_mm512_permutexvar_epi32((__m512i)v, spread);
  }
  static Float fma(Float a, Float b, Float c) { return (Float)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
  static Float min(Float a, Float b) { return (Float)_mm512_min_ps((__m512)a, (__m512)b); }
  static Float max(Float a, Float b) { return (Float)_mm512_max_ps((__m512)a, (__m512)b); }
  static Int round(Float v) { return (Int)_mm512_cvtps_epi32((__m512)v); }
  static int32_t reduce_max(Int v) { return _mm512_reduce_max_epi32((__m512i)v); }

  static __m512i four_limbs(const int8_t* x) { return _mm512_set1_epi32(load<int32_t>(x)); }
  static Int dot(Int acc, Word codes, __m512i four) {
    return (Int)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, four);
  }
  static void store_limbs(int8_t* to, Int v) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v)); }
  // The sums of each 16 of 256 limbs.
  static void sums_of_16(const int8_t* limbs, int32_t* sums) {
    auto fours = [&](int i) {  // four sums for each of the groups 4i .. 4i + 3
      return _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(limbs + 64 * i));
    };
    auto add = [&](__m512i a, __m512i b, bool by_8) {
      return by_8 ? _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
                  : _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i turned = add(add(fours(0), fours(1), false), add(fours(2), fours(3), false), true);
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_storeu_si512(sums, _mm512_permutexvar_epi32(order, turned));
  }

  // Four words of each of 16 rows, from `offset` on: out[i][r] is word i of row r.
  static void interleave_words(const uint8_t* const* rows, size_t offset, uint32_t (*out)[panel_rows]) {
    auto row = [&](int r) { return _mm_loadu_si128((const __m128i*)(rows[r] + offset)); };
    auto four = [&](int r) {  // rows r, r + 4, r + 8, r + 12
      __m512i v = _mm512_castsi128_si512(row(r));
      v = _mm512_mask_broadcast_i32x4(v, 0x00f0, row(r + 4));
      v = _mm512_mask_broadcast_i32x4(v, 0x0f00, row(r + 8));
      return _mm512_mask_broadcast_i32x4(v, 0xf000, row(r + 12));
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
