// y = x W^T + bias for one row of x: the skeleton that all formats share. Rows of x are the grid's second dimension.
//
// A SIMD-group makes rows_per_simdgroup outputs. L::lanes of its 32 lanes share a block, the next ones take the next
// block, and all go on by `step` blocks until the row ends. Then the lanes' sums are added.
#pragma once
#include "bias.h"
#include "lanes/iq4.h"
#include "lanes/q4_k.h"
#include "lanes/q5_k.h"
#include "lanes/q6_k.h"
#include "lanes/q8_0.h"

namespace qgemv {

// Adds this lane's part of the outputs first .. first + rows_per_simdgroup - 1 to total.
template <typename F, typename L, typename T>
inline void accumulate(thread L& part, device const uchar* weight, device const T* x, constant LinearParams& p,
                       uint first, uint lane, thread float* total) {
  const uint blocks = p.K / F::block_size, step = simd_width / L::lanes, start = lane / L::lanes;
  const uint block_bytes = sizeof(typename F::Block);
  device const uchar* at[rows_per_simdgroup];
#pragma unroll
  for (uint r = 0; r < rows_per_simdgroup; ++r) {
    at[r] = weight + ulong(min(first + r, p.N - 1)) * p.row_bytes + start * block_bytes;  // past the last row: that one
  }
  x += start * F::block_size;
  for (uint b = start; b < blocks; b += step) {
    part.load(x);
#pragma unroll
    for (uint r = 0; r < rows_per_simdgroup; ++r) {
      total[r] += part.dot(at[r]);
      at[r] += step * block_bytes;
    }
    x += step * F::block_size;
  }
}

template <typename F, typename L, typename T>
kernel void gemv(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                 device const uchar* bias [[buffer(2)]], device T* y [[buffer(3)]],
                 constant LinearParams& p [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                 uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint table[L::table_words + 1];
  L::fill_table(table, simdgroup * simd_width + lane, simdgroups_per_group * simd_width);

  const uint first = (group.x * simdgroups_per_group + simdgroup) * rows_per_simdgroup;
  if (first >= p.N) return;  // the whole SIMD-group leaves together
  L part(lane % L::lanes, table);
  float total[rows_per_simdgroup] = {};
  accumulate<F>(part, weight, x + group.y * p.x_stride, p, first, lane, total);

#pragma unroll
  for (uint r = 0; r < rows_per_simdgroup; ++r) {
    const float sum = simd_sum(total[r]) * L::unit;
    if (lane == r && first + r < p.N) {
      y[ulong(group.y) * p.N + first + r] = T(sum + bias_at(bias, p.bias_type, first + r));
    }
  }
}

}  // namespace qgemv
