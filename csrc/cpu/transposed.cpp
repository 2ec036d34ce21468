// grad_x = grad_y W on the CPU. A task is 256 columns of W and up to 512 rows of grad_y. It unpacks a few rows of its
// columns at a time and adds their products to its sums, so the unpacked weights never leave the cache. Each result is
// the sum of one task, in a fixed order: the number of threads doesn't change it.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "ops_cpu.h"

namespace qgemv {
namespace {

using cpu::transposed_columns;
using cpu::transposed_stride;

constexpr int64_t task_tokens = 512;
constexpr int64_t group = 64;  // rows of W unpacked together
constexpr int64_t run = 1024;  // rows in one sum before it joins the total: float32 sums of many terms lose digits

struct Product {
  const cpu::Kernels& kernels;
  const Weight& w;
  int64_t tokens;        // rows of grad_y
  const float* factors;  // grad_y as [groups of rows of W][tokens][group]
  char* grad_x;          // [tokens, K] of `dtype`
  cpu::Dtype dtype;

  // Columns from `first` and rows of grad_y from `token`, at most `count` of them.
  void task(int64_t first, int64_t token, int64_t count, std::vector<float>& buffer) const {
    const int64_t columns = std::min(transposed_columns, w.K - first), size = count * transposed_stride;
    buffer.assign(group * transposed_stride + 2 * size, 0.0f);
    float *unpacked = buffer.data(), *sums = unpacked + group * transposed_stride, *totals = sums + size;
    for (int64_t begin = 0; begin < w.N; begin += run) {
      const int64_t end = std::min(w.N, begin + run);
      std::fill(sums, sums + size, 0.0f);
      for (int64_t n = begin; n < end; n += group) {
        const int64_t rows = std::min(group, end - n);
        for (int64_t r = 0; r < rows; ++r)
          kernels.dequantize_row(w, n + r, first, columns, cpu::Dtype::f32, unpacked + r * transposed_stride);
        kernels.add_products({factors + n * tokens + token * group, group, count, unpacked, rows, sums});
      }
      for (int64_t i = 0; i < size; ++i) totals[i] += sums[i];
    }
    const int64_t item = dtype == cpu::Dtype::f32 ? 4 : 2;
    for (int64_t m = 0; m < count; ++m)
      cpu::from_float(totals + m * transposed_stride, dtype, columns, grad_x + ((token + m) * w.K + first) * item);
  }
};

// What a task reads together lies together: rows of grad_y far apart would push one another out of the cache.
at::Tensor regroup(const at::Tensor& grad_y, int64_t tokens, int64_t N, cpu::Dtype dtype) {
  const at::Tensor rows = grad_y.contiguous();
  const at::Tensor factors = at::empty({(N + group - 1) / group * group * tokens}, at::kFloat);
  const auto* from = static_cast<const char*>(rows.const_data_ptr());
  auto* to = static_cast<float*>(factors.mutable_data_ptr());
  const int64_t item = grad_y.element_size();
  at::parallel_for(0, tokens, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, N)), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      for (int64_t n = 0; n < N; n += group)
        cpu::to_float(from + (m * N + n) * item, dtype, std::min(group, N - n), to + n * tokens + m * group);
  });
  return factors;
}

at::Tensor linear_transposed_with(const cpu::Kernels& kernels, const at::Tensor& grad_y, const at::Tensor& weight,
                                  int64_t quant_type) {
  const MatrixSize size = check_linear_transposed(grad_y, weight, quant_type);
  const at::Tensor grad_x = at::empty_symint(linear_transposed_shape(grad_y, size), grad_y.options());
  if (grad_x.numel() == 0) return grad_x;
  const at::Tensor packed = with_dense_rows(weight);
  const Weight w = view(packed, quant_type, size);
  const cpu::Dtype dtype = dtype_of(grad_y.scalar_type());
  const int64_t tokens = grad_x.numel() / w.K;
  const at::Tensor factors = regroup(grad_y, tokens, w.N, dtype);
  const Product product{kernels,
                        w,
                        tokens,
                        static_cast<const float*>(factors.const_data_ptr()),
                        static_cast<char*>(grad_x.mutable_data_ptr()),
                        dtype};

  const int64_t blocks = (tokens + task_tokens - 1) / task_tokens;
  const int64_t tasks = (w.K + transposed_columns - 1) / transposed_columns * blocks;
  const int64_t grain = std::max<int64_t>(1, 65536 / (transposed_columns * std::max<int64_t>(1, w.N)));
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t token = t % blocks * task_tokens;
      product.task(t / blocks * transposed_columns, token, std::min(task_tokens, tokens - token), buffer);
    }
  });
  return grad_x;
}

at::Tensor linear_transposed_isa(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type,
                                 c10::string_view isa) {
  return linear_transposed_with(kernels_named(isa), grad_y, weight, quant_type);
}

}  // namespace

at::Tensor linear_transposed_cpu(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type) {
  return linear_transposed_with(best_kernels(), grad_y, weight, quant_type);
}

TORCH_LIBRARY_IMPL(torch_qgemv, CPU, m) {
  m.impl("linear_transposed", &linear_transposed_cpu);
  m.impl("_linear_transposed_isa", &linear_transposed_isa);
}

}  // namespace qgemv
