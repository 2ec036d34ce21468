// y = x W^T + bias for one row of x: the skeleton that all formats share. Rows of x are the grid's second dimension.
//
// A SIMD-group makes `rows` outputs. L::lanes of its 32 lanes share a block, the next ones take the next block, and all
// go on by `step` blocks until the row ends. Then the lanes' sums are added. Where `splits` SIMD-groups share the
// outputs, each takes 32 / L::lanes blocks in turn, and their sums meet in threadgroup memory.
#pragma once
#include "bias.h"
#include "lanes/iq4.h"
#include "lanes/q2_k.h"
#include "lanes/q3_k.h"
#include "lanes/q4_0.h"
#include "lanes/q4_k.h"
#include "lanes/q5_k.h"
#include "lanes/q6_k.h"
#include "lanes/q8_0.h"

namespace qgemv {

// Adds this lane's part of the outputs first .. first + rows - 1 to total. `stream` counts the groups of L::lanes lanes
// that share the outputs, `streams` says how many there are.
template <typename F, typename L, typename T, uint rows>
inline void accumulate(thread L& part, device const uchar* weight, device const T* x, constant LinearParams& p,
                       uint first, uint stream, uint streams, thread float* total) {
  const uint blocks = p.K / F::block_size, block_bytes = sizeof(typename F::Block), last = p.N - 1;
  first = min(first, last);  // past the last row: that one
  weight += ulong(first) * p.row_bytes + stream * block_bytes;
  x += stream * F::block_size;
  uint at[rows];  // 32 bits, from a 64-bit address: registers are short
  typename L::Data next[rows];
#pragma unroll
  for (uint r = 0; r < rows; ++r) at[r] = min(r, last - first) * uint(p.row_bytes);
  if (L::ahead) {
    // A lane without a block reads the last one, and doesn't use it.
    device const uchar* start = weight - stream * block_bytes + min(stream, blocks - 1) * block_bytes;
#pragma unroll
    for (uint r = 0; r < rows; ++r) next[r] = part.fetch(start + at[r]);
  }
  for (uint b = stream; b < blocks; b += streams) {
    typename L::Data now[rows];
    if (L::ahead) {
      weight += b + streams < blocks ? streams * block_bytes : 0;
#pragma unroll
      for (uint r = 0; r < rows; ++r) {
        now[r] = next[r];
        next[r] = part.fetch(weight + at[r]);
      }
    } else {
#pragma unroll
      for (uint r = 0; r < rows; ++r) now[r] = part.fetch(weight + at[r]);
      weight += streams * block_bytes;
    }
    part.load(x);
    // In two loops, so that one row's sums need not wait for another's.
    typename L::Sums sums[rows];
#pragma unroll
    for (uint r = 0; r < rows; ++r) sums[r] = part.dot(now[r]);
#pragma unroll
    for (uint r = 0; r < rows; ++r) total[r] = part.add(now[r], sums[r], total[r]);
    x += streams * F::block_size;
  }
}

// Wide lanes where the arithmetic counts most: in the kernel for large N.
template <typename F, typename S, typename T, uint rows, uint splits>
using GemvLane = Lane<F, S, T, rows == 8 && splits == 1>;

// What a threadgroup needs of its memory.
template <typename L, uint rows, uint simdgroups, uint splits>
struct GemvMemory {
  enum { table = L::table_words / 2 + 1, partial = splits > 1 ? simdgroups * rows : 1 };
};

// The outputs of threadgroup `group` for the first row of x that `row` has.
template <typename F, typename S, typename T, uint rows, uint simdgroups, uint splits, typename Rows>
inline void gemv_outputs(device const uchar* weight, device const T* x, Rows row, device T* y, constant LinearParams& p,
                         uint group, uint simdgroup, uint lane, threadgroup ulong* table, threadgroup float* partial) {
  using L = GemvLane<F, S, T, rows, splits>;
  L::fill_table((threadgroup uint*)table, simdgroup * simd_width + lane, simdgroups * simd_width);

  const uint first = (group * (simdgroups / splits) + simdgroup / splits) * rows;
  if (splits == 1 && first >= p.N) return;  // the whole SIMD-group leaves together
  L part(lane % L::lanes, (threadgroup const uint*)table);
  const uint stream = (simdgroup % splits * simd_width + lane) / L::lanes;
  float total[rows] = {};
  accumulate<F, L, T, rows>(part, weight, x + row.x_row(0) * p.x_stride, p, first, stream,
                            splits * simd_width / L::lanes, total);

  float sum = 0.0f;  // lane r's is output first + r
#pragma unroll
  for (uint r = 0; r < rows; ++r) {
    const float all = simd_sum(total[r]) * L::unit;
    sum = lane == r ? all : sum;
  }
  if (splits > 1) {
    if (lane < rows) partial[simdgroup * rows + lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup % splits != 0) return;
    for (uint i = 1; i < splits && lane < rows; ++i) sum += partial[(simdgroup + i) * rows + lane];
  }
  if (lane < rows && first + lane < p.N) y[row.y_row(0) * p.N + first + lane] = T(sum + row.term(first + lane));
}

template <typename F, typename S, typename T, uint rows, uint simdgroups, uint splits>
[[kernel, max_total_threads_per_threadgroup(simd_width* simdgroups)]] void gemv(
    device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* bias [[buffer(2)]],
    device T* y [[buffer(3)]], constant LinearParams& p [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  using Memory = GemvMemory<GemvLane<F, S, T, rows, splits>, rows, simdgroups, splits>;
  threadgroup ulong table[Memory::table];  // aligned for pairs of words
  threadgroup float partial[Memory::partial];
  const PlainRows row = {group.y, 1, bias, p.bias_type};
  gemv_outputs<F, S, T, rows, simdgroups, splits>(weight, x, row, y, p, group.x, simdgroup, lane, table, partial);
}

}  // namespace qgemv
