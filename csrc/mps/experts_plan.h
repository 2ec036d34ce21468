// The launches of expert_linear and of its transposed form. Plain C++, as launch_plan.h.
#pragma once
#include "matmul_plan.h"

namespace qgemv::mps {

// Weights of `count` experts, `bytes` from one to the next.
struct Experts {
  Weight each;  // the first one
  int64_t count;
  uint64_t bytes;
};

// `rows` of y, with an id of index_bytes bytes each; rows_per_x neighbours have the same row of x.
struct ExpertRows {
  int64_t rows, rows_per_x;
  uint32_t index_bytes;
};

// The kernels of a format ask for an alignment, a power of two, of every expert.
constexpr Weight with_alignment_of_all(const Experts& experts) {
  Weight w = experts.each;
  w.offset |= experts.bytes;
  return w;
}

inline ExpertParams expert_params(const LinearParams& product, const Experts& experts, const ExpertRows& y) {
  return {product, experts.bytes, uint32_t(experts.count), uint32_t(y.rows_per_x), y.index_bytes, 0};
}

inline void check_experts_range(const char* op, const Experts& experts, const ExpertRows& y) {
  // Tiles of 64 threads, no more than there are rows.
  check_range(op, "number of ids", y.rows, max_uint32 / 64, experts.each);
  check_range(op, "E", experts.count, max_uint32 - 1, experts.each);
}

// One launch, in which each row reads its expert's weight: for so few rows of so many experts that hardly two of them
// have the same one, as the eight of a token. Then sorting them would save little reading, and take a launch.
constexpr int64_t most_expert_gemv_rows = 16;
constexpr bool takes_expert_gemv(int64_t rows, int64_t experts) {
  return rows == 1 || (rows <= most_expert_gemv_rows && 2 * rows <= experts);
}

// All rows' outputs share the GPU, so they count together in the choice of the kernel.
inline Plan<ExpertParams> plan_expert_gemv(const Experts& experts, const ExpertRows& y, const Rows& x,
                                           const Tuning& tuning) {
  const char* op = "expert_linear";
  const Weight w = with_alignment_of_all(experts);
  check_experts_range(op, experts, y);
  check_range(op, "N", w.N, max_gemv_N, w);
  check_range(op, "K", w.K, max_uint32, w);
  check_range(op, "bytes from row to row", int64_t(w.row_bytes), max_gemv_row_bytes, w);
  const int variant = choose_variant(w, w.N * y.rows, x.dtype, tuning);
  const GemvShape shape = gemv_shapes[variant];
  return {{expert_gemv, w.format, x.dtype, variant},
          expert_params(linear_params(w, x, no_bias), experts, y),
          {groups_of(uint64_t(w.N), shape.outputs()) * shape.threads(), uint64_t(y.rows)},
          {shape.threads(), 1}};
}

// More rows are sorted by their experts on the GPU and cut into tiles, each of which reads its expert's weight once.
// How many tiles there will be, the processor doesn't know: as many as there may be are launched, and those without
// rows end at once.
struct RoutedPlan {
  Plan<RouteParams> routes;
  Plan<ExpertParams> product;
};

// Tiles of `tile_rows` rows: whole ones, and one that isn't for each expert that has rows.
constexpr uint64_t most_tiles(const Experts& experts, int64_t rows, uint32_t tile_rows) {
  return uint64_t(rows) / tile_rows + uint64_t(std::min(experts.count + 1, rows));
}

inline Plan<RouteParams> plan_routes(const Experts& experts, const ExpertRows& y, Dtype dtype, uint32_t tile_rows) {
  const uint64_t threads = uint64_t(experts.count) + 1;
  return {{routes, experts.each.format, dtype, 0},
          {uint32_t(y.rows), uint32_t(experts.count), tile_rows, uint32_t(most_tiles(experts, y.rows, tile_rows)),
           y.index_bytes},
          {threads, 1},
          {std::min<uint64_t>(threads, simd_width), 1}};
}

// Matrix kernels: tiles of expert_tile_rows rows by matmul_outputs of `columns`.
inline RoutedPlan plan_expert_tiles_of_y(const char* op, Family family, int64_t columns, const Experts& experts,
                                         const ExpertRows& y, const Rows& x) {
  check_experts_range(op, experts, y);
  const int64_t in_tiles = int64_t(most_tiles(experts, y.rows, expert_tile_rows)) * expert_tile_rows;
  const Plan<LinearParams> product = plan_tiles_of_y(
      op, family, expert_tile_rows, columns, with_alignment_of_all(experts), {in_tiles, x.x_stride, x.dtype}, no_bias);
  return {plan_routes(experts, y, x.dtype, expert_tile_rows),
          {product.kernel, expert_params(product.params, experts, y), product.grid, product.threadgroup}};
}

// Up to 8 rows an expert on average: tiles of 8 rows, where the lanes' order in an 8x8 matrix is as they assume. More:
// the matrix kernel.
constexpr bool takes_expert_tiles(int64_t rows, int64_t experts) { return rows <= max_tiles_rows * experts; }

inline RoutedPlan plan_expert_linear(const Experts& experts, const ExpertRows& y, const Rows& x,
                                     bool lane_order_known) {
  const char* op = "expert_linear";
  if (!takes_expert_tiles(y.rows, experts.count) || !lane_order_known)
    return plan_expert_tiles_of_y(op, expert_matmul, experts.each.N, experts, y, x);
  check_experts_range(op, experts, y);
  const Weight w = with_alignment_of_all(experts);
  const Plan<LinearParams> product = plan_one_row_of_groups(kernel_for(expert_tiles, w, x.dtype), w, x, no_bias,
                                                            tiles_outputs * tiles_simdgroups, tiles_simdgroups);
  return {plan_routes(experts, y, x.dtype, max_tiles_rows),
          {product.kernel,
           expert_params(product.params, experts, y),
           {product.grid.x, most_tiles(experts, y.rows, max_tiles_rows)},
           product.threadgroup}};
}

// grad_y W, with a row of grad_y for each id.
inline RoutedPlan plan_expert_transposed(const Experts& experts, const ExpertRows& y, const Rows& grad_y) {
  return plan_expert_tiles_of_y("expert_linear_transposed", expert_transposed, experts.each.K, experts, y, grad_y);
}

}  // namespace qgemv::mps
