// expert_linear and its transposed form on MPS. An id that is no expert gives a row of NaN, as an index that is no row
// does in embedding.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#include "../check.h"
#include "device_check.h"
#include "dispatch.h"
#include "experts_plan.h"
#include "pipelines.h"
#include "tensors.h"
#include "tuning_in_use.h"

namespace qgemv::mps {
namespace {

Experts describe_experts(const at::Tensor& weight, int64_t quant_type, const MatrixSize& size) {
  const Weight each{format_index(quant_type), size.N.expect_int(), size.K.expect_int(), offset_of(weight),
                    uint64_t(weight.stride(1))};
  return {each, weight.size(0), uint64_t(weight.stride(0))};
}

// Two launches: the rows' order and tiles, in memory of their own, then the products.
void dispatch_routed(const RoutedPlan& plan, const at::Tensor& weight, const at::Tensor& x, const at::Tensor& ids,
                     const at::Tensor& y) {
  const int64_t rows = ids.numel(), tile_words = sizeof(RouteTile) / 4;
  const at::Tensor memory = at::empty({rows + tile_words * plan.routes.params.tiles}, ids.options().dtype(at::kInt));
  const Binding order = bind(memory), tiles{order.buffer, order.offset + 4 * NSUInteger(rows)};
  dispatch<RouteParams, 3>(plan.routes, {bind(ids), order, tiles}, ids, memory);
  dispatch<ExpertParams, 5>(plan.product, {bind(weight), bind(x), order, tiles, bind(y)}, x, y);
}

at::Tensor expert_linear_mps(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids, int64_t quant_type) {
  const MatrixSize size = check_expert_linear(x, weight, ids, quant_type);
  const at::Tensor y = at::empty_symint(with_size(ids, size.N), x.options());
  if (y.numel() == 0) return y;
  if (weight.size(0) == 0) return y.fill_(std::numeric_limits<double>::quiet_NaN());
  if (size.K == 0) return y.zero_();

  const at::Tensor packed = with_dense_rows(weight), numbers = ids.contiguous();
  const Experts experts = describe_experts(packed, quant_type, size);
  const at::Tensor rows = aligned_rows(x, experts.each.K);
  const ExpertRows y_rows{ids.numel(), ids.numel() / rows.size(0), uint32_t(ids.element_size())};
  if (takes_expert_gemv(y_rows.rows, experts.count)) {
    const auto plan = plan_expert_gemv(experts, y_rows, describe_rows(rows), tuning_in_use());
    dispatch<ExpertParams, 4>(plan, {bind(packed), bind(rows), bind(numbers), bind(y)}, rows, y);
    return y;
  }
  const bool lane_order_known = takes_expert_tiles(y_rows.rows, experts.count) && lane_order_is_known();
  dispatch_routed(plan_expert_linear(experts, y_rows, describe_rows(rows), lane_order_known), packed, rows, numbers, y);
  return y;
}

at::Tensor expert_linear_transposed_mps(const at::Tensor& grad_y, const at::Tensor& weight, const at::Tensor& ids,
                                        int64_t quant_type) {
  const MatrixSize size = check_expert_linear_transposed(grad_y, weight, ids, quant_type);
  const at::Tensor grad_x = at::empty_symint(with_size(ids, size.K), grad_y.options());
  if (grad_x.numel() == 0) return grad_x;
  if (weight.size(0) == 0) return grad_x.fill_(std::numeric_limits<double>::quiet_NaN());
  if (size.N == 0) return grad_x.zero_();

  const at::Tensor packed = with_dense_rows(weight), numbers = ids.contiguous();
  const Experts experts = describe_experts(packed, quant_type, size);
  const at::Tensor rows = whole_columns(grad_y, experts.each.N);
  const ExpertRows y_rows{ids.numel(), 1, uint32_t(ids.element_size())};
  dispatch_routed(plan_expert_transposed(experts, y_rows, describe_rows(rows)), packed, rows, numbers, grad_x);
  return grad_x;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_qgemv, MPS, m) {
  m.impl("expert_linear", &expert_linear_mps);
  m.impl("expert_linear_transposed", &expert_linear_transposed_mps);
}

}  // namespace qgemv::mps
