// Float matrices to GGUF blocks. The encoders are in encode.h.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "ops_cpu.h"

namespace qgemv {
namespace {

// As floats with a mean of 1; all 0 where all are 0.
at::Tensor relative(const at::Tensor& importance) {
  const at::Tensor out = importance.to(at::kDouble).contiguous().clone();
  auto* values = static_cast<double*>(out.mutable_data_ptr());
  double sum = 0;
  for (int64_t k = 0; k < out.numel(); ++k) {
    TORCH_CHECK_VALUE(values[k] >= 0 && std::isfinite(values[k]), "torch_qgemv.quantize: importance[", k, "] is ",
                      values[k], ", but it must be finite and not negative");
    sum += values[k];
  }
  if (sum > 0)
    for (int64_t k = 0; k < out.numel(); ++k) values[k] *= double(out.numel()) / sum;
  return out.to(at::kFloat);
}

[[noreturn]] void refuse(const at::Tensor& values, int64_t row, const Format& format) {
  const bool finite = values.select(0, row).isfinite().all().item<bool>();
  TORCH_CHECK_VALUE(finite, "torch_qgemv.quantize: weight ", values.sizes(), " has a NaN or an infinity in row ", row);
  TORCH_CHECK_VALUE(false, "torch_qgemv.quantize: weight ", values.sizes(), " has values in row ", row,
                    " that are too large for the float16 scales of ", format.name);
}

at::Tensor quantize_with(const Kernels& kernels, const at::Tensor& weight, int64_t quant_type,
                         const std::optional<at::Tensor>& importance) {
  const MatrixSize size = check_quantize(weight, quant_type, importance);
  const Format& format = check_quant_type("quantize", quant_type);
  const auto shape = quantized_shape(size, quant_type);
  const at::Tensor out = at::empty_symint(shape, weight.options().dtype(at::kByte));
  const at::Tensor weights = importance ? relative(*importance) : at::Tensor();
  if (out.numel() == 0) return out;
  const bool narrow = weight.scalar_type() == at::kHalf || weight.scalar_type() == at::kBFloat16;
  const at::Tensor values = (narrow ? weight : weight.to(at::kFloat)).contiguous();
  const int64_t N = size.N.expect_int(), K = size.K.expect_int();
  const cpu::QuantizeArgs args{quant_type,
                               values.const_data_ptr(),
                               importance ? static_cast<const float*>(weights.const_data_ptr()) : nullptr,
                               N,
                               K,
                               dtype_of(values.scalar_type()),
                               static_cast<uint8_t*>(out.mutable_data_ptr())};
  constexpr int64_t none = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> refused{none};
  const int64_t blocks = N * (K / format.block_size), batches = (blocks + cpu::panel_rows - 1) / cpu::panel_rows;
  at::parallel_for(0, batches, 1, [&](int64_t begin, int64_t end) {
    const int64_t block = kernels.quantize(args, begin, end);
    int64_t first = refused;
    while (block >= 0 && block < first && !refused.compare_exchange_weak(first, block)) {
    }
  });
  if (refused != none) refuse(values, refused / (K / format.block_size), format);
  return out;
}

at::Tensor quantize_cpu(const at::Tensor& weight, int64_t quant_type, const std::optional<at::Tensor>& importance) {
  return quantize_with(best_kernels(), weight, quant_type, importance);
}

at::Tensor quantize_isa(const at::Tensor& weight, int64_t quant_type, const std::optional<at::Tensor>& importance,
                        c10::string_view isa) {
  return quantize_with(kernels_named(isa), weight, quant_type, importance);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_qgemv, CPU, m) {
  m.impl("quantize", &quantize_cpu);
  m.impl("_quantize_isa", &quantize_isa);
}

}  // namespace qgemv
