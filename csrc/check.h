// The one set of argument checks: every backend and the shape-only (meta) kernels call these. Sizes are SymInts, so
// that the same code serves torch.compile with dynamic shapes; for real tensors they are plain integers.
#pragma once
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "../metal/formats.h"

namespace qgemv {

struct Format {
  const char* name;
  int64_t id, block_size, type_size;  // GGUF type id, weights per block, bytes per block
};
inline constexpr Format formats[] = {
#define QGEMV_FORMAT(F) {#F, F::id, F::block_size, sizeof(F::Block)},
    QGEMV_FORMATS(QGEMV_FORMAT)
#undef QGEMV_FORMAT
};

inline const Format& check_quant_type(const char* op, int64_t quant_type) {
  for (const Format& format : formats)
    if (format.id == quant_type) return format;
  std::string known;
  for (const Format& format : formats) known += std::string(known.empty() ? "" : ", ") + format.name;
  C10_THROW_ERROR(ValueError, c10::str("torch_qgemv.", op, ": quant_type ", quant_type,
                                       " is not a supported GGUF type; supported are ", known));
}

// N rows of K weights.
struct MatrixSize {
  c10::SymInt N, K;
};

// Plain weights are [N, row_bytes]. On the CPU they may be interleaved (csrc/cpu/kernels.h), which their shape says:
// [K / block_size, N, bytes of a block], with two blocks or more, so that a plain weight[None] is never taken for one.
// Those of experts have one more size in front.
inline MatrixSize check_weight(const char* op, const at::Tensor& weight, const Format& format, bool experts = false) {
  TORCH_CHECK_TYPE(weight.scalar_type() == at::kByte, "torch_qgemv.", op,
                   ": weight must hold packed bytes (uint8), got ", weight.scalar_type());
  const int64_t dim = weight.dim() - experts;
  if (dim == 3 && weight.sym_size(-3) > 1 && weight.sym_size(-1) == format.type_size) {
    TORCH_CHECK_VALUE(weight.is_cpu() || weight.is_meta(), "torch_qgemv.", op, ": weight ", weight.sym_sizes(),
                      " is interleaved, which only the CPU can read, but is on ", weight.device());
    TORCH_CHECK_VALUE(weight.is_contiguous(), "torch_qgemv.", op, ": weight ", weight.sym_sizes(),
                      " is interleaved, so it can't be a view of parts");
    return {weight.sym_size(-2), weight.sym_size(-3) * format.block_size};
  }
  TORCH_CHECK_VALUE(dim == 2, "torch_qgemv.", op, ": weight must be ", experts ? "[E, N, row_bytes]" : "[N, row_bytes]",
                    ", got ", weight.sym_sizes());
  const c10::SymInt row_bytes = weight.sym_size(-1);
  TORCH_CHECK_VALUE(row_bytes % format.type_size == 0, "torch_qgemv.", op, ": weight has rows of ", row_bytes,
                    " bytes (shape ", weight.sym_sizes(), "), which is no whole number of ", format.name, " blocks of ",
                    format.type_size, " bytes");
  return {weight.sym_size(-2), row_bytes / format.type_size * format.block_size};
}

inline void check_float(const char* op, const char* name, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, "torch_qgemv.", op, ": ", name,
                   " must be float32, float16 or bfloat16, got ", dtype);
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(tensor.device() == weight.device(), "torch_qgemv.", op, ": ", name, " is on ", tensor.device(),
                    ", but weight is on ", weight.device());
}

inline void check_index(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kLong || tensor.scalar_type() == at::kInt, "torch_qgemv.", op, ": ",
                   name, " must be int64 or int32, got ", tensor.scalar_type());
}

inline MatrixSize check_linear(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                               const std::optional<at::Tensor>& bias) {
  const Format& format = check_quant_type("linear", quant_type);
  const MatrixSize size = check_weight("linear", weight, format);
  check_float("linear", "x", x.scalar_type());
  check_same_device("linear", "x", x, weight);
  TORCH_CHECK_VALUE(x.dim() >= 1, "torch_qgemv.linear: x must have a last dimension of K = ", size.K,
                    ", got a 0-d tensor");
  TORCH_CHECK_VALUE(x.sym_size(-1) == size.K, "torch_qgemv.linear: x has K = ", x.sym_size(-1), " (shape ",
                    x.sym_sizes(), "), but weight ", weight.sym_sizes(), " of ", format.name, " has N = ", size.N,
                    ", K = ", size.K);
  if (bias) {
    check_same_device("linear", "bias", *bias, weight);
    TORCH_CHECK_TYPE(at::isFloatingType(bias->scalar_type()), "torch_qgemv.linear: bias must be floating point, got ",
                     bias->scalar_type());
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == size.N, "torch_qgemv.linear: bias must be [N] = [",
                      size.N, "], got ", bias->sym_sizes());
  }
  return size;
}

// Several weights of one x, each with its type and its bias or none. linear checks each of them.
inline void check_fused_linear(at::TensorList weights, at::IntArrayRef quant_types,
                               const c10::List<std::optional<at::Tensor>>& biases) {
  TORCH_CHECK_VALUE(!weights.empty() && weights.size() == quant_types.size() && weights.size() == biases.size(),
                    "torch_qgemv.fused_linear: weights, quant_types and biases must be as many, one or more, got ",
                    weights.size(), ", ", quant_types.size(), " and ", biases.size());
}

// linear(x, weight, quant_type, bias) for each of the weights.
template <class Linear>
std::vector<at::Tensor> each_linear(const at::Tensor& x, at::TensorList weights, at::IntArrayRef quant_types,
                                    const c10::List<std::optional<at::Tensor>>& biases, Linear linear) {
  check_fused_linear(weights, quant_types, biases);
  std::vector<at::Tensor> ys;
  for (size_t i = 0; i < weights.size(); ++i) ys.push_back(linear(x, weights[i], quant_types[i], biases.get(i)));
  return ys;
}

inline MatrixSize check_linear_transposed(const at::Tensor& grad_y, const at::Tensor& weight, int64_t quant_type) {
  const Format& format = check_quant_type("linear_transposed", quant_type);
  const MatrixSize size = check_weight("linear_transposed", weight, format);
  check_float("linear_transposed", "grad_y", grad_y.scalar_type());
  check_same_device("linear_transposed", "grad_y", grad_y, weight);
  TORCH_CHECK_VALUE(grad_y.dim() >= 1 && grad_y.sym_size(-1) == size.N,
                    "torch_qgemv.linear_transposed: grad_y must be [..., N] with N = ", size.N, ", got ",
                    grad_y.sym_sizes(), "; weight ", weight.sym_sizes(), " of ", format.name, " has N = ", size.N,
                    ", K = ", size.K);
  return size;
}

inline MatrixSize check_dequantize(const at::Tensor& weight, int64_t quant_type, at::ScalarType dtype) {
  const MatrixSize size = check_weight("dequantize", weight, check_quant_type("dequantize", quant_type));
  check_float("dequantize", "dtype", dtype);
  return size;
}

inline MatrixSize check_embedding(const at::Tensor& indices, const at::Tensor& weight, int64_t quant_type,
                                  at::ScalarType dtype) {
  const MatrixSize size = check_weight("embedding", weight, check_quant_type("embedding", quant_type));
  check_float("embedding", "dtype", dtype);
  check_same_device("embedding", "indices", indices, weight);
  check_index("embedding", "indices", indices);
  return size;
}

inline MatrixSize check_experts(const char* op, const char* name, const at::Tensor& rows, const at::Tensor& weight,
                                const at::Tensor& ids, int64_t quant_type) {
  const MatrixSize size = check_weight(op, weight, check_quant_type(op, quant_type), /*experts=*/true);
  check_float(op, name, rows.scalar_type());
  check_same_device(op, name, rows, weight);
  check_same_device(op, "ids", ids, weight);
  check_index(op, "ids", ids);
  return size;
}

// Whether ids has the leading sizes of x or grad_y, and `more` sizes behind them.
inline bool has_leading_sizes(const at::Tensor& ids, const at::Tensor& rows, int64_t more) {
  const int64_t leading = rows.dim() - 1;
  return leading >= 0 && ids.dim() == leading + more &&
         ids.sym_sizes().slice(0, leading) == rows.sym_sizes().slice(0, leading);
}

inline MatrixSize check_expert_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& ids,
                                      int64_t quant_type) {
  const MatrixSize size = check_experts("expert_linear", "x", x, weight, ids, quant_type);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.sym_size(-1) == size.K,
                    "torch_qgemv.expert_linear: x must be [..., K] with K = ", size.K, ", got ", x.sym_sizes(),
                    "; weight ", weight.sym_sizes(), " of ", check_quant_type("expert_linear", quant_type).name,
                    " has E = ", weight.sym_size(0), ", N = ", size.N, ", K = ", size.K);
  TORCH_CHECK_VALUE(has_leading_sizes(ids, x, 0) || has_leading_sizes(ids, x, 1),
                    "torch_qgemv.expert_linear: ids must have an expert, or several in one more dimension, for each "
                    "row of x ",
                    x.sym_sizes(), ", got ", ids.sym_sizes());
  return size;
}

inline MatrixSize check_expert_linear_transposed(const at::Tensor& grad_y, const at::Tensor& weight,
                                                 const at::Tensor& ids, int64_t quant_type) {
  const char* op = "expert_linear_transposed";
  const MatrixSize size = check_experts(op, "grad_y", grad_y, weight, ids, quant_type);
  TORCH_CHECK_VALUE(has_leading_sizes(ids, grad_y, 0) && grad_y.sym_size(-1) == size.N, "torch_qgemv.", op,
                    ": grad_y must be [..., N] with N = ", size.N, " and a row for each of ids ", ids.sym_sizes(),
                    ", got ", grad_y.sym_sizes(), "; weight ", weight.sym_sizes(), " has E = ", weight.sym_size(0),
                    ", N = ", size.N, ", K = ", size.K);
  return size;
}

inline MatrixSize check_interleave(const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_weight("interleave", weight, check_quant_type("interleave", quant_type));
  TORCH_CHECK_VALUE(weight.dim() == 2, "torch_qgemv.interleave: weight ", weight.sym_sizes(),
                    " is interleaved already");
  TORCH_CHECK_VALUE(weight.sym_size(1) > check_quant_type("interleave", quant_type).type_size,
                    "torch_qgemv.interleave: weight ", weight.sym_sizes(), " has no two blocks in a row");
  return size;
}
inline MatrixSize check_deinterleave(const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_weight("deinterleave", weight, check_quant_type("deinterleave", quant_type));
  TORCH_CHECK_VALUE(weight.dim() == 3, "torch_qgemv.deinterleave: weight ", weight.sym_sizes(), " is not interleaved");
  return size;
}

inline MatrixSize check_quantize(const at::Tensor& weight, int64_t quant_type,
                                 const std::optional<at::Tensor>& importance) {
  const Format& format = check_quant_type("quantize", quant_type);
  TORCH_CHECK_VALUE(weight.dim() == 2 && at::isFloatingType(weight.scalar_type()),
                    "torch_qgemv.quantize: weight must be a float matrix [N, K], got ", weight.scalar_type(), " ",
                    weight.sym_sizes());
  const c10::SymInt N = weight.sym_size(0), K = weight.sym_size(1);
  TORCH_CHECK_VALUE(K % format.block_size == 0, "torch_qgemv.quantize: weight ", weight.sym_sizes(), " has K = ", K,
                    ", no multiple of the ", format.block_size, " weights of a ", format.name, " block");
  if (importance) {
    check_same_device("quantize", "importance", *importance, weight);
    TORCH_CHECK_VALUE(
        importance->dim() == 1 && importance->sym_size(0) == K && at::isFloatingType(importance->scalar_type()),
        "torch_qgemv.quantize: importance must be float [K] = [", K, "], got ", importance->scalar_type(), " ",
        importance->sym_sizes());
  }
  return {N, K};
}

// The rows of a plain weight may lie at any distance; only the bytes of a row must be neighbours.
inline at::Tensor with_dense_rows(const at::Tensor& weight) {
  return weight.stride(-1) == 1 || weight.size(-1) <= 1 ? weight : weight.contiguous();
}

// The shape of x or grad_y with its last size replaced, or of indices or ids with one more.
inline std::vector<c10::SymInt> linear_shape(const at::Tensor& x, const MatrixSize& size) {
  std::vector<c10::SymInt> shape = x.sym_sizes().vec();
  shape.back() = size.N;
  return shape;
}
inline std::vector<c10::SymInt> linear_transposed_shape(const at::Tensor& grad_y, const MatrixSize& size) {
  std::vector<c10::SymInt> shape = grad_y.sym_sizes().vec();
  shape.back() = size.K;
  return shape;
}
inline std::vector<c10::SymInt> with_size(const at::Tensor& indices, const c10::SymInt& size) {
  std::vector<c10::SymInt> shape = indices.sym_sizes().vec();
  shape.push_back(size);
  return shape;
}
inline std::vector<c10::SymInt> embedding_shape(const at::Tensor& indices, const MatrixSize& size) {
  return with_size(indices, size.K);
}

inline std::vector<c10::SymInt> quantized_shape(const MatrixSize& size, int64_t quant_type) {
  const Format& format = check_quant_type("quantize", quant_type);
  return {size.N, size.K / format.block_size * format.type_size};
}

inline std::vector<c10::SymInt> interleaved_shape(const at::Tensor& weight, int64_t quant_type) {
  const c10::SymInt type_size = check_quant_type("interleave", quant_type).type_size;
  return {weight.sym_size(1) / type_size, weight.sym_size(0), type_size};
}
inline std::vector<c10::SymInt> plain_shape(const at::Tensor& interleaved) {
  return {interleaved.sym_size(1), interleaved.sym_size(0) * interleaved.sym_size(2)};
}

}  // namespace qgemv
