#pragma once
#include "generic.h"

namespace qgemv {

// What the lanes of Q2_K and Q3_K share: 4 lanes a block, 64 weights a lane. A block has two halves of 128 weights, a
// half four quarters of 32. Lane 2n + c owns the weights 16c .. 16c + 15 of each quarter of half n. Each of these four
// has a scale: of groups first_group + 0, 2, 4, 6.
template <typename T>
struct FourQuarters : NoTable {
  enum { lanes = 4, ahead = 0 };
  using Sums = float4;
  static constant constexpr float unit = tiny_unit;
  int n, c;
  T x[4][16];

  FourQuarters(int slot) : n(slot / 2), c(slot % 2) {}

  int first_group() const { return 8 * n + c; }
  void load_quarters(device const T* x_block) {
#pragma unroll
    for (int q = 0; q < 4; ++q) load_x<16>(x_block + 128 * n + 32 * q + 16 * c, x[q]);
  }
};

// Q2_K: a lane reads 16 bytes, which hold two bits for each quarter. They are used where they lie, as code * 4^quarter.
//
//   block   | scales | qs: half 0 | qs: half 1 | d dmin |
//   byte     0        16    32     48    64     80       84
//   lanes     all    |  0  |  1  |  2  |  3  |   all           (16 bytes each)
//   a byte of scales: scale in the low nibble, minimum in the high one
template <typename T, bool wide>
struct Lane<Q2_K, Aligned, T, wide> : FourQuarters<T> {
  using Base = FourQuarters<T>;
  struct Data {
    uint4 q;
    uint first, last;  // of scales and minimums: those of quarters 0 and 1, of 2 and 3
    half2 d;           // d and dmin
  };
  float x_sum[4];  // of each quarter, negative, for minimums are taken off; times 1 / 16, as they are too large by that

  Lane(int slot, threadgroup const uint*) : Base(slot) {}

  void load(device const T* x_block) {
    Base::load_quarters(x_block);
#pragma unroll
    for (int q = 0; q < 4; ++q) x_sum[q] = sum<16>(Base::x[q]) * (-1.0f / 16);
  }
  Data fetch(device const uchar* block) const {
    device const uchar* s = block + Base::first_group();
    device const half* d = (device const half*)(block + 80);
    return {Aligned::words4(block + 16 + 32 * Base::n + 16 * Base::c), halves(s[0], s[2]), halves(s[4], s[6]),
            half2(d[0], d[1])};
  }
  float4 dot(Data data) const {
    float4 codes = float4(0.0f);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        codes[k] = dot_masked(data.q[i], 0x00030003u << (2 * k), Base::x[k] + 4 * i, codes[k]);
      }
    }
    return codes;
  }
  float add(Data data, float4 codes, float total) const {
    const float2 scale[2] = {tiny2(data.first & 0x000f000fu), tiny2(data.last & 0x000f000fu)};
    const float2 min[2] = {tiny2(data.first & 0x00f000f0u), tiny2(data.last & 0x00f000f0u)};
    float products = 0.0f, mins = 0.0f, place = tiny_unit;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      products = fma(codes[k] * place, scale[k / 2][k % 2], products);
      mins = fma(x_sum[k], min[k / 2][k % 2], mins);
      place *= 0.25f;
    }
    return fma(real_half(data.d.y), mins, fma(real_half(data.d.x), products, total));
  }
};

}  // namespace qgemv
