// y = x W^T + bias for M rows of x, a small number that the kernel knows: each weight is read and decoded once for all
// of them.
//
// A SIMD-group makes rows_outputs outputs for each row of x. Its lanes take neighbouring pieces of a row of the weight
// (decode8.h), then the next 32, until the row ends. Then the lanes' sums are added. Where rows_splits SIMD-groups
// share the outputs, each takes 32 pieces in turn, and their sums meet in threadgroup memory.
#pragma once
#include "bias.h"
#include "decode8.h"

namespace qgemv {

// Adds this lane's part of the outputs first .. first + rows_outputs - 1 to total: one in `lanes` pieces, from piece
// `lane`.
template <typename P, typename F, typename T, int M>
inline void add_pieces(device const uchar* weight, device const T* x, constant LinearParams& p, uint first, uint lane,
                       uint lanes, threadgroup const uint* table, thread float (*total)[M]) {
  const uint blocks = p.K / F::block_size, step = lanes / P::per_block, begin = lane / P::per_block;
  const uint block_bytes = sizeof(typename F::Block), t = lane % P::per_block;
  device const uchar* at[rows_outputs];
#pragma unroll
  for (uint r = 0; r < rows_outputs; ++r) {
    at[r] = weight + ulong(min(first + r, p.N - 1)) * p.row_bytes + begin * block_bytes;  // past the last row: that one
  }
  x += begin * F::block_size + P::start(t);
  for (uint b = begin; b < blocks; b += step) {
    P piece[rows_outputs];
#pragma unroll
    for (uint r = 0; r < rows_outputs; ++r) {
      piece[r].load(at[r], t);
      at[r] += step * block_bytes;
    }
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

template <typename F, typename S, typename T, int M>
kernel void rows(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                 device const uchar* bias [[buffer(2)]], device T* y [[buffer(3)]],
                 constant LinearParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint splits = rows_splits(M), sums = rows_outputs * M;
  threadgroup uint table[Piece<F, S>::table_size];
  threadgroup float partial[splits > 1 ? rows_simdgroups * sums : 1];
  Piece<F, S>::fill_table(table, simdgroup * simd_width + lane, rows_simdgroups * simd_width);

  const uint first = (group * (rows_simdgroups / splits) + simdgroup / splits) * rows_outputs;
  if (splits == 1 && first >= p.N) return;  // the whole SIMD-group leaves together
  float total[rows_outputs][M] = {};
  add_pieces<Piece<F, S>, F>(weight, x, p, first, simdgroup % splits * simd_width + lane, splits * simd_width, table,
                             total);

  float sum = 0.0f;  // lane r * M + m's is output first + r of row m
#pragma unroll
  for (uint r = 0; r < rows_outputs; ++r) {
#pragma unroll
    for (uint m = 0; m < M; ++m) {
      const float all = simd_sum(total[r][m]);
      sum = lane == r * M + m ? all : sum;
    }
  }
  if (splits > 1) {
    if (lane < sums) partial[simdgroup * sums + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup % splits != 0) return;
    for (uint i = 1; i < splits && lane < sums; ++i) sum += partial[(simdgroup + i) * sums + lane];
  }
  const uint n = first + lane / M;
  if (lane < sums && n < p.N) y[ulong(lane % M) * p.N + n] = T(sum + bias_at(bias, p.bias_type, n));
}

}  // namespace qgemv
