// The launches of linear by rows of x, and of its transposed form. Plain C++, as launch_plan.h.
#pragma once
#include "launch_plan.h"

namespace qgemv::mps {

// What a product is made of: M rows of x, x_stride elements apart.
struct Rows {
  int64_t M, x_stride;
  Dtype dtype;
};

constexpr uint64_t groups_of(uint64_t size, uint64_t per_group) { return (size + per_group - 1) / per_group; }

inline LinearParams linear_params(const Weight& w, const Rows& x, uint32_t bias_type) {
  return {w.row_bytes, uint64_t(x.x_stride), uint32_t(w.N), uint32_t(w.K), bias_type, uint32_t(x.M)};
}

// A row of threadgroups, each of which makes `outputs` columns of y for all rows of x.
inline Plan<LinearParams> plan_one_row_of_groups(const Kernel& kernel, const Weight& w, const Rows& x,
                                                 uint32_t bias_type, uint64_t outputs, uint64_t simdgroups) {
  const uint64_t threads = simdgroups * simd_width;
  check_range("linear", "N", w.N, max_uint32 / threads * outputs, w);
  check_range("linear", "K", w.K, max_uint32, w);
  return {kernel, linear_params(w, x, bias_type), {groups_of(uint64_t(w.N), outputs) * threads, 1}, {threads, 1}};
}

// Which of the rows kernels. Eight SIMD-groups that share a threadgroup's outputs hide more of the memory's latency
// than four, but each adds up its own sums, so K has to be long and N short: on an NVIDIA H200, Q4_K with half x, at M
// = 4, eight took 0.94 and 0.88 of four's time at N = 4096 (31 a core), and 1.13 and 1.07 at N = 14336 and 28672.
constexpr int choose_rows(int64_t N, int64_t K, uint32_t cores) { return K >= 4096 && N < 64 * int64_t(cores) ? 0 : 1; }
static_assert(rows_shapes[0] == 8 && rows_shapes[1] == 4);

// M rows of x, 2 to max_rows.
inline Plan<LinearParams> plan_rows(const Weight& w, const Rows& x, uint32_t bias_type, uint32_t cores) {
  constexpr Family families[] = {rows2, rows3, rows4};
  const Family family = families[x.M - 2];
  check_range("linear", "bytes from row to row", int64_t(w.row_bytes), max_gemv_row_bytes, w);
  const int variant = is_aligned(w) ? choose_rows(w.N, w.K, cores) : plain_variant(family);
  return plan_one_row_of_groups({family, w.format, x.dtype, variant}, w, x, bias_type, 4 * rows_outputs,
                                rows_shapes[variant]);
}

// Tiles of y: `rows` of M by matmul_outputs of `columns`. Neighbouring threadgroups have the same columns, so that they
// read the same weights.
inline Plan<LinearParams> plan_tiles_of_y(const char* op, Family family, uint64_t rows, int64_t columns,
                                          const Weight& w, const Rows& x, uint32_t bias_type) {
  const uint64_t threads = 2 * rows;
  check_range(op, "M", x.M, max_uint32 / threads * rows, w);
  check_range(op, "N", w.N, max_uint32, w);
  check_range(op, "K", w.K, max_uint32, w);
  return {kernel_for(family, w, x.dtype),
          linear_params(w, x, bias_type),
          {groups_of(uint64_t(x.M), rows) * threads, groups_of(uint64_t(columns), matmul_outputs)},
          {threads, 1}};
}

// The kernel for M rows of x. One row: gemv, the fastest there. Up to 4: rows, whose multiply-adds need no more than
// the decoded weights. Up to 8: tiles, where the lanes' order in an 8x8 matrix is as it assumes. More: the matrix
// kernel, whatever M. It decodes each weight once for 64 rows, at 5 % of its operations; to unpack the weight for
// another product instead, 8 bytes a weight would be written and read, which at 200 GB/s is the time of 140 rows of
// multiply-adds at 7 TFLOP/s. No Mac has measured either.
inline Plan<LinearParams> plan_linear(const Weight& w, const Rows& x, uint32_t bias_type, bool lane_order_known,
                                      const Tuning& tuning, uint32_t cores = assumed_cores) {
  if (x.M <= 1)
    return plan_gemv(w, x.M, x.x_stride, x.dtype, bias_type, choose_variant(w, w.N, x.dtype, tuning, cores));
  if (x.M <= max_rows) return plan_rows(w, x, bias_type, cores);
  if (x.M <= max_tiles_rows && lane_order_known) {
    return plan_one_row_of_groups(kernel_for(tiles, w, x.dtype), w, x, bias_type, tiles_outputs * tiles_simdgroups,
                                  tiles_simdgroups);
  }
  return x.M <= 32 ? plan_tiles_of_y("linear", matmul32, 32, w.N, w, x, bias_type)
                   : plan_tiles_of_y("linear", matmul64, 64, w.N, w, x, bias_type);
}
// Whether the plan depends on lane_order_known.
constexpr bool needs_lane_order(int64_t M) { return M > max_rows && M <= max_tiles_rows; }

// grad_y W, with M rows of grad_y. These are read 32 columns at a time, whole: N is a multiple of 32, or grad_y has
// been copied into rows of zeros that are one.
constexpr int64_t grad_y_columns(int64_t N) { return int64_t(groups_of(uint64_t(N), 32) * 32); }
inline Plan<LinearParams> plan_transposed(const Weight& w, const Rows& grad_y) {
  return grad_y.M <= 32 ? plan_tiles_of_y("linear_transposed", transposed32, 32, w.K, w, grad_y, no_bias)
                        : plan_tiles_of_y("linear_transposed", transposed64, 64, w.K, w, grad_y, no_bias);
}

}  // namespace qgemv::mps
