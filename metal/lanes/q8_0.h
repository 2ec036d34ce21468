#pragma once
#include "generic.h"

namespace qgemv {

// Q8_0: a lane a block, so that its scale and the sum of x serve 32 weights. Two bytes a load, as blocks of 34 bytes
// are aligned to no more; a SIMD-group reads 1088 bytes in a row.
//
//   blocks  | d | 32 x int8 | d | 32 x int8 | ...
//   byte     0   2           34  36          68
//   lane         0               1             ...
//   its x        0..31           32..63        ...
template <>
struct Lane<Q8_0, Aligned> : NoTable {
  enum { lanes = 1 };
  static constant constexpr float unit = tiny_unit;
  float x[32], zero;  // zero: what the code 128 of 0 adds to the sum

  Lane(int, threadgroup const uint*) {}

  template <typename T>
  void load(device const T* x_block) {
    load_x<32>(x_block, x);
    zero = sum<32>(x) * (128.0f / tiny_unit);
  }
  float dot(device const uchar* block) const {
    float codes = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes = dot_masked(Aligned::word(block + 2, i) ^ 0x80808080u, 0x00ff00ffu, x + 4 * i, codes);
    }
    return float(*(device const half*)block) * (codes - zero);
  }
};

}  // namespace qgemv
