// Under autocast x is cast as nn.functional.linear casts it, and so y has the autocast dtype. The bias stays as it is:
// it is added in float32 anyway. The other operators take no part, as nn.functional.embedding.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace qgemv {

// op(x in the autocast dtype, args...), without autocast.
template <c10::DeviceType device, class Op, class... Args>
auto call_with_cast(const Op& op, const at::Tensor& x, const Args&... args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::DispatchKeySet(at::autocast::get_autocast_dispatch_key_from_device_type(device)));
  return op.call(at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device), args...);
}

template <c10::DeviceType device>
at::Tensor linear_autocast(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                           const std::optional<at::Tensor>& bias) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torch_qgemv::linear", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, const std::optional<at::Tensor>&)>();
  return call_with_cast<device>(op, x, weight, quant_type, bias);
}

template <c10::DeviceType device>
std::vector<at::Tensor> fused_linear_autocast(const at::Tensor& x, at::TensorList weights, at::IntArrayRef quant_types,
                                              const c10::List<std::optional<at::Tensor>>& biases) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_qgemv::fused_linear", "")
                             .typed<std::vector<at::Tensor>(const at::Tensor&, at::TensorList, at::IntArrayRef,
                                                            const c10::List<std::optional<at::Tensor>>&)>();
  return call_with_cast<device>(op, x, weights, quant_types, biases);
}

template <c10::DeviceType device>
at::Tensor expert_linear_autocast(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                                  int64_t quant_type) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_qgemv::expert_linear", "")
                             .typed<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t)>();
  return call_with_cast<device>(op, x, weight, ids, quant_type);
}

TORCH_LIBRARY_IMPL(torch_qgemv, AutocastCPU, m) {
  m.impl("linear", &linear_autocast<c10::DeviceType::CPU>);
  m.impl("fused_linear", &fused_linear_autocast<c10::DeviceType::CPU>);
  m.impl("expert_linear", &expert_linear_autocast<c10::DeviceType::CPU>);
}
TORCH_LIBRARY_IMPL(torch_qgemv, AutocastMPS, m) {
  m.impl("linear", &linear_autocast<c10::DeviceType::MPS>);
  m.impl("fused_linear", &fused_linear_autocast<c10::DeviceType::MPS>);
  m.impl("expert_linear", &expert_linear_autocast<c10::DeviceType::MPS>);
}

}  // namespace qgemv
