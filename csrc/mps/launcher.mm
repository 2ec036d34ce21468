// The operators on MPS: checks, a plan, a dispatch on PyTorch's own stream. Manual reference counting, as in PyTorch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../check.h"
#include "device_check.h"
#include "dispatch.h"
#include "pipelines.h"
#include "tensors.h"
#include "tuning_in_use.h"

namespace qgemv::mps {
namespace {

struct Bias {
  explicit Bias(const std::optional<at::Tensor>& given) {
    if (!given) return;
    const at::ScalarType dtype = given->scalar_type();
    type = dtype == at::kHalf ? half_bias : dtype == at::kBFloat16 ? bfloat_bias : float_bias;
    tensor = (type == float_bias ? given->to(at::kFloat) : *given).contiguous();
  }
  uint32_t type = no_bias;
  at::Tensor tensor;
};

// ---- Operators
void dispatch_product(const Plan<LinearParams>& plan, const at::Tensor& weight, const at::Tensor& x, const Bias& bias,
                      const at::Tensor& y) {
  // Without a bias any buffer will do: it isn't read.
  const Binding bias_or_any = bias.type == no_bias ? Binding{buffer_of(weight), 0} : bind(bias.tensor);
  dispatch<LinearParams, 4>(plan, {bind(weight), bind(x), bias_or_any, bind(y)}, x, y);
}

at::Tensor linear_mps(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                      const std::optional<at::Tensor>& bias) {
  const MatrixSize size = check_linear(x, weight, quant_type, bias);
  const at::Tensor y = at::empty_symint(linear_shape(x, size), x.options());
  if (y.numel() == 0) return y;
  if (x.numel() == 0) return bias ? y.copy_(*bias) : y.zero_();  // K = 0

  const at::Tensor packed = with_dense_rows(weight);
  const Weight w = describe(packed, quant_type, size);
  const at::Tensor rows = aligned_rows(x, w.K);
  const Bias b(bias);
  const bool lane_order_known = needs_lane_order(rows.size(0)) && lane_order_is_known();
  const auto plan = plan_linear(w, describe_rows(rows), b.type, lane_order_known, tuning_in_use());
  dispatch_product(plan, packed, rows, b, y);
  return y;
}

// A weight and what it makes of x.
struct Product {
  at::Tensor packed;
  Weight weight;
  Bias bias;
  at::Tensor y;
};

// Products of one row of x, 2 to fused_weights of them.
void dispatch_fused(const at::Tensor& row, const Product* products, size_t count) {
  std::vector<Weight> weights;
  std::vector<uint32_t> bias_types;
  std::array<Binding, 3 * fused_weights + 1> buffers;
  buffers.fill(bind(row));  // what isn't used has to be some buffer: it isn't read
  for (size_t i = 0; i < count; ++i) {
    const Product& product = products[i];
    weights.push_back(product.weight);
    bias_types.push_back(product.bias.type);
    buffers[i] = bind(product.packed);
    if (product.bias.type != no_bias) buffers[fused_weights + 1 + i] = bind(product.bias.tensor);
    buffers[2 * fused_weights + 1 + i] = bind(product.y);
  }
  const auto plan = plan_fused(weights, describe_rows(row), bias_types, tuning_in_use());
  dispatch<FusedParams, buffers.size()>(plan, buffers, row, products[0].y);
}

// In as few launches as there can be for one row of x; several rows have one for each weight.
std::vector<at::Tensor> fused_linear_mps(const at::Tensor& x, at::TensorList weights, at::IntArrayRef quant_types,
                                         const c10::List<std::optional<at::Tensor>>& biases) {
  const bool one_row = x.dim() > 0 && x.numel() > 0 && x.numel() == x.size(-1);
  if (!one_row) return each_linear(x, weights, quant_types, biases, &linear_mps);
  const at::Tensor row = aligned_rows(x, x.numel());
  std::vector<Product> products;
  const auto prepare = [&](const at::Tensor&, const at::Tensor& weight, int64_t quant_type,
                           const std::optional<at::Tensor>& bias) {
    const MatrixSize size = check_linear(x, weight, quant_type, bias);
    const at::Tensor y = at::empty_symint(linear_shape(x, size), x.options());
    if (y.numel() == 0) return y;
    const at::Tensor packed = with_dense_rows(weight);
    products.push_back({packed, describe(packed, quant_type, size), Bias(bias), y});
    return y;
  };
  std::vector<at::Tensor> ys = each_linear(x, weights, quant_types, biases, prepare);
  for (size_t first = 0; first < products.size(); first += fused_weights) {
    const Product& product = products[first];
    const size_t count = std::min<size_t>(products.size() - first, fused_weights);
    if (count > 1) {
      dispatch_fused(row, &product, count);
    } else {
      const auto plan = plan_linear(product.weight, describe_rows(row), product.bias.type, /*lane_order_known=*/false,
                                    tuning_in_use());
      dispatch_product(plan, product.packed, row, product.bias, product.y);
    }
  }
  return ys;
}

at::Tensor linear_transposed_mps(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_linear_transposed(grad_y, weight, quant_type);
  const auto shape = linear_transposed_shape(grad_y, size);
  if (grad_y.numel() == 0) return at::zeros_symint(shape, grad_y.options());
  const at::Tensor grad_x = at::empty_symint(shape, grad_y.options());
  if (grad_x.numel() == 0) return grad_x;
  const at::Tensor packed = with_dense_rows(weight);
  const Weight w = describe(packed, quant_type, size);
  const at::Tensor rows = whole_columns(grad_y, w.N);
  dispatch_product(plan_transposed(w, describe_rows(rows)), packed, rows, Bias(std::nullopt), grad_x);
  return grad_x;
}

at::Tensor dequantize_mps(const at::Tensor& weight, int64_t quant_type, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_dequantize(weight, quant_type, type);
  const at::Tensor out = at::empty_symint({size.N, size.K}, weight.options().dtype(type));
  if (out.numel() == 0) return out;
  const at::Tensor packed = with_dense_rows(weight);
  const auto plan = plan_dequantize(describe(packed, quant_type, size), dtype_of(type));
  dispatch<DequantizeParams, 2>(plan, {bind(packed), bind(out)}, packed, out);
  return out;
}

// An index that is no row of weight gives a row of NaN: a kernel can't raise, and a check on the host would have to
// wait for the GPU.
at::Tensor embedding_mps(const at::Tensor& indices, const at::Tensor& weight, int64_t quant_type,
                         std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_embedding(indices, weight, quant_type, type);
  const at::Tensor out = at::empty_symint(embedding_shape(indices, size), weight.options().dtype(type));
  if (out.numel() == 0) return out;
  const at::Tensor packed = with_dense_rows(weight), ids = indices.contiguous();
  const auto plan = plan_embedding(describe(packed, quant_type, size), ids.numel(), ids.element_size(), dtype_of(type));
  dispatch<EmbeddingParams, 3>(plan, {bind(packed), bind(ids), bind(out)}, ids, out);
  return out;
}

// Encoding takes the processor: its search is long, and done once.
at::Tensor quantize_mps(const at::Tensor& weight, int64_t quant_type, const std::optional<at::Tensor>& importance) {
  check_quantize(weight, quant_type, importance);
  static const auto quantize = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("torch_qgemv::quantize", "")
                                   .typed<at::Tensor(const at::Tensor&, int64_t, const std::optional<at::Tensor>&)>();
  std::optional<at::Tensor> on_cpu;
  if (importance) on_cpu = importance->cpu();
  return quantize.call(weight.cpu(), quant_type, on_cpu).to(weight.device());
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_qgemv, MPS, m) {
  m.impl("linear", &linear_mps);
  m.impl("fused_linear", &fused_linear_mps);
  m.impl("linear_transposed", &linear_transposed_mps);
  m.impl("dequantize", &dequantize_mps);
  m.impl("embedding", &embedding_mps);
  m.impl("quantize", &quantize_mps);
}

}  // namespace qgemv::mps
