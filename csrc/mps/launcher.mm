// The operators on MPS: checks, a plan, a dispatch on PyTorch's own stream. Manual reference counting, as in PyTorch.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../check.h"
#include "dispatch.h"
#include "pipelines.h"

namespace qgemv::mps {
namespace {

// ---- Tensors
Weight describe(const at::Tensor& weight, int64_t quant_type, const MatrixSize& size) {
  return {format_index(quant_type), size.N.expect_int(), size.K.expect_int(), offset_of(weight),
          uint64_t(weight.stride(0))};
}

// x as [M, K], its rows where whole vectors can be read.
at::Tensor aligned_rows(const at::Tensor& x, int64_t K) {
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, K});
  const uint64_t row_bytes = rows.size(0) > 1 ? rows.stride(0) * rows.element_size() : 0;
  const bool usable = rows.stride(1) == 1 && x_is_aligned(offset_of(rows), row_bytes);
  return usable ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

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
void linear_few_rows(const at::Tensor& x, const at::Tensor& weight, const Weight& w, const Bias& bias,
                     const at::Tensor& y) {
  const at::Tensor rows = aligned_rows(x, w.K);
  const auto plan = plan_gemv(w, rows.size(0), rows.stride(0), dtype_of(x.scalar_type()), bias.type);
  // Without a bias any buffer will do: it isn't read.
  const Binding bias_or_any = bias.type == no_bias ? Binding{buffer_of(weight), 0} : bind(bias.tensor);
  dispatch<LinearParams, 4>(plan, {bind(weight), bind(rows), bias_or_any, bind(y)}, rows, y);
}

void dequantize_into(const at::Tensor& out, const at::Tensor& weight, const Weight& w) {
  const auto plan = plan_dequantize(w, dtype_of(out.scalar_type()));
  dispatch<DequantizeParams, 2>(plan, {bind(weight), bind(out)}, weight, out);
}

void linear_many_rows(const at::Tensor& x, const at::Tensor& weight, const Weight& w, const Bias& bias,
                      const at::Tensor& y) {
  const at::Tensor rows = x.reshape({-1, w.K}).to(at::kFloat), out = y.view({-1, w.N});
  const int64_t tile = tile_rows(w.N, w.K);
  for (int64_t n = 0; n < w.N; n += tile) {
    const int64_t count = std::min(tile, w.N - n);
    const at::Tensor unpacked = at::empty({count, w.K}, x.options().dtype(at::kFloat));
    dequantize_into(unpacked, weight.narrow(0, n, count), rows_of(w, n, count));
    std::optional<at::Tensor> b;
    if (bias.type != no_bias) b = bias.tensor.narrow(0, n, count).to(at::kFloat);
    for (int64_t m = 0; m < rows.size(0); m += max_matmul_rows) {
      const int64_t height = std::min(max_matmul_rows, rows.size(0) - m);
      const at::Tensor part = at::linear(rows.narrow(0, m, height), unpacked, b);
      out.narrow(0, m, height).narrow(1, n, count).copy_(part);
    }
  }
}

at::Tensor linear_mps(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                      const std::optional<at::Tensor>& bias) {
  const MatrixSize size = check_linear(x, weight, quant_type, bias);
  const at::Tensor y = at::empty_symint(linear_shape(x, size), x.options());
  if (y.numel() == 0) return y;
  if (x.numel() == 0) return bias ? y.copy_(*bias) : y.zero_();  // K = 0

  const at::Tensor packed = with_dense_rows(weight);
  const Weight w = describe(packed, quant_type, size);
  if (x.numel() / w.K <= max_gemv_M) {
    linear_few_rows(x, packed, w, Bias(bias), y);
  } else {
    linear_many_rows(x, packed, w, Bias(bias), y);
  }
  return y;
}

// grad_y W in float32, from some unpacked rows of W at a time.
at::Tensor linear_transposed_mps(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_linear_transposed(grad_y, weight, quant_type);
  const auto shape = linear_transposed_shape(grad_y, size);
  const at::Tensor sum = at::zeros_symint(shape, grad_y.options().dtype(at::kFloat));
  if (sum.numel() == 0 || grad_y.numel() == 0) return sum.to(grad_y.scalar_type());
  const at::Tensor packed = with_dense_rows(weight);
  const Weight w = describe(packed, quant_type, size);
  const at::Tensor rows = grad_y.reshape({-1, w.N}).to(at::kFloat), out = sum.view({-1, w.K});
  const int64_t tile = tile_rows(w.N, w.K);
  for (int64_t n = 0; n < w.N; n += tile) {
    const int64_t count = std::min(tile, w.N - n);
    const at::Tensor unpacked = at::empty({count, w.K}, out.options());
    dequantize_into(unpacked, packed.narrow(0, n, count), rows_of(w, n, count));
    for (int64_t m = 0; m < rows.size(0); m += max_matmul_rows) {
      const int64_t height = std::min(max_matmul_rows, rows.size(0) - m);
      const at::Tensor part = rows.narrow(0, m, height).narrow(1, n, count);
      for (int64_t k = 0; k < w.K; k += max_matmul_rows) {
        const int64_t width = std::min(max_matmul_rows, w.K - k);
        out.narrow(0, m, height).narrow(1, k, width).add_(at::mm(part, unpacked.narrow(1, k, width)));
      }
    }
  }
  return sum.to(grad_y.scalar_type());
}

at::Tensor dequantize_mps(const at::Tensor& weight, int64_t quant_type, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_dequantize(weight, quant_type, type);
  const at::Tensor out = at::empty_symint({size.N, size.K}, weight.options().dtype(type));
  if (out.numel() == 0) return out;
  const at::Tensor packed = with_dense_rows(weight);
  dequantize_into(out, packed, describe(packed, quant_type, size));
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
  m.impl("linear_transposed", &linear_transposed_mps);
  m.impl("dequantize", &dequantize_mps);
  m.impl("embedding", &embedding_mps);
  m.impl("quantize", &quantize_mps);
}

}  // namespace qgemv::mps
