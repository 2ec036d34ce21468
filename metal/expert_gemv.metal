// The kernels expert_gemv_<format>_<type>_..., which are those of gemv.metal for rows that have a weight each: the
// grid's second dimension is rows of y.
#include "gemv.h"
#include "routes.h"

namespace qgemv {

template <typename F, typename S, typename T, uint rows, uint simdgroups, uint splits>
[[kernel, max_total_threads_per_threadgroup(simd_width* simdgroups)]] void expert_gemv(
    device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]], device const uchar* ids [[buffer(2)]],
    device T* y [[buffer(3)]], constant ExpertParams& p [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  using Memory = GemvMemory<GemvLane<F, S, T, rows, splits>, rows, simdgroups, splits>;
  threadgroup ulong table[Memory::table];  // aligned for pairs of words
  threadgroup float partial[Memory::partial];
  const uint expert = expert_of(ids, group.y, p.index_bytes, p.experts);
  const OneRow row = {group.y, p.rows_per_x, term_of(expert, p)};
  gemv_outputs<F, S, T, rows, simdgroups, splits>(weight_of(weight, expert, p), x, row, y, p.product, group.x,
                                                  simdgroup, lane, table, partial);
}

#define GEMV(name, F, S, T, ...) \
  template [[host_name(name)]] [[kernel]] decltype(expert_gemv<F, S, T, __VA_ARGS__>) expert_gemv<F, S, T, __VA_ARGS__>;
#define GEMV_SHAPE(F, T, rows, simdgroups, splits) \
  GEMV("expert_gemv_" #F "_" #T "_r" #rows "_s" #simdgroups "_k" #splits, F, Aligned, T, rows, simdgroups, splits)
#define GEMV_PLAIN(F, T, ...) GEMV("expert_gemv_" #F "_" #T "_plain", F, Anywhere, T, __VA_ARGS__)
#define GEMV_TYPE(F, T) QGEMV_GEMV_SHAPES(GEMV_SHAPE, F, T) QGEMV_PLAIN_GEMV_SHAPE(GEMV_PLAIN, F, T)
QGEMV_EACH_TYPE(GEMV_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
