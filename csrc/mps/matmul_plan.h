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
inline Plan<LinearParams> plan_one_row_of_groups(Family family, const Weight& w, const Rows& x, uint32_t bias_type,
                                                 uint64_t outputs, uint64_t simdgroups) {
  const uint64_t threads = simdgroups * simd_width;
  check_range("linear", "N", w.N, max_uint32 / threads * outputs, w);
  check_range("linear", "K", w.K, max_uint32, w);
  return {kernel_for(family, w, x.dtype),
          linear_params(w, x, bias_type),
          {groups_of(uint64_t(w.N), outputs) * threads, 1},
          {threads, 1}};
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
                                      uint32_t cores = assumed_cores) {
  if (x.M <= 1) return plan_gemv(w, x.M, x.x_stride, x.dtype, bias_type, cores);
  if (x.M <= max_rows) {
    constexpr Family families[] = {rows2, rows3, rows4};
    const uint64_t outputs = rows_outputs * (rows_simdgroups / rows_splits(uint32_t(x.M)));
    return plan_one_row_of_groups(families[x.M - 2], w, x, bias_type, outputs, rows_simdgroups);
  }
  if (x.M <= max_tiles_rows && lane_order_known) {
    return plan_one_row_of_groups(tiles, w, x, bias_type, tiles_outputs * tiles_simdgroups, tiles_simdgroups);
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
