// The mapping starts from the published ones of llama.cpp and MLX (both MIT): several lanes a block, nibbles masked in
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
  // What a lane needs of a block beside the codes.
  struct Data {
    half2 d;         // d and dmin
    uchar2 a, b, c;  // its two bytes of each four
  };
  Data fetch(device const uchar* block) const {
    device const uchar2* bytes = (device const uchar2*)(block + 4) + pair;
    return {*(device const half2*)block, bytes[0], bytes[2], bytes[4]};
  }
  // total + d * (scale . codes) + dmin * (min . x_sum) for sums of both groups, times 1 / unit; x_sum is times
  // min_unit.
  float add(Data data, float2 codes, float2 x_sum, float total) const {
    const uint a = as_type<uint>(ushort2(data.a)), b = as_type<uint>(ushort2(data.b)),
               c = as_type<uint>(ushort2(data.c));
    const float2 scale = tiny2((((last ? c : a) & six) << 2) + (a & two));
    const float2 min = tiny2(((b & low) << 2) + (c & high));
    const float products = fma(codes.x, scale.x, codes.y * scale.y), mins = fma(x_sum.x, min.x, x_sum.y * min.y);
    return fma(real_half(data.d.y), mins, fma(real_half(data.d.x), products, total));
  }
};

// What the lanes of Q4_K and Q5_K share: a lane owns n weights, 16 or 32, of each of the groups 2j and 2j + 1. With 32
// the scales serve twice as many weights, but x takes twice as many registers.
template <typename T, int n>
struct PairOfGroups : NoTable {
  using Sums = float2;
  enum { lanes = 128 / n, parts = 32 / n, words4 = n / 16, ahead = 1 };  // parts: lanes for the same groups
  static constant constexpr float unit = PairScales::unit;
  int slot, part;
  PairScales scales;
  T low[n], high[n];
  float2 x_sum;  // of both groups, negative, for minimums are taken off

  PairOfGroups(int s) : slot(s), part(s % parts), scales(s / parts) {}

  void load(device const T* x_block) {
    x_block += 64 * (slot / parts) + n * part;
    load_x<n>(x_block, low);
    load_x<n>(x_block + 32, high);
    x_sum = float2(sum<n>(low), sum<n>(high)) * -scales.min_unit;
  }
};
inline constexpr int pair_weights(bool wide) { return wide ? 32 : 16; }

// Q4_K: lane 2j + h reads 16 bytes, half h of those of groups 2j and 2j + 1: 16 weights of the one in the low nibbles,
// 16 of the other in the high ones.
//
//   block   | d dmin | scales | groups 0, 1 | groups 2, 3 | groups 4, 5 | groups 6, 7 |
//   byte     0        4        16     32     48     64     80     96     112    128   144
//   lane      all      all     |  0   |  1   |  2   |  3   |  4   |  5   |  6   |  7   |
//   its x, low nibbles          0..    16..   64..   80..   128..  144..  192..  208..    (16 each)
//   its x, high nibbles         32..   48..   96..   112..  160..  176..  224..  240..
template <typename T, bool wide>
struct Lane<Q4_K, Aligned, T, wide> : PairOfGroups<T, pair_weights(wide)> {
  using Base = PairOfGroups<T, pair_weights(wide)>;
  struct Data {
    PairScales::Data scales;
    uint4 q[Base::words4];
  };

  Lane(int s, threadgroup const uint*) : Base(s) {}

  Data fetch(device const uchar* block) const {
    Data data;
    data.scales = Base::scales.fetch(block);
#pragma unroll
    for (int i = 0; i < Base::words4; ++i)
      data.q[i] = ((device const uint4*)(block + 16))[Base::words4 * Base::slot + i];
    return data;
  }
  float2 dot(Data data) const {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * Base::words4; ++i) {
      const uint q = data.q[i / 4][i % 4];
      low = dot_masked(q, 0x000f000fu, Base::low + 4 * i, low);
      high = dot_masked(q, 0x00f000f0u, Base::high + 4 * i, high);
    }
    return float2(low, high);
  }
  float add(Data data, float2 codes, float total) const {
    return Base::scales.add(data.scales, float2(codes.x * tiny_unit, codes.y * (tiny_unit / 16)), Base::x_sum, total);
  }
};

}  // namespace qgemv
