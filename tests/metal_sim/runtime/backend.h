// MPS tensors of the simulated device. Their memory is host memory.
#pragma once
#include <ATen/core/Tensor.h>

#include "metal.h"

namespace metal_sim {

// As on macOS, a storage's data pointer is not an address of its bytes but the buffer object.
Buffer* buffer_of(const c10::Storage& storage);
c10::DataPtr new_data(size_t size, const void* contents = nullptr);
c10::Storage new_storage(size_t size, const void* contents = nullptr);

// A tensor of this storage with the dtype, sizes, strides and offset of `like`.
at::Tensor tensor_on(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

void refuse_double(caffe2::TypeMeta dtype);  // MPS has no float64

}  // namespace metal_sim
