// What one lane does with one block. Lane<F, S>, for the format F in blocks read as S, keeps its share of x and dots it
// with the same block of several rows. It has
//   lanes        how many lanes share a block: lane `slot` of them is made by Lane(slot, table)
//   table_words  words of a table in threadgroup memory, filled by fill_table; 0 where there is none
//   load(x)      takes its x of a block; x points to the block's first
//   dot(b)       its part of the dot product with one row's block, times 1 / unit
//
// This one serves every format. 16 weights a lane: lane `slot` owns weights and x 16 * slot .. 16 * slot + 15.
#pragma once
#include "../storage.h"

namespace qgemv {

struct NoTable {
  enum { table_words = 0 };
  static void fill_table(threadgroup uint*, uint, uint) {}
};

template <typename F, typename S>
struct Lane : NoTable {
  enum { lanes = F::block_size / 16 };
  static constant constexpr float unit = 1.0f;
  int slot;
  float x[16], x_sum;

  Lane(int s, threadgroup const uint*) : slot(s) {}

  template <typename T>
  void load(device const T* x_block) {
    load_x<16>(x_block + 16 * slot, x);
    x_sum = sum<16>(x);
  }
  // sum(x * (scale * (code - zero) - min))
  float dot(device const uchar* block) const {
    device const Block<F, S>& b = *(device const Block<F, S>*)block;
    const auto scales = F::template scales<S>(b);
    const int group = 16 * slot / F::group, zero = F::template zero<S>();
    float codes = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes = dot_masked(F::template codes<S>(b, 4 * slot + i), 0x00ff00ffu, x + 4 * i, codes);
    return fma(scales.scale(group), fma(codes, tiny_unit, -float(zero) * x_sum), -scales.min(group) * x_sum);
  }
};

}  // namespace qgemv
