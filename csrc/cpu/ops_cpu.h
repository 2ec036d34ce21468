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

}  // namespace qgemv
