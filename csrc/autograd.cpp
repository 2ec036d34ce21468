// Gradients of linear. The packed weight is a constant: grad_x = grad_y W, grad_bias = sum of grad_y. In C++ because a
// Python registration would cost 3 us at every call, also without gradients.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <numeric>

namespace qgemv {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor call_linear(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                       const std::optional<at::Tensor>& bias) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torch_qgemv::linear", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, const std::optional<at::Tensor>&)>();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x, weight, quant_type, bias);
}

at::Tensor call_dequantize(const at::Tensor& weight, int64_t quant_type) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_qgemv::dequantize", "")
                             .typed<at::Tensor(const at::Tensor&, int64_t, std::optional<at::ScalarType>)>();
  return op.call(weight, quant_type, at::kFloat);
}

struct Linear : torch::autograd::Function<Linear> {
  static constexpr bool is_traceable = true;

  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({weight});
    ctx->saved_data["quant_type"] = quant_type;
    ctx->saved_data["x_dtype"] = x.scalar_type();
    if (bias) ctx->saved_data["bias_dtype"] = bias->scalar_type();
    return call_linear(x, weight, quant_type, bias);
  }

  // In float32, whatever y's dtype: only the results are rounded.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor grad_y = grads[0].to(at::kFloat);
    at::Tensor grad_x, grad_bias;
    if (ctx->needs_input_grad(0)) {
      const at::Tensor w = call_dequantize(ctx->get_saved_variables()[0], ctx->saved_data["quant_type"].toInt());
      grad_x = grad_y.matmul(w).to(ctx->saved_data["x_dtype"].toScalarType());
    }
    if (ctx->saved_data.count("bias_dtype") && ctx->needs_input_grad(2)) {  // it counts tensors only
      std::vector<int64_t> leading(grad_y.dim() - 1);
      std::iota(leading.begin(), leading.end(), 0);
      grad_bias = leading.empty() ? grad_y : grad_y.sum(leading);
      grad_bias = grad_bias.to(ctx->saved_data["bias_dtype"].toScalarType());
    }
    return {grad_x, at::Tensor(), at::Tensor(), grad_bias};
  }
};

at::Tensor linear_autograd(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                           const std::optional<at::Tensor>& bias) {
  const bool needs_grad = at::GradMode::is_enabled() && (x.requires_grad() || (bias && bias->requires_grad()));
  return needs_grad ? Linear::apply(x, weight, quant_type, bias) : call_linear(x, weight, quant_type, bias);
}

TORCH_LIBRARY_IMPL(torch_qgemv, Autograd, m) { m.impl("linear", &linear_autograd); }

}  // namespace qgemv
