// AVX-VNNI: vpdpbusd as in AVX-512, on 256 bits.
#pragma once
#include "simd_256.h"

namespace qgemv::cpu {

struct AvxVnni : Avx2Base<AvxVnni> {
  static constexpr int limb_bits = 8;
  using Limb = int8_t;

  static __m256i four_limbs(const int8_t* x) { return _mm256_set1_epi32(load<int32_t>(x)); }
  static Int dot(Int acc, Word codes, __m256i four) {
    return (Int)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)codes, four);
  }
  static void store_limbs(int8_t* to, Int v) {
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi64x(0x0c080400));
    _mm_storel_epi64((__m128i*)to,
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
  }
  static void sums_of_16(const int8_t* limbs, int32_t* sums) {
    auto fours = [&](int i) {  // four sums for each of the groups 2i and 2i + 1
      return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1),
                                     _mm256_loadu_si256((const __m256i*)(limbs + 32 * i)));
    };
    for (int i = 0; i < 8; i += 4) {
      const __m256i even_odd = half_sums(fours(i), fours(i + 1), fours(i + 2), fours(i + 3));
      const __m128i even = _mm256_castsi256_si128(even_odd), odd = _mm256_extracti128_si256(even_odd, 1);
      _mm_storeu_si128((__m128i*)(sums + 2 * i), _mm_unpacklo_epi32(even, odd));
      _mm_storeu_si128((__m128i*)(sums + 2 * i + 4), _mm_unpackhi_epi32(even, odd));
    }
  }
};

}  // namespace qgemv::cpu
