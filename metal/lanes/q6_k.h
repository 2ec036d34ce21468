#pragma once
#include "generic.h"

namespace qgemv {

// Q6_K: 8 lanes a block, 32 weights a lane: 8 in the same place of the four quarters of half a block. Lane 4n + c reads
// 8 bytes at each of three places; two bytes a load, as blocks of 210 bytes are aligned to no more.
//
//   block   | ql: half 0      | ql: half 1      | qh: half 0 | qh: half 1 | scales | d |
//   byte     0       32        64      96        128          160          192      208   210
//   lanes    |0 1 2 3|0 1 2 3| |4 5 6 7|4 5 6 7| |0 1 2 3   | |4 5 6 7   |  all     all     (8 bytes each)
//   quarters low nibbles: 0 | 1                  2 bits each: 0, 1, 2, 3 from the lowest
//            high nibbles: 2 | 3
//   lane 4n + c owns x  128n + 8c + 0..7, and the same 32, 64 and 96 further on; a scale serves 16 weights
template <>
struct Lane<Q6_K, Aligned> : NoTable {
  enum { lanes = 8 };
  static constant constexpr float unit = tiny_unit;
  int n, c;
  float x[4][8], zero[4];  // zero: what the code 32 of 0 adds to the sum of a quarter

  Lane(int slot, threadgroup const uint*) : n(slot / 4), c(slot % 4) {}

  template <typename T>
  void load(device const T* x_block) {
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      load_x<8>(x_block + 128 * n + 32 * g + 8 * c, x[g]);
      zero[g] = sum<8>(x[g]) * ((g < 2 ? 32.0f : 512.0f) / tiny_unit);
    }
  }
  float dot(device const uchar* block) const {
    device const uchar* ql = block + 64 * n + 8 * c;
    device const uchar* qh = block + 128 + 32 * n + 8 * c;
    float low[4] = {}, high[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint l = Aligned::word(ql, i), m = Aligned::word(ql + 32, i), h = Aligned::word(qh, i);
      low[0] = dot_masked(l, 0x000f000fu, x[0] + 4 * i, low[0]);
      low[1] = dot_masked(m, 0x000f000fu, x[1] + 4 * i, low[1]);
      low[2] = dot_masked(l, 0x00f000f0u, x[2] + 4 * i, low[2]);
      low[3] = dot_masked(m, 0x00f000f0u, x[3] + 4 * i, low[3]);
      high[0] = dot_masked(h, 0x00030003u, x[0] + 4 * i, high[0]);
      high[1] = dot_masked(h, 0x000c000cu, x[1] + 4 * i, high[1]);
      high[2] = dot_masked(h, 0x00300030u, x[2] + 4 * i, high[2]);
      high[3] = dot_masked(h, 0x00c000c0u, x[3] + 4 * i, high[3]);
    }
    // Quarters 2 and 3 are 16 times too large, by their nibbles' place.
    device const uchar* scales = block + 192 + 8 * n + c / 2;
    float total = 0.0f;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const float high_unit = g % 2 == 0 ? 16.0f : 4.0f, scale_unit = g < 2 ? 1.0f : 0.0625f;
      const float codes = fma(high[g], high_unit, low[g]) - zero[g];
      const float scale = fma(tiny(scales[2 * g] ^ 0x80u), tiny_unit * scale_unit, -128.0f * scale_unit);
      total = fma(scale, codes, total);
    }
    return float(*(device const half*)(block + 208)) * total;
  }
};

}  // namespace qgemv
