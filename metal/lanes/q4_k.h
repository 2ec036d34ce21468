// The mapping starts from the published ones of llama.cpp and MLX (both MIT): eight lanes a block, nibbles masked in
// place, powers of two undone once per group. The decode without conversions and the scales in pairs are this
// project's.
#pragma once
#include "generic.h"

namespace qgemv {

// The scales and minimums of groups 2j and 2j + 1 of a Q4_K or Q5_K block, as one lane needs them. Where they lie:
//
//   bytes 4..7   scales of groups 0..3, six bits; above them two bits of the scales of groups 4..7
//   bytes 8..11  minimums of groups 0..3, six bits; above them two bits of the minimums of groups 4..7
//   bytes 12..15 low nibble: the scale's, high nibble: the minimum's other four bits, of groups 4..7
//
// The two groups' bytes are neighbours. Spread over a word, they are unpacked together, as tiny numbers: scales as
// 4 * scale, minimums as 4 * min for groups 0..3 and 16 * min for 4..7. So no step shifts to the right.
struct PairScales {
  static constant constexpr float unit = tiny_unit / 4;
  bool last;                 // groups 4..7
  uint pair;                 // bytes 2 * pair, 2 * pair + 1 of each four
  uint six, two, low, high;  // masks of the fields
  float min_unit;

  PairScales(int j) : last(j >= 2), pair(j & 1) {
    six = last ? 0x000f000fu : 0x003f003fu;
    two = last ? 0x00c000c0u : 0u;
    low = last ? 0x00c000c0u : 0x003f003fu;
    high = last ? 0x00f000f0u : 0u;
    min_unit = last ? 0.25f : 1.0f;
  }
  // d * (scale . codes) - dmin * (min . x_sum) for sums of both groups, times 1 / unit; x_sum is times min_unit.
  float combine(device const uchar* block, float2 codes, float2 x_sum) const {
    const half2 d = *(device const half2*)block;
    device const uchar2* bytes = (device const uchar2*)(block + 4) + pair;
    const uint a = as_type<uint>(ushort2(bytes[0])), b = as_type<uint>(ushort2(bytes[2])),
               c = as_type<uint>(ushort2(bytes[4]));
    const float2 scale = tiny2((((last ? c : a) & six) << 2) + (a & two));
    const float2 min = tiny2(((b & low) << 2) + (c & high));
    const float products = fma(codes.x, scale.x, codes.y * scale.y), mins = fma(x_sum.x, min.x, x_sum.y * min.y);
    return fma(float(d.x), products, -float(d.y) * mins);
  }
};

// Q4_K: 8 lanes a block, 32 weights a lane. Lane 2j + h reads 16 bytes, half h of those of groups 2j and 2j + 1: 16
// weights of the one in the low nibbles, 16 of the other in the high ones.
//
//   block   | d dmin | scales | groups 0, 1 | groups 2, 3 | groups 4, 5 | groups 6, 7 |
//   byte     0        4        16     32     48     64     80     96     112    128   144
//   lane      all      all     |  0   |  1   |  2   |  3   |  4   |  5   |  6   |  7   |
//   its x, low nibbles          0..    16..   64..   80..   128..  144..  192..  208..    (16 each)
//   its x, high nibbles         32..   48..   96..   112..  160..  176..  224..  240..
template <>
struct Lane<Q4_K, Aligned> : NoTable {
  enum { lanes = 8 };
  static constant constexpr float unit = PairScales::unit;
  int slot;
  PairScales scales;
  float low[16], high[16];
  float2 x_sum;

  Lane(int s, threadgroup const uint*) : slot(s), scales(s / 2) {}

  template <typename T>
  void load(device const T* x_block) {
    x_block += 64 * (slot / 2) + 16 * (slot % 2);
    load_x<16>(x_block, low);
    load_x<16>(x_block + 32, high);
    x_sum = float2(sum<16>(low), sum<16>(high)) * scales.min_unit;
  }
  float dot(device const uchar* block) const {
    const uint4 q = ((device const uint4*)(block + 16))[slot];
    float l = 0.0f, h = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      l = dot_masked(q[i], 0x000f000fu, low + 4 * i, l);
      h = dot_masked(q[i], 0x00f000f0u, high + 4 * i, h);
    }
    return scales.combine(block, float2(l * tiny_unit, h * (tiny_unit / 16)), x_sum);
  }
};

}  // namespace qgemv
