#pragma once
#include "q4_0.h"

namespace qgemv {

// Q8_0: a lane a block; a SIMD-group reads 1088 bytes in a row.
//
//   blocks  | d | 32 x int8 | d | 32 x int8 | ...
//   byte     0   2           34  36          68
//   lane         0               1             ...
//   its x        0..31           32..63        ...
template <typename T, bool wide>
struct Lane<Q8_0, Aligned, T, wide> : WholeBlock<T>, NoTable {
  using Base = WholeBlock<T>;
  struct Data {
    half d;
    uint4 q[2];
  };

  Lane(int, threadgroup const uint*) {}

  Data fetch(device const uchar* block) const {
    return {first_half(block), {Aligned::words4(block + 2), Aligned::words4(block + 18)}};
  }
  float dot(Data data) const {
    float2 codes = Base::x_sum * -128.0f;  // what the code 128 of 0 takes off
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes[i / 4] = dot_bytes(data.q[i / 4][i % 4] ^ 0x80808080u, Base::x + 4 * i, codes[i / 4]);
    }
    return codes.x + codes.y;
  }
  float add(Data data, float codes, float total) const { return Base::add_scaled(data.d, codes, total); }
};

}  // namespace qgemv
