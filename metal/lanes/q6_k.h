#pragma once
#include "generic.h"

namespace qgemv {

// Q6_K: 8 lanes a block, 32 weights a lane. A block has two halves of 128 weights, a half four quarters of 32. Lane
// 4n + 2p + c owns the weights 16c .. 16c + 15 of quarters p and p + 2 of half n. It reads 16 bytes in each of two
// places, at most four times two bytes a load, as blocks of 210 bytes are aligned to no more.
//
//   block   | ql: half 0      | ql: half 1      | qh: half 0 | qh: half 1 | scales | d |
//   byte     0       32        64      96        128   144    160   176    192      208 210
//   lanes    | 0 | 1 | 2 | 3 | | 4 | 5 | 6 | 7 | | 0 2 | 1 3 | | 4 6 | 5 7 |  all     all     (16 bytes each)
//   quarters low nibbles: 0 | 1                  2 bits each: 0, 1, 2, 3 from the lowest
//            high nibbles: 2 | 3
template <typename T, bool wide>
struct Lane<Q6_K, Aligned, T, wide> : NoTable {
  enum { lanes = 8, ahead = 0 };
  using Sums = float2;
  static constant constexpr float unit = tiny_unit;
  struct Data {
    uint4 q, two;  // low nibbles; the upper two bits, of all quarters
    uint scales;   // of both quarters, plus 128, two bytes apart
    half d;
  };
  int n, p, c;
  T x[32];
  float2 zero;          // what the code 32 of 0 takes off the sums
  uint left, right;     // shifts: of the bits for the low nibbles, of the high nibbles
  uint high, high_two;  // masks of the shifted high nibbles and of their bits
  float high_unit;

  // The bits of quarter p + 2 stay where they are, and the nibbles come to them. So in lanes with p = 1 the code is 4
  // times as large.
  Lane(int slot, threadgroup const uint*) : n(slot / 4), p(slot / 2 % 2), c(slot % 2) {
    left = right = p ? 2 : 4;
    high = p ? 0x3c3c3c3cu : 0x0f0f0f0fu;
    high_two = p ? 0xc0c0c0c0u : 0x30303030u;
    high_unit = p ? 0.25f : 1.0f;
  }

  void load(device const T* x_block) {
    x_block += 128 * n + 32 * p + 16 * c;
    load_x<16>(x_block, x);
    load_x<16>(x_block + 64, x + 16);
    zero = float2(sum<16>(x), sum<16>(x + 16) / high_unit) * (-32.0f / tiny_unit);
  }
  Data fetch(device const uchar* block) const {
    device const uchar* s = block + 192 + 8 * n + 2 * p + c;
    return {Aligned::words4(block + 64 * n + 32 * p + 16 * c), Aligned::words4(block + 128 + 32 * n + 16 * c),
            halves(s[0], s[4]) ^ 0x00800080u, *(device const half*)(block + 208)};
  }
  float2 dot(Data data) const {
    float2 codes = zero;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint q = data.q[i], two = data.two[i];
      codes.x = dot_bytes((q & 0x0f0f0f0fu) | ((two << left) & 0x30303030u), x + 4 * i, codes.x);
      codes.y = dot_bytes(((q >> right) & high) | (two & high_two), x + 16 + 4 * i, codes.y);
    }
    return codes;
  }
  float add(Data data, float2 codes, float total) const {
    const float2 scale = fma(tiny2(data.scales), float2(tiny_unit), float2(-128.0f));
    return fma(real_half(data.d), fma(scale.x, codes.x, scale.y * (codes.y * high_unit)), total);
  }
};

}  // namespace qgemv
