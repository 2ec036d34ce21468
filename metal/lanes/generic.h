// What one lane does with one block. Lane<F, S, T>, for the format F in blocks read as S, keeps its share of x, of type
// T, and dots it with the same block of several rows. It has
//   lanes        how many lanes share a block: lane `slot` of them is made by Lane(slot, table)
//   table_words  words of a table in threadgroup memory, filled by fill_table; 0 where there is none
//   ahead        whether blocks are fetched a pass before they are used: worth the registers where a block is few loads
//   load(x)      takes its x of a block; x points to the block's first
//   fetch(b)     Data: what it needs of one row's block, as it lies there
//   dot(data)    Sums of x times the block's codes
//   add(data, sums, total)  total + its part of the dot product, by the block's scales, times 1 / unit
//
// This one serves every format. 16 weights a lane: lane `slot` owns weights and x 16 * slot .. 16 * slot + 15.
#pragma once
#include "../storage.h"

namespace qgemv {

struct NoTable {
  enum { table_words = 0 };
  static void fill_table(threadgroup uint*, uint, uint) {}
};

template <typename F, typename S, typename T, bool wide>
struct Lane : NoTable {
  enum { lanes = F::block_size / 16, ahead = 0 };
  static constant constexpr float unit = 1.0f;
  using Data = device const Block<F, S>*;
  using Sums = float;
  int slot;
  T x[16];
  float x_sum;

  Lane(int s, threadgroup const uint*) : slot(s) {}

  void load(device const T* x_block) {
    load_x<16>(x_block + 16 * slot, x);
    x_sum = sum<16>(x);
  }
  Data fetch(device const uchar* block) const { return (Data)block; }
  Sums dot(Data block) const {
    float codes = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) codes = dot_bytes(F::template codes<S>(*block, 4 * slot + i), x + 4 * i, codes);
    return codes;
  }
  // sum(x * (scale * (code - zero) - min))
  float add(Data block, Sums codes, float total) const {
    const auto scales = F::template scales<S>(*block);
    const int group = 16 * slot / F::group, zero = F::template zero<S>();
    const float part = fma(codes, tiny_unit, -float(zero) * x_sum);
    return total + fma(scales.scale(group), part, -scales.min(group) * x_sum);
  }
};

}  // namespace qgemv
