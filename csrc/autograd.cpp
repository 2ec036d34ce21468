// Derivatives. The packed weight is a constant, so linear and linear_transposed are linear maps, each the other's
// transpose: each one's gradient is the other, and the derivative along a tangent is the operator itself. In C++
// because a Python registration would cost 3 us at every call, also without gradients; as autograd nodes of our own
// because torch::autograd::Function knows neither torch.func's transforms nor forward-mode derivatives.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include <numeric>

#include "check.h"

namespace qgemv {

using at::Tensor;
using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::isFwGradDefined;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;

Tensor call_linear(const Tensor& x, const Tensor& weight, int64_t quant_type, const std::optional<Tensor>& bias) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_qgemv::linear", "")
                             .typed<Tensor(const Tensor&, const Tensor&, int64_t, const std::optional<Tensor>&)>();
  return op.call(x, weight, quant_type, bias);
}

Tensor call_linear_transposed(const Tensor& grad_y, const Tensor& weight, int64_t quant_type) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_qgemv::linear_transposed", "")
                             .typed<Tensor(const Tensor&, const Tensor&, int64_t)>();
  return op.call(grad_y, weight, quant_type);
}

// expert_linear or, `transposed`, expert_linear_transposed.
Tensor call_expert_linear(bool transposed, const Tensor& rows, const Tensor& weight, const Tensor& ids,
                          int64_t quant_type) {
  auto find = [](const char* name) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(name, "")
        .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t)>();
  };
  static const auto op = find("torch_qgemv::expert_linear"), back = find("torch_qgemv::expert_linear_transposed");
  return (transposed ? back : op).call(rows, weight, ids, quant_type);
}

// What a backward pass of an operator needs beside the gradient, the weight and, for experts, ids.
struct Saved {
  int64_t quant_type;
  bool transposed;  // the operator was linear_transposed or expert_linear_transposed
  at::ScalarType bias_dtype;
  bool several = false;  // each row of x had several experts
};

// In float32 whatever the dtypes: only the result is rounded.
Tensor sum_rows(const Tensor& grad_y, at::ScalarType dtype) {
  std::vector<int64_t> leading(grad_y.dim() - 1);
  std::iota(leading.begin(), leading.end(), 0);
  return (leading.empty() ? grad_y : grad_y.sum(leading, /*keepdim=*/false, at::kFloat)).to(dtype);
}

// The gradient of x or grad_y.
Tensor gradient(const Tensor& grad, const Tensor& weight, const Tensor& ids, const Saved& saved) {
  if (!ids.defined())
    return saved.transposed ? call_linear(grad, weight, saved.quant_type, std::nullopt)
                            : call_linear_transposed(grad, weight, saved.quant_type);
  const Tensor each = call_expert_linear(!saved.transposed, grad, weight, ids, saved.quant_type);
  return saved.several ? each.sum({-2}, /*keepdim=*/false, at::kFloat).to(grad.scalar_type()) : each;
}

// That and the gradient of the bias, as far as they are needed.
variable_list gradients(const Tensor& grad, const Tensor& weight, const Tensor& ids, const Saved& saved,
                        const std::vector<bool>& needed) {
  variable_list results(needed.size());
  if (!grad.defined()) return results;
  if (needed[0]) results[0] = gradient(grad, weight, ids, saved);
  if (needed.size() > 1 && needed[1]) results[1] = sum_rows(grad, saved.bias_dtype);
  return results;
}

struct PackedBackward : Node {
  PackedBackward(const Tensor& weight, const Tensor& ids, const Saved& saved)
      : weight_(weight, /*is_output=*/false), ids_(ids, /*is_output=*/false), saved_(saved) {}

  std::string name() const override {
    return saved_.transposed ? "QuantLinearTransposedBackward" : "QuantLinearBackward";
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return gradients(grads[0], weight_.unpack(), ids_.unpack(), saved_, needed());
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    weight_.reset_data();
    ids_.reset_data();
  }

  // For torch's compiled autograd: what a compiled backward pass depends on, and a call of `gradients` for its graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(weight_, /*is_output=*/false);
    args.collect(ids_, /*is_output=*/false);
    args.collect(saved_.quant_type);
    args.collect(saved_.transposed);
    args.collect(saved_.bias_dtype);
    args.collect(saved_.several);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    swap.before(weight_);
    swap.before(ids_);
    PackedArgs args;
    args.pack(weight_.unpack());
    args.pack(ids_.unpack());
    args.pack(saved_.quant_type);
    args.pack(saved_.transposed);
    args.pack(saved_.bias_dtype);
    args.pack(saved_.several);
    args.pack(needed());
    std::vector<at::TypePtr> types;
    for (const at::IValue& value : args.vec())
      types.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
    const auto& python = getPyCompilerInterface();
    const std::string function = python->bind_function(swap.get_py_compiler(), name(), &apply_to_args, types,
                                                       /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto edges = IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(get_input_metadata(next_edges()));
    variable_list results =
        python->call_function(swap.get_py_compiler(), "apply_functional", function, grads, args.vec(), edges);
    swap.after(weight_);
    swap.after(ids_);
    return results;
  }

 private:
  static variable_list apply_to_args(const variable_list& grads, const std::vector<at::IValue>& values) {
    torch::dynamo::autograd::PackedArgs args(values);
    const auto weight = args.unpack<Tensor>(), ids = args.unpack<Tensor>();
    const auto quant_type = args.unpack<int64_t>();
    const auto transposed = args.unpack<bool>();
    const auto bias_dtype = args.unpack<at::ScalarType>();
    const auto several = args.unpack<bool>();
    return gradients(grads[0], weight, ids, {quant_type, transposed, bias_dtype, several},
                     args.unpack<std::vector<bool>>());
  }

  std::vector<bool> needed() const {
    std::vector<bool> result(num_outputs());
    for (size_t i = 0; i < result.size(); ++i) result[i] = task_should_compute_output(i);
    return result;
  }

  SavedVariable weight_, ids_;  // ids: of experts only
  Saved saved_;
};

// Nodes are held by a std::shared_ptr in torch 2.10 and by an intrusive pointer in later releases.
using NodePtr = decltype(torch::autograd::Edge::function);
template <class T>
NodePtr make_node(const Tensor& weight, const Tensor& ids, const Saved& saved, torch::autograd::edge_list&& inputs) {
  NodePtr node;
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    node = NodePtr(new T(weight, ids, saved), [](auto* node) { deleteNode(node); });
  } else {
    node = c10::make_intrusive<T>(weight, ids, saved);
  }
  node->set_next_edges(std::move(inputs));
  return node;
}

Tensor linear_autograd(const Tensor& x, const Tensor& weight, int64_t quant_type, const std::optional<Tensor>& bias) {
  NodePtr node;
  if (compute_requires_grad(x, bias)) {
    const Saved saved{quant_type, /*transposed=*/false, bias ? bias->scalar_type() : at::kFloat};
    node = make_node<PackedBackward>(weight, Tensor(), saved, collect_next_edges(x, bias ? *bias : Tensor()));
  }
  Tensor y;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    y = call_linear(x, weight, quant_type, bias);
  }
  if (node) set_history(y, node);
  const bool x_moves = isFwGradDefined(x), bias_moves = isFwGradDefined(bias);
  if (x_moves || bias_moves) {
    const std::optional<Tensor> bias_tangent = bias_moves ? std::optional(bias->_fw_grad(0)) : std::nullopt;
    y._set_fw_grad(x_moves ? call_linear(x._fw_grad(0), weight, quant_type, bias_tangent)
                           : bias_tangent->to(y.scalar_type()).expand_as(y).clone(),
                   /*level=*/0, /*is_inplace_op=*/false);
  }
  return y;
}

// With derivatives: that of each product, so those of linear.
std::vector<Tensor> fused_linear_autograd(const Tensor& x, at::TensorList weights, at::IntArrayRef quant_types,
                                          const c10::List<std::optional<Tensor>>& biases) {
  bool moves = compute_requires_grad(x) || isFwGradDefined(x);
  for (const std::optional<Tensor>& bias : biases) moves |= compute_requires_grad(bias) || isFwGradDefined(bias);
  if (moves) return each_linear(x, weights, quant_types, biases, &call_linear);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_qgemv::fused_linear", "")
                             .typed<std::vector<Tensor>(const Tensor&, at::TensorList, at::IntArrayRef,
                                                        const c10::List<std::optional<Tensor>>&)>();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op.call(x, weights, quant_types, biases);
}

// An operator that is linear in `rows` alone: call(rows).
template <class Call>
Tensor with_derivatives(const Tensor& rows, const Tensor& weight, const Tensor& ids, const Saved& saved, Call call) {
  NodePtr node;
  if (compute_requires_grad(rows)) node = make_node<PackedBackward>(weight, ids, saved, collect_next_edges(rows));
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    result = call(rows);
  }
  if (node) set_history(result, node);
  if (isFwGradDefined(rows)) result._set_fw_grad(call(rows._fw_grad(0)), /*level=*/0, /*is_inplace_op=*/false);
  return result;
}

Tensor linear_transposed_autograd(const Tensor& grad_y, const Tensor& weight, int64_t quant_type) {
  return with_derivatives(grad_y, weight, Tensor(), {quant_type, /*transposed=*/true, at::kFloat},
                          [&](const Tensor& rows) { return call_linear_transposed(rows, weight, quant_type); });
}

Tensor expert_linear_autograd(const Tensor& x, const Tensor& weight, const Tensor& ids, int64_t quant_type) {
  const Saved saved{quant_type, /*transposed=*/false, at::kFloat, /*several=*/ids.dim() == x.dim()};
  return with_derivatives(x, weight, ids, saved, [&](const Tensor& rows) {
    return call_expert_linear(/*transposed=*/false, rows, weight, ids, quant_type);
  });
}

Tensor expert_linear_transposed_autograd(const Tensor& grad_y, const Tensor& weight, const Tensor& ids,
                                         int64_t quant_type) {
  const Saved saved{quant_type, /*transposed=*/true, at::kFloat};
  return with_derivatives(grad_y, weight, ids, saved, [&](const Tensor& rows) {
    return call_expert_linear(/*transposed=*/true, rows, weight, ids, quant_type);
  });
}

TORCH_LIBRARY_IMPL(torch_qgemv, Autograd, m) {
  m.impl("linear", &linear_autograd);
  m.impl("fused_linear", &fused_linear_autograd);
  m.impl("linear_transposed", &linear_transposed_autograd);
  m.impl("expert_linear", &expert_linear_autograd);
  m.impl("expert_linear_transposed", &expert_linear_transposed_autograd);
}

}  // namespace qgemv
