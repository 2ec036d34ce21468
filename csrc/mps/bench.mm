// What the benchmark measures an Apple GPU with (csrc/bench.cpp has the schemas), apart from the operators proper.
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>

#include "../check.h"
#include "bench_plan.h"
#include "compile.h"
#include "dispatch.h"
#include "metal_sources.inc"  // written by metal/embed.py

namespace qgemv::mps {

// Made on first use and kept for the process.
id<MTLComputePipelineState> pipeline(const BenchKernel& kernel) {
  static std::mutex mutex;
  static id<MTLLibrary> library;
  static id<MTLComputePipelineState> pipelines[bench_kernel_count];
  const std::lock_guard<std::mutex> lock(mutex);
  id<MTLComputePipelineState>& kept = pipelines[kernel.index()];
  if (!kept) {
    @autoreleasepool {
      id<MTLDevice> device = device_or_throw();
      if (!library) library = compile(device, bench_metal, nil, "the benchmark");
      kept = pipeline_of(device, library, kernel.name());
    }
  }
  return kept;
}

namespace {

at::Tensor read_mps(const at::Tensor& bytes, int64_t vectors_per_thread) {
  TORCH_CHECK_VALUE(bytes.is_contiguous(), "torch_qgemv._read: bytes must be contiguous");
  TORCH_CHECK_VALUE(offset_of(bytes) % 16 == 0, "torch_qgemv._read: bytes must start at a multiple of 16 bytes");
  TORCH_CHECK_VALUE(vectors_per_thread > 0, "torch_qgemv._read: vectors_per_thread must be positive, got ",
                    vectors_per_thread);
  const auto plan = plan_read(bytes.nbytes(), vectors_per_thread);
  const at::Tensor sums = at::empty({int64_t(read_sums(plan))}, bytes.options().dtype(at::kInt));
  dispatch<ReadParams, 2>(plan, {bind(bytes), bind(sums)}, bytes, sums);
  return sums;
}

double fma_rate_mps(at::Tensor& sums, int64_t passes) {
  TORCH_CHECK_VALUE(sums.is_contiguous() && sums.scalar_type() == at::kFloat,
                    "torch_qgemv._fma_rate: sums must be contiguous and of float32");
  TORCH_CHECK_VALUE(sums.numel() > 0 && uint64_t(sums.numel()) <= max_uint32 && passes > 0 && passes <= INT32_MAX,
                    "torch_qgemv._fma_rate: got ", sums.numel(), " sums and ", passes, " passes");
  const auto plan = plan_fma_rate(sums.numel(), uint32_t(passes));
  dispatch<FmaParams, 1>(plan, {bind(sums)}, sums, sums);
  return fma_flops(plan);
}

at::Tensor published_mps(const at::Tensor& x, const at::Tensor& weight) {
  const MatrixSize size = check_linear(x, weight, Q4_K::id, std::nullopt);
  const int64_t N = size.N.expect_int(), K = size.K.expect_int();
  TORCH_CHECK_VALUE(x.numel() == K && x.is_contiguous(), "torch_qgemv._published: x must be one row of K = ", K,
                    " neighbouring values, got shape ", x.sizes());
  TORCH_CHECK_VALUE(weight.is_contiguous() && offset_of(weight) % 4 == 0,
                    "torch_qgemv._published: weight must be contiguous and start at a multiple of 4 bytes");
  const at::Tensor y = at::empty_symint(linear_shape(x, size), x.options());
  if (y.numel() == 0 || K == 0) return K == 0 ? y.zero_() : y;
  const Weight w{format_index(Q4_K::id), N, K, offset_of(weight), uint64_t(weight.stride(0))};
  const auto plan = plan_published(w, dtype_of(x.scalar_type()));
  dispatch<LinearParams, 3>(plan, {bind(weight), bind(x), bind(y)}, x, y);
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_qgemv, MPS, m) {
  m.impl("_read", &read_mps);
  m.impl("_fma_rate", &fma_rate_mps);
  m.impl("_published", &published_mps);
}

}  // namespace qgemv::mps
