// Every operator without a kernel for MPS runs PyTorch's CPU kernel, in place on the MPS tensors' memory.
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <limits>

#include "backend.h"

namespace metal_sim {
namespace {

// The CPU's view of one call's MPS tensors, and the way back.
class CpuCall {
 public:
  at::Tensor lend(const at::Tensor& t) {
    if (!t.defined() || !t.is_mps()) return t;
    at::Tensor cpu = tensor_on(lend_storage(t.storage()), c10::DispatchKey::CPU, t);
    tensors_.push_back({t, cpu});
    return cpu;
  }

  // After the call: in-place operators may have given an argument another shape, or its storage more memory.
  void settle() {
    for (auto& [mps_storage, cpu_storage] : storages_) {
      if (cpu_storage.data() == buffer_of(mps_storage)->data) continue;
      const size_t size = cpu_storage.nbytes();
      mps_storage.set_data_ptr_noswap(new_data(size, cpu_storage.data()));
      mps_storage.set_nbytes(size);
    }
    for (auto& [mps_tensor, cpu] : tensors_) {
      if (mps_tensor.sizes() != cpu.sizes() || mps_tensor.strides() != cpu.strides() ||
          mps_tensor.storage_offset() != cpu.storage_offset()) {
        mps_tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

  at::Tensor take_back(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [mps_tensor, cpu] : tensors_) {  // the argument itself
      if (cpu.is_same(result)) return mps_tensor;
    }
    for (auto& [mps_storage, cpu_storage] : storages_) {  // a view of one
      if (cpu_storage.is_alias_of(result.storage())) return tensor_on(mps_storage, c10::DispatchKey::MPS, result);
    }
    refuse_double(result.dtype());
    return tensor_on(new_storage(result.storage().nbytes(), result.storage().data()), c10::DispatchKey::MPS, result);
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;       // (MPS, CPU)
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // (MPS, CPU)

  c10::Storage lend_storage(const c10::Storage& storage) {
    for (auto& [mps_storage, cpu_storage] : storages_) {
      if (mps_storage.is_alias_of(storage)) return cpu_storage;
    }
    c10::DataPtr bytes(buffer_of(storage)->data, c10::Device(c10::kCPU));
    c10::Storage cpu = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                             std::move(bytes), c10::GetAllocator(c10::kCPU),
                                                             /*resizable=*/true);
    storages_.push_back({storage, cpu});
    return cpu;
  }
};

void lend_arguments(CpuCall& call, torch::jit::Stack* stack, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& v = torch::jit::peek(stack, i, count);
    if (v.isTensor()) {
      v = call.lend(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(call.lend(t));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) {
        list.push_back(t ? std::optional(call.lend(*t)) : std::nullopt);
      }
      v = list;
    } else if (v.isDevice() && v.toDevice().is_mps()) {
      v = c10::Device(c10::kCPU);
    }
  }
}

void take_back_results(CpuCall& call, torch::jit::Stack* stack, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& v = torch::jit::peek(stack, i, count);
    if (v.isTensor()) {
      v = call.take_back(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(call.take_back(t));
      v = list;
    }
  }
}

void run_on_cpu_as(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  CpuCall call;
  lend_arguments(call, stack, op.schema().arguments().size());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  take_back_results(call, stack, op.schema().returns().size());
}

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // Other libraries' operators are refused, as a Mac refuses them: silence would hide a kernel that is missing.
  TORCH_CHECK_NOT_IMPLEMENTED(op.schema().name().rfind("aten::", 0) == 0, "metal_sim: ", op.schema().name(),
                              " has no kernel for MPS");
  run_on_cpu_as(op, stack);
}

// Runs another operator, with the same arguments, instead.
template <const char* const& name>
void run_other_on_cpu(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const c10::OperatorHandle other = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  run_on_cpu_as(other, stack);
}
const char* const convolution = "aten::convolution";

// The composite operator asks for a choice of algorithm by device type, of which only MPS builds have one for MPS.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::optional<at::Tensor>& mask_in, double dropout, bool causal, std::optional<double> scale,
                     bool grouped) {
  std::optional<at::Tensor> mask = mask_in;
  if (mask && mask->scalar_type() == at::kBool) {
    mask =
        at::zeros_like(*mask, q.options()).masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity());
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, {}, scale, grouped));
}

TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { m.impl("scaled_dot_product_attention", &attention); }

TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, MPS, m) {
  // Composite operators that would otherwise reach for a kernel by device type.
  for (const char* name : {"copy_", "_copy_from_and_resize"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&run_other_on_cpu<convolution>>());
  m.impl("scaled_dot_product_attention", &attention);
}

}  // namespace
}  // namespace metal_sim
