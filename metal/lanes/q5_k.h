#pragma once
#include "q4_k.h"

namespace qgemv {

// Q5_K: as Q4_K, and each lane reads the 16 bytes of fifth bits of its weights' places in their groups. The bits of the
// two groups are summed apart, at the weight they have where they lie.
//
//   block   | d dmin | scales |  fifth bits   | groups 0, 1 | groups 2, 3 | groups 4, 5 | groups 6, 7 |
//   byte     0        4        16      32      48     64     80     96     112    128    144    160   176
//   lane      all      all     | even  |  odd  |  0   |  1   |  2   |  3   |  4   |  5   |  6   |  7   |
//   its x, low nibbles                          0..    16..   64..   80..   128..  144..  192..  208..    (16 each)
//   its x, high nibbles                         32..   48..   96..   112..  160..  176..  224..  240..
template <>
struct Lane<Q5_K, Aligned> : NoTable {
  enum { lanes = 8 };
  static constant constexpr float unit = PairScales::unit;
  int slot;
  PairScales scales;
  uint bit;  // mask of the fifth bit of the low nibbles' group; that of the other group is next to it
  float bit_unit;
  float low[16], high[16];
  float2 x_sum;

  Lane(int s, threadgroup const uint*) : slot(s), scales(s / 2) {
    const uint place = 1u << (s / 2 * 2);
    bit = 0x00010001u * place;
    bit_unit = 16.0f * tiny_unit / float(place);
  }

  template <typename T>
  void load(device const T* x_block) {
    x_block += 64 * (slot / 2) + 16 * (slot % 2);
    load_x<16>(x_block, low);
    load_x<16>(x_block + 32, high);
    x_sum = float2(sum<16>(low), sum<16>(high)) * scales.min_unit;
  }
  float dot(device const uchar* block) const {
    const uint4 q = ((device const uint4*)(block + 48))[slot], fifth = ((device const uint4*)(block + 16))[slot % 2];
    float l = 0.0f, h = 0.0f, l5 = 0.0f, h5 = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      l = dot_masked(q[i], 0x000f000fu, low + 4 * i, l);
      h = dot_masked(q[i], 0x00f000f0u, high + 4 * i, h);
      l5 = dot_masked(fifth[i], bit, low + 4 * i, l5);
      h5 = dot_masked(fifth[i], 2 * bit, high + 4 * i, h5);
    }
    const float2 codes = float2(fma(l5, bit_unit, l * tiny_unit), fma(h5, bit_unit / 2, h * (tiny_unit / 16)));
    return scales.combine(block, codes, x_sum);
  }
};

}  // namespace qgemv
