// What AVX2 and AVX-VNNI share. `Isa` keeps their functions apart.
#pragma once
#include <immintrin.h>

#include "simd.h"

namespace qgemv::cpu {

template <class Isa>
struct Avx2Base : RegisterTypes<8> {
  static constexpr int code_bias = 128, registers = 16, unpack_tokens = 9, tile_panels = 1;
  static Float half(const uint16_t* h) { return (Float)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)h)); }
  static void store_half(uint16_t* p, Float v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
  static Word u16(const uint16_t* s) { return (Word)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)s)); }
  static Int bytes(const uint8_t* p) { return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
  static Word lookup(Word index, const int8_t* table) {
    const __m256i levels = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return (Word)_mm256_shuffle_epi8(levels ^ _mm256_set1_epi8(char(128)), (__m256i)index);
  }
  static FourWords lookup_16(FourWords index, const int8_t* table) {
    return (FourWords)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)table), (__m128i)index);
  }
  static Word fifth_bits(Word v) { return (((v & 15u) * 0x00204081u) & 0x01010101u) << 4; }
  static Float fma(Float a, Float b, Float c) { return (Float)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
  static Float min(Float a, Float b) { return (Float)_mm256_min_ps((__m256)a, (__m256)b); }
  static Float max(Float a, Float b) { return (Float)_mm256_max_ps((__m256)a, (__m256)b); }
  static Int round(Float v) { return (Int)_mm256_cvtps_epi32((__m256)v); }
  static int32_t reduce_max(Int v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
  }
  // Of each of four vectors the sum of its low and of its high four elements: a0 b0 c0 d0 a1 b1 c1 d1.
  static __m256i half_sums(__m256i a, __m256i b, __m256i c, __m256i d) {
    return _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
  }

  // Four words of each of 16 rows, from `offset` on: out[i][r] is word i of row r.
  static void interleave_words(const uint8_t* const* rows, size_t offset, uint32_t (*out)[panel_rows]) {
    for (int p = 0; p < panel_rows; p += lanes) {
      auto two = [&](int r) {  // rows r and r + 4 of these eight
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(rows[p + r] + offset))),
                                       _mm_loadu_si128((const __m128i*)(rows[p + r + 4] + offset)), 1);
      };
      const __m256i a = two(0), b = two(1), c = two(2), d = two(3);
      const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
      const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
      _mm256_storeu_si256((__m256i*)(out[0] + p), _mm256_unpacklo_epi64(ab0, cd0));
      _mm256_storeu_si256((__m256i*)(out[1] + p), _mm256_unpackhi_epi64(ab0, cd0));
      _mm256_storeu_si256((__m256i*)(out[2] + p), _mm256_unpacklo_epi64(ab1, cd1));
      _mm256_storeu_si256((__m256i*)(out[3] + p), _mm256_unpackhi_epi64(ab1, cd1));
    }
  }
};

}  // namespace qgemv::cpu
