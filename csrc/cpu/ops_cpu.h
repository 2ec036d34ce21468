// Between torch's tensors and the kernels.
#pragma once
#include <string_view>

#include "../check.h"
#include "kernels.h"

namespace qgemv {

using cpu::Kernels;
using cpu::Weight;

// The best kernels that can run here, and those of a name; ValueError if those can't.
const Kernels& best_kernels();
const Kernels& kernels_named(std::string_view isa);

cpu::Dtype dtype_of(at::ScalarType type);

// A weight that was checked and has dense rows.
Weight view(const at::Tensor& weight, int64_t quant_type, const MatrixSize& size);

// Items of `bytes_each` bytes, read or written, that are work enough for one thread.
int64_t grain(int64_t bytes_each);

// A row of y, where integers can't stand for the row of x (Kernels::pack).
void linear_exact_row(const Weight& w, const void* x, const float* bias, void* y, cpu::Dtype dtype);

// The operator; expert_linear_transposed calls it for each expert.
at::Tensor linear_transposed_cpu(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type);

}  // namespace qgemv
