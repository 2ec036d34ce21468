// The kernel fused_<type>: y = x W^T + bias for one row of x and up to fused_weights weights in one launch. Each
// threadgroup makes outputs of one weight, by the code of the gemv kernel that would make them in a launch of its own,
// and with the same result.
//
// The launcher defines QGEMV_CASES, the gemv kernels that the weights need, _(number, format, storage, rows, splits),
// and QGEMV_SIMDGROUPS, those of a threadgroup, a multiple of every `splits`.
#include "gemv.h"

#ifndef QGEMV_CASES  // an example, for tools that look at this file alone
#define QGEMV_CASES(_) _(0, Q4_K, Aligned, 8, 2) _(1, Q6_K, Anywhere, 4, 1)
#define QGEMV_SIMDGROUPS 2
#endif

namespace qgemv {

template <typename F, typename S, typename T, uint rows, uint splits>
using FusedMemory = GemvMemory<GemvLane<F, S, T, rows, splits>, rows, QGEMV_SIMDGROUPS, splits>;

constexpr uint larger(uint a, uint b) { return a > b ? a : b; }

// What the cases need at most of a threadgroup's memory.
#define QGEMV_TABLE(number, F, S, rows, splits) size = larger(size, FusedMemory<F, S, T, rows, splits>::table);
#define QGEMV_PARTIAL(number, F, S, rows, splits) size = larger(size, FusedMemory<F, S, T, rows, splits>::partial);
template <typename T>
constexpr uint table_size() {
  uint size = 0;
  QGEMV_CASES(QGEMV_TABLE)
  return size;
}
template <typename T>
constexpr uint partial_size() {
  uint size = 0;
  QGEMV_CASES(QGEMV_PARTIAL)
  return size;
}

template <typename P>
inline P pick(uint i, P first, P second, P third, P fourth) {
  return i < 2 ? (i == 0 ? first : second) : (i == 2 ? third : fourth);
}

#define QGEMV_CASE(number, F, S, rows, splits) \
  if (p.part[i].kernel_case == number)         \
    gemv_outputs<F, S, T, rows, simdgroups, splits>(weight, x, row, y, product, group, simdgroup, lane, table, partial);
template <typename T, uint simdgroups>
[[kernel, max_total_threads_per_threadgroup(simd_width* simdgroups)]] void fused(
    device const uchar* weight0 [[buffer(0)]], device const uchar* weight1 [[buffer(1)]],
    device const uchar* weight2 [[buffer(2)]], device const uchar* weight3 [[buffer(3)]],
    device const T* x [[buffer(4)]], device const uchar* bias0 [[buffer(5)]], device const uchar* bias1 [[buffer(6)]],
    device const uchar* bias2 [[buffer(7)]], device const uchar* bias3 [[buffer(8)]], device T* y0 [[buffer(9)]],
    device T* y1 [[buffer(10)]], device T* y2 [[buffer(11)]], device T* y3 [[buffer(12)]],
    constant FusedParams& p [[buffer(13)]], uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong table[table_size<T>()];  // aligned for pairs of words
  threadgroup float partial[partial_size<T>()];
  uint i = 0;
  while (group >= p.part[i].groups) group -= p.part[i++].groups;
  device const uchar* weight = pick(i, weight0, weight1, weight2, weight3);
  device T* y = pick(i, y0, y1, y2, y3);
  constant LinearParams& product = p.part[i].product;
  const PlainRows row = {0, 1, pick(i, bias0, bias1, bias2, bias3), product.bias_type};
  QGEMV_CASES(QGEMV_CASE)
}

#define FUSED(name, T) \
  template [[host_name(name)]] [[kernel]] decltype(fused<T, QGEMV_SIMDGROUPS>) fused<T, QGEMV_SIMDGROUPS>;
#define FUSED_TYPE(_, T) FUSED("fused_" #T, T)
QGEMV_EACH_TYPE(FUSED_TYPE, )

}  // namespace qgemv
