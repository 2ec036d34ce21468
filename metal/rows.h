// y = x W^T + bias for M rows of x, a small number that the kernel knows: each weight is read and decoded once for all
// of them.
//
// A SIMD-group makes 4 * rows_outputs outputs for each row of x. Its lanes are eight groups of four. The four make
// rows_outputs outputs each of the same piece of K, so that they read the same x; the eight take neighbouring pieces
// (decode8.h), then the next ones, until the row ends:
//
//   lane            0  1  2  3    4  5  6  7   ...  28 29 30 31
//   outputs, by 4   0  1  2  3    0  1  2  3   ...   0  1  2  3
//   piece of K      0  0  0  0    1  1  1  1   ...   7  7  7  7
//
// The SIMD-groups of a threadgroup share its outputs, eight pieces in turn. In the end sums are added over the lanes,
// and in threadgroup memory over the SIMD-groups.
#pragma once
#include "bias.h"
#include "decode8.h"

namespace qgemv {

// Adds this lane's part of the outputs first .. first + rows_outputs - 1 to total: one in `step` pieces, from piece
// `begin` on.
template <typename P, typename F, typename T, int M>
inline void add_pieces(device const uchar* weight, device const T* x, constant LinearParams& p, uint first, uint lane,
                       uint lanes, threadgroup const uint* table, thread float (*total)[M]) {
  const uint blocks = p.K / F::block_size, step = lanes / P::per_block, begin = lane / P::per_block;
  const uint block_bytes = sizeof(typename F::Block), t = lane % P::per_block, last = p.N - 1;
  first = min(first, last);  // past the last row: that one
  weight += ulong(first) * p.row_bytes + begin * block_bytes;
  uint at[rows_outputs];  // 32 bits, from a 64-bit address: registers are short
#pragma unroll
  for (uint r = 0; r < rows_outputs; ++r) at[r] = min(r, last - first) * uint(p.row_bytes);
  x += begin * F::block_size + P::start(t);
  for (uint b = begin; b < blocks; b += step) {
    P piece[rows_outputs];
#pragma unroll
    for (uint r = 0; r < rows_outputs; ++r) piece[r].load(weight + at[r], t);
    weight += step * block_bytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float w[rows_outputs][8];
#pragma unroll
      for (uint r = 0; r < rows_outputs; ++r) piece[r].decode(i, table, w[r]);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        float v[8];
        load_x_of<P>(x + m * p.x_stride, i, v);
#pragma unroll
        for (uint r = 0; r < rows_outputs; ++r) {
          float sum = total[r][m];
#pragma unroll
          for (int k = 0; k < 8; ++k) sum = fma(v[k], w[r][k], sum);
          total[r][m] = sum;
        }
      }
    }
    x += step * F::block_size;
  }
}

template <typename F, typename S, typename T, int M, uint simdgroups>
[[kernel, max_total_threads_per_threadgroup(simd_width* simdgroups)]] void rows(
    device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device T* y [[buffer(3)]], constant LinearParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint outputs = 4 * rows_outputs, sums = M * outputs, pieces = 8;
  threadgroup uint table[Piece<F, S>::table_size];
  threadgroup float partial[simdgroups * sums];
  const uint thread_index = simdgroup * simd_width + lane;
  Piece<F, S>::fill_table(table, thread_index, simdgroups * simd_width);

  const uint own = lane % 4 * rows_outputs, at = lane / 4;
  float total[rows_outputs][M] = {};
  add_pieces<Piece<F, S>, F>(weight, x, p, group * outputs + own, simdgroup * pieces + at, simdgroups * pieces, table,
                             total);
#pragma unroll
  for (uint r = 0; r < rows_outputs; ++r) {
#pragma unroll
    for (uint m = 0; m < M; ++m) {
      float sum = total[r][m];
      sum += simd_shuffle_xor(sum, 4);
      sum += simd_shuffle_xor(sum, 8);
      sum += simd_shuffle_xor(sum, 16);
      if (at == (r * M + m) % pieces) partial[simdgroup * sums + m * outputs + own + r] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < sums; i += simdgroups * simd_width) {
    float sum = partial[i];
    for (uint s = 1; s < simdgroups; ++s) sum += partial[s * sums + i];
    const uint n = group * outputs + i % outputs;
    if (n < p.N) y[ulong(i / outputs) * p.N + n] = T(sum + bias_at(bias, p.bias_type, n));
  }
}

}  // namespace qgemv
