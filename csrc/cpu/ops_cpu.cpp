// The operators on the CPU: checks, the choice of the instruction set, threads. The arithmetic is in kernels.h.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "ops_cpu.h"

namespace qgemv {

cpu::Dtype dtype_of(at::ScalarType type) {
  return type == at::kFloat ? cpu::Dtype::f32 : type == at::kHalf ? cpu::Dtype::f16 : cpu::Dtype::bf16;
}

const Kernels& best_kernels() {
  static const Kernels* const best =
      *std::find_if(std::begin(cpu::all_kernels), std::end(cpu::all_kernels), [](auto* k) { return k->supported(); });
  return *best;
}

// const_data_ptr<T>() is avoided here: in torch 2.10 for macOS its symbol has a name that newer compilers don't use.
Weight view(const at::Tensor& weight, int64_t quant_type, const MatrixSize& size) {
  const bool interleaved = weight.dim() == 3;
  const int64_t row_stride = interleaved ? weight.size(0) * weight.size(2) : weight.stride(0);
  return {quant_type,          static_cast<const uint8_t*>(weight.const_data_ptr()),
          row_stride,          size.N.expect_int(),
          size.K.expect_int(), interleaved};
}

// Work for one thread: at least this many bytes read or written.
constexpr int64_t grain_bytes = 1 << 16;
int64_t grain(int64_t bytes_each) { return std::max<int64_t>(1, grain_bytes / std::max<int64_t>(1, bytes_each)); }

void linear_exact_row(const Weight& w, const void* x, const float* bias, void* y, cpu::Dtype dtype) {
  std::vector<float> row(w.K), out(w.N);
  cpu::to_float(x, dtype, w.K, row.data());
  at::parallel_for(0, w.N, grain(w.K * 4),
                   [&](int64_t begin, int64_t end) { cpu::linear_exact(w, row.data(), bias, out.data(), begin, end); });
  cpu::from_float(out.data(), dtype, w.N, y);
}

void linear_tokens(const Kernels& kernels, const Weight& w, const char* x, int64_t tokens, const float* bias, char* y,
                   cpu::Dtype dtype) {
  const int64_t item = dtype == cpu::Dtype::f32 ? 4 : 2, chunks = (w.K + cpu::chunk - 1) / cpu::chunk;
  const at::Tensor activations = at::empty({chunks * tokens * int64_t(kernels.activation_bytes(dtype))}, at::kByte);
  void* packed = activations.mutable_data_ptr();
  std::vector<char> regular(tokens);
  at::parallel_for(0, tokens, grain(w.K * item), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) regular[m] = kernels.pack(w, x + m * w.K * item, dtype, m, tokens, packed);
  });

  const cpu::LinearArgs args{w, packed, tokens, bias, y, dtype};
  const int64_t panels = (w.N + cpu::panel_rows - 1) / cpu::panel_rows;
  const int64_t panel_bytes = cpu::panel_rows * w.row_stride * ((tokens + 3) / 4);
  at::parallel_for(0, panels, grain(panel_bytes),
                   [&](int64_t begin, int64_t end) { kernels.linear(args, begin, end); });

  for (int64_t m = 0; m < tokens; ++m)
    if (!regular[m]) linear_exact_row(w, x + m * w.K * item, bias, y + m * w.N * item, dtype);
}

at::Tensor linear_with(const Kernels& kernels, const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                       const std::optional<at::Tensor>& bias) {
  const MatrixSize size = check_linear(x, weight, quant_type, bias);
  const auto shape = linear_shape(x, size);
  const at::Tensor y = at::empty_symint(shape, x.options());
  if (y.numel() == 0) return y;
  const at::Tensor bias_float = bias ? bias->to(at::kFloat).contiguous() : at::Tensor();
  if (x.numel() == 0) return bias ? y.copy_(bias_float) : y.zero_();  // K = 0

  const at::Tensor rows = x.contiguous(), packed = with_dense_rows(weight);
  const Weight w = view(packed, quant_type, size);
  const cpu::Dtype dtype = dtype_of(x.scalar_type());
  const float* b = bias ? static_cast<const float*>(bias_float.const_data_ptr()) : nullptr;
  const int64_t tokens = x.numel() / w.K, item = x.element_size();
  const char* from = static_cast<const char*>(rows.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  for (int64_t m = 0; m < tokens; m += cpu::token_block)
    linear_tokens(kernels, w, from + m * w.K * item, std::min<int64_t>(cpu::token_block, tokens - m), b,
                  to + m * w.N * item, dtype);
  return y;
}

at::Tensor linear_cpu(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                      const std::optional<at::Tensor>& bias) {
  return linear_with(best_kernels(), x, weight, quant_type, bias);
}

std::vector<at::Tensor> fused_linear_cpu(const at::Tensor& x, at::TensorList weights, at::IntArrayRef quant_types,
                                         const c10::List<std::optional<at::Tensor>>& biases) {
  return each_linear(x, weights, quant_types, biases, &linear_cpu);
}

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : cpu::all_kernels)
    if (kernels->supported()) names.push_back(kernels->name);
  return names;
}

const Kernels& kernels_named(std::string_view isa) {
  for (const Kernels* kernels : cpu::all_kernels)
    if (isa == kernels->name && kernels->supported()) return *kernels;
  TORCH_CHECK_VALUE(false, "torch_qgemv: no kernels for isa '", isa, "' can run here; there are ", cpu_isas());
}

at::Tensor linear_isa(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                      const std::optional<at::Tensor>& bias, c10::string_view isa) {
  return linear_with(kernels_named(isa), x, weight, quant_type, bias);
}

// How many threads share the work of a parallel_for.
int64_t threads_at_work(int64_t count) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  at::parallel_for(0, count, 1, [&](int64_t, int64_t) {
    const std::lock_guard<std::mutex> lock(mutex);
    threads.insert(std::this_thread::get_id());
  });
  return int64_t(threads.size());
}

at::Tensor dequantize_cpu(const at::Tensor& weight, int64_t quant_type, std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_dequantize(weight, quant_type, type);
  const at::Tensor packed = with_dense_rows(weight);
  const at::Tensor out = at::empty_symint({size.N, size.K}, weight.options().dtype(type));
  if (out.numel() == 0) return out;
  const Weight w = view(packed, quant_type, size);
  const Kernels& kernels = best_kernels();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = w.K * int64_t(out.element_size());
  at::parallel_for(0, w.N, grain(row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) kernels.dequantize_row(w, n, 0, w.K, dtype_of(type), to + n * row_bytes);
  });
  return out;
}

at::Tensor embedding_cpu(const at::Tensor& indices, const at::Tensor& weight, int64_t quant_type,
                         std::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  const MatrixSize size = check_embedding(indices, weight, quant_type, type);
  const at::Tensor out = at::empty_symint(embedding_shape(indices, size), weight.options().dtype(type));
  if (indices.numel() == 0) return out;
  const at::Tensor packed = with_dense_rows(weight), ids = indices.to(at::kLong).contiguous();
  const Weight w = view(packed, quant_type, size);
  const int64_t* id = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < ids.numel(); ++i)
    TORCH_CHECK_INDEX(0 <= id[i] && id[i] < w.N, "torch_qgemv.embedding: index ", id[i], " is out of range for ", w.N,
                      " rows");
  if (out.numel() == 0) return out;
  const Kernels& kernels = best_kernels();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = w.K * int64_t(out.element_size());
  at::parallel_for(0, ids.numel(), grain(row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kernels.dequantize_row(w, id[i], 0, w.K, dtype_of(type), to + i * row_bytes);
  });
  return out;
}

// Memory for `like`, in huge pages where the system has them: a matrix of megabytes is read from end to end, and the
// processor would lose time on the addresses of small pages.
at::Tensor empty_in_huge_pages(at::IntArrayRef shape, const at::Tensor& like) {
  at::Tensor out = at::empty(shape, like.options());
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(out.mutable_data_ptr()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(out.mutable_data_ptr()) + out.nbytes()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: it may fail
#endif
  return out;
}

at::Tensor interleave_cpu(const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_interleave(weight, quant_type);
  const at::Tensor plain = with_dense_rows(weight);
  const Weight w = view(plain, quant_type, size);
  const at::Tensor out = empty_in_huge_pages(at::asIntArrayRefUnchecked(interleaved_shape(weight, quant_type)), weight);
  const int64_t row_bytes = weight.size(1), panels = w.N / cpu::panel_rows, in_panels = panels * cpu::panel_rows;
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  at::parallel_for(0, panels, grain(cpu::panel_rows * row_bytes),
                   [&](int64_t begin, int64_t end) { best_kernels().interleave(w, begin, end, to); });
  for (int64_t n = in_panels; n < w.N; ++n) std::memcpy(to + n * row_bytes, w.data + n * w.row_stride, row_bytes);
  return out;
}

at::Tensor deinterleave_cpu(const at::Tensor& weight, int64_t quant_type) {
  const MatrixSize size = check_deinterleave(weight, quant_type);
  const Weight w = view(weight, quant_type, size);
  const at::Tensor out = at::empty({w.N, w.row_stride}, weight.options());
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  at::parallel_for(0, w.N, grain(w.row_stride), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) cpu::deinterleave_row(w, n, to + n * w.row_stride);
  });
  return out;
}

TORCH_LIBRARY_IMPL(torch_qgemv, CPU, m) {
  m.impl("linear", &linear_cpu);
  m.impl("fused_linear", &fused_linear_cpu);
  m.impl("dequantize", &dequantize_cpu);
  m.impl("embedding", &embedding_cpu);
  m.impl("interleave", &interleave_cpu);
  m.impl("deinterleave", &deinterleave_cpu);
  m.impl("_linear_isa", &linear_isa);
}
TORCH_LIBRARY_IMPL(torch_qgemv, CatchAll, m) {
  m.impl("_cpu_isas", &cpu_isas);
  m.impl("_threads_at_work", &threads_at_work);
}

}  // namespace qgemv
