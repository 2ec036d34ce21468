#pragma once
#include "q2_k.h"

namespace qgemv {

// Q3_K: a lane reads 16 bytes with two bits for each quarter, and 16 bytes with the third bits of both halves, in place
// 4n + quarter.
//
//   block   | third bits | qs: half 0 | qs: half 1 | scales | d |
//   byte     0     16     32    48     64    80     96       108 110
//   lanes    | 0,2 | 1,3 |  0  |  1  |  2  |  3  |   all     all      (16 bytes each)
//   bytes 96..103  four bits of the scales of groups 0..7 in the low nibbles, of groups 8..15 in the high ones
//   bytes 104..107 two bits each of groups i, i + 4, i + 8, i + 12 from the lowest
template <typename T, bool wide>
struct Lane<Q3_K, Aligned, T, wide> : FourQuarters<T> {
  using Base = FourQuarters<T>;
  struct Data {
    uint4 q, bits;           // two bits of each quarter; third bits of both halves
    uint first, last, high;  // of scales: four bits for quarters 0 and 1, for 2 and 3; two bits for all
    half d;
  };
  float zero[4];                    // what the code 4 of 0 takes off the sum of a quarter
  uint third, low_mask, high_mask;  // shift to the third bits; masks of the scales' bits, for quarters 0 and 1
  float low_unit, high_unit;        // what these are worth

  Lane(int slot, threadgroup const uint*) : Base(slot), third(4 * Base::n) {
    low_mask = 0x000f000fu << third;
    high_mask = 0x00030003u << third;
    low_unit = Base::n ? tiny_unit / 16 : tiny_unit;
    high_unit = 16 * low_unit;
  }

  void load(device const T* x_block) {
    Base::load_quarters(x_block);
    float place = -4.0f / tiny_unit;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      zero[q] = sum<16>(Base::x[q]) * (q == 3 ? place / 4 : place);
      place *= 4.0f;
    }
  }
  Data fetch(device const uchar* block) const {
    device const uchar* s = block + 96 + Base::c;
    return {Aligned::words4(block + 32 + 32 * Base::n + 16 * Base::c),
            Aligned::words4(block + 16 * Base::c),
            halves(s[0], s[2]),
            halves(s[4], s[6]),
            halves(s[8], s[10]),
            *(device const half*)(block + 108)};
  }
  float4 dot(Data data) const {
    float4 codes = float4(zero[0], zero[1], zero[2], zero[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint q = data.q[i], bits = data.bits[i] >> third;  // quarter k's in place k
      codes[0] = dot_bytes((q & 0x03030303u) | ((bits << 2) & 0x04040404u), Base::x[0] + 4 * i, codes[0]);
      codes[1] = dot_bytes((q & 0x0c0c0c0cu) | ((bits << 3) & 0x10101010u), Base::x[1] + 4 * i, codes[1]);
      codes[2] = dot_bytes((q & 0x30303030u) | ((bits << 4) & 0x40404040u), Base::x[2] + 4 * i, codes[2]);
      // Two places lower, for the third bit has no room above.
      codes[3] = dot_bytes(((q >> 2) & 0x30303030u) | ((bits << 3) & 0x40404040u), Base::x[3] + 4 * i, codes[3]);
    }
    return codes;
  }
  float add(Data data, float4 codes, float total) const {
    const float2 four[2] = {tiny2(data.first & low_mask), tiny2(data.last & low_mask)};
    const float2 two[2] = {tiny2(data.high & high_mask), tiny2(data.high & (high_mask << 2))};
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float place = 1.0f / float(1 << (k == 3 ? 4 : 2 * k)), above = k < 2 ? 1.0f : 0.25f;
      const float offset = fma(two[k / 2][k % 2], high_unit * above * place, -32.0f * place);
      sum = fma(fma(four[k / 2][k % 2], low_unit * place, offset), codes[k], sum);
    }
    return fma(real_half(data.d), sum, total);
  }
};

}  // namespace qgemv
