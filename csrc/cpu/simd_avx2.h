// AVX2 alone: vpmaddubsw would saturate with 8-bit limbs, so they have 16 bits (vpmaddwd), and codes are widened to
// meet them.
#pragma once
#include "simd_256.h"

namespace qgemv::cpu {

struct Avx2 : Avx2Base<Avx2> {
  static constexpr int limb_bits = 16;
  using Limb = int16_t;
  struct Four {
    __m256i even, odd;
  };
  static Four four_limbs(const int16_t* x) {
    return {_mm256_set1_epi32(load<int32_t>(x)), _mm256_set1_epi32(load<int32_t>(x + 2))};
  }
  static Int dot(Int acc, Word codes, const Four& four) {
    acc += (Int)_mm256_madd_epi16((__m256i)(codes & 0x00ff00ffu), four.even) +
           (Int)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8), four.odd);
    asm("" : "+x"(acc));  // else GCC adds up the products of a group at its end, and keeps them in memory until then
    return acc;
  }
  // In the order that dot wants: weights 0, 2, 1, 3 of each four.
  static void store_limbs(int16_t* to, Int v) {
    const __m256i ordered = _mm256_shuffle_epi32((__m256i)v, 0xd8);
    const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(ordered, 16), 16);  // packing saturates
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, low), 0x08);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(packed));
  }
  static void sums_of_16(const int16_t* limbs, int32_t* sums) {
    auto pairs = [&](int g) {
      return _mm256_madd_epi16(_mm256_loadu_si256((const __m256i*)(limbs + 16 * g)), _mm256_set1_epi16(1));
    };
    for (int g = 0; g < 16; g += 4) {
      const __m256i halves = half_sums(pairs(g), pairs(g + 1), pairs(g + 2), pairs(g + 3));
      _mm_storeu_si128((__m128i*)(sums + g),
                       _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
    }
  }
};

}  // namespace qgemv::cpu
