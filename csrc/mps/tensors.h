// Tensors as the plans and the kernels want them.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "../check.h"
#include "dispatch.h"
#include "matmul_plan.h"

namespace qgemv::mps {

inline Weight describe(const at::Tensor& weight, int64_t quant_type, const MatrixSize& size) {
  return {format_index(quant_type), size.N.expect_int(), size.K.expect_int(), offset_of(weight),
          uint64_t(weight.stride(0))};
}

// x as [M, K], its rows where whole vectors can be read.
inline at::Tensor aligned_rows(const at::Tensor& x, int64_t K) {
  const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, K});
  const uint64_t row_bytes = rows.size(0) > 1 ? rows.stride(0) * rows.element_size() : 0;
  const bool usable = rows.stride(1) == 1 && x_is_aligned(offset_of(rows), row_bytes);
  return usable ? rows : rows.clone(at::MemoryFormat::Contiguous);
}

inline Rows describe_rows(const at::Tensor& x) { return {x.size(0), x.stride(0), dtype_of(x.scalar_type())}; }

// grad_y as [M, a multiple of 32 columns, zeros behind its own], its rows where whole vectors can be read.
inline at::Tensor whole_columns(const at::Tensor& grad_y, int64_t N) {
  const int64_t columns = grad_y_columns(N);
  if (columns == N) return aligned_rows(grad_y, N);
  const at::Tensor rows = grad_y.reshape({-1, N}), padded = at::zeros({rows.size(0), columns}, grad_y.options());
  padded.narrow(1, 0, N).copy_(rows);
  return padded;
}

}  // namespace qgemv::mps
