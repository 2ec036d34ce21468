// The operators' schemas, their shape-only (meta) kernels and the Python module. Backends register themselves: see
// csrc/cpu and csrc/mps; gradients are in autograd.cpp.
#include <ATen/ops/empty.h>
#include <Python.h>
#include <torch/library.h>

#include "check.h"

namespace qgemv {

at::Tensor linear_meta(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                       const std::optional<at::Tensor>& bias) {
  return at::empty_symint(linear_shape(x, check_linear(x, weight, quant_type, bias)), x.options());
}

std::vector<at::Tensor> fused_linear_meta(const at::Tensor& x, at::TensorList weights, at::IntArrayRef quant_types,
                                          const c10::List<std::optional<at::Tensor>>& biases) {
  return each_linear(x, weights, quant_types, biases, &linear_meta);
}

at::Tensor linear_transposed_meta(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_linear_transposed(grad_y, weight, quant_type);
  return at::empty_symint(linear_transposed_shape(grad_y, size), grad_y.options());
}

at::Tensor dequantize_meta(const at::Tensor& weight, int64_t quant_type, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_dequantize(weight, quant_type, type);
  return at::empty_symint({size.N, size.K}, weight.options().dtype(type));
}

at::Tensor embedding_meta(const at::Tensor& indices, const at::Tensor& weight, int64_t quant_type,
                          std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_embedding(indices, weight, quant_type, type);
  return at::empty_symint(embedding_shape(indices, size), weight.options().dtype(type));
}

at::Tensor expert_linear_meta(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                              int64_t quant_type) {
  return at::empty_symint(with_size(ids, check_expert_linear(x, weight, ids, quant_type).N), x.options());
}

at::Tensor expert_linear_transposed_meta(const at::Tensor& grad_y, const at::Tensor& weight, const at::Tensor& ids,
                                         int64_t quant_type) {
  const MatrixSize size = check_expert_linear_transposed(grad_y, weight, ids, quant_type);
  return at::empty_symint(with_size(ids, size.K), grad_y.options());
}

at::Tensor quantize_meta(const at::Tensor& weight, int64_t quant_type, const std::optional<at::Tensor>& importance) {
  const MatrixSize size = check_quantize(weight, quant_type, importance);
  return at::empty_symint(quantized_shape(size, quant_type), weight.options().dtype(at::kByte));
}

at::Tensor interleave_meta(const at::Tensor& weight, int64_t quant_type) {
  check_interleave(weight, quant_type);
  return at::empty_symint(interleaved_shape(weight, quant_type), weight.options());
}

at::Tensor deinterleave_meta(const at::Tensor& weight, int64_t quant_type) {
  check_deinterleave(weight, quant_type);
  return at::empty_symint(plain_shape(weight), weight.options());
}

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const Format& format : formats) names.push_back(format.name);
  return names;
}

TORCH_LIBRARY(torch_qgemv, m) {
  m.def("linear(Tensor x, Tensor weight, int quant_type, Tensor? bias=None) -> Tensor", {at::Tag::pt2_compliant_tag});
  // linear for several weights of one x.
  m.def("fused_linear(Tensor x, Tensor[] weights, int[] quant_types, Tensor?[] biases) -> Tensor[]",
        {at::Tag::pt2_compliant_tag});
  // grad_y W, for a packed W: the gradient of linear with respect to x, in grad_y's dtype.
  m.def("linear_transposed(Tensor grad_y, Tensor weight, int quant_type) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("dequantize(Tensor weight, int quant_type, ScalarType? dtype=None) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("embedding(Tensor indices, Tensor weight, int quant_type, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  // linear by the one of E weights that ids names for each row of x, and its transposed form.
  m.def("expert_linear(Tensor x, Tensor weight, Tensor ids, int quant_type) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("expert_linear_transposed(Tensor grad_y, Tensor weight, Tensor ids, int quant_type) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("quantize(Tensor weight, int quant_type, Tensor? importance=None) -> Tensor", {at::Tag::pt2_compliant_tag});
  // The form of a weight that the CPU multiplies fastest, and back. The other operators take either.
  m.def("interleave(Tensor weight, int quant_type) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("deinterleave(Tensor weight, int quant_type) -> Tensor", {at::Tag::pt2_compliant_tag});
  // For tests and benchmarks (more of these: bench.cpp): the kernels of one instruction set, and which ones can run
  // here, best first.
  m.def("_linear_isa(Tensor x, Tensor weight, int quant_type, Tensor? bias, str isa) -> Tensor");
  m.def("_linear_transposed_isa(Tensor grad_y, Tensor weight, int quant_type, str isa) -> Tensor");
  m.def("_quantize_isa(Tensor weight, int quant_type, Tensor? importance, str isa) -> Tensor");
  m.def("_cpu_isas() -> str[]");
  m.def("_threads_at_work(int count) -> int");
  m.def("_format_names() -> str[]", &format_names);
}

TORCH_LIBRARY_IMPL(torch_qgemv, Meta, m) {
  m.impl("linear", &linear_meta);
  m.impl("fused_linear", &fused_linear_meta);
  m.impl("linear_transposed", &linear_transposed_meta);
  m.impl("dequantize", &dequantize_meta);
  m.impl("embedding", &embedding_meta);
  m.impl("expert_linear", &expert_linear_meta);
  m.impl("expert_linear_transposed", &expert_linear_transposed_meta);
  m.impl("quantize", &quantize_meta);
  m.impl("interleave", &interleave_meta);
  m.impl("deinterleave", &deinterleave_meta);
}

}  // namespace qgemv

// Importing torch_qgemv._C runs the registrations above; the module itself only tells what it was built with.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {};
  definition.m_base = PyModuleDef_HEAD_INIT;
  definition.m_name = "_C";
  definition.m_size = -1;
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddStringConstant(module, "torch_version", TORCH_QGEMV_TORCH_VERSION) < 0) Py_CLEAR(module);
  return module;
}
