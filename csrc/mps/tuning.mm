// The table of gemv kernels that is in use, and gemv by a kernel of one's choice, which such tables are measured with
// (csrc/tuning.cpp has the schemas).
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "../check.h"
#include "dispatch.h"
#include "pipelines.h"
#include "tensors.h"
#include "tuning_in_use.h"

namespace qgemv::mps {
namespace {

const Tuning built_in;
std::atomic<const Tuning*> in_use{&built_in};

// Tables are never freed: another thread may be reading one. There are as many as the user has loaded.
void use(std::unique_ptr<const Tuning> tuning) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<const Tuning>> kept;
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(std::move(tuning));
  in_use.store(kept.back().get(), std::memory_order_release);
}

int variant_named(const char* op, std::string_view name) {
  for (int variant = 0; variant < plain_gemv; ++variant)
    if (name == gemv_names[variant]) return variant;
  std::string known;
  for (int variant = 0; variant < plain_gemv; ++variant)
    known += (variant ? ", " : "") + std::string(gemv_names[variant]);
  TORCH_CHECK_VALUE(false, "torch_qgemv.", op, ": there is no variant '", name, "'; there are ", known);
}

Dtype dtype_named(const char* op, std::string_view name) {
  constexpr std::string_view names[dtype_count] = {"float32", "float16", "bfloat16"};
  const auto found = std::find(std::begin(names), std::end(names), name);
  TORCH_CHECK_VALUE(found != std::end(names), "torch_qgemv.", op, ": dtype must be float32, float16 or bfloat16, got '",
                    name, "'");
  return Dtype(found - std::begin(names));
}

void use_tuning(at::IntArrayRef quant_types, const c10::List<std::string>& dtypes, at::IntArrayRef N, at::IntArrayRef K,
                const c10::List<std::string>& variants) {
  const char* op = "_use_tuning";
  const size_t count = quant_types.size();
  TORCH_CHECK_VALUE(dtypes.size() == count && N.size() == count && K.size() == count && variants.size() == count,
                    "torch_qgemv._use_tuning: lists must have one length, got ", count, ", ", dtypes.size(), ", ",
                    N.size(), ", ", K.size(), ", ", variants.size());
  auto tuning = std::make_unique<Tuning>();
  for (size_t i = 0; i < count; ++i) {
    const int format = format_index(check_quant_type(op, quant_types[i]).id);
    TORCH_CHECK_VALUE(N[i] > 0 && K[i] > 0, "torch_qgemv._use_tuning: N and K must be positive, got ", N[i], " and ",
                      K[i]);
    const std::string dtype = dtypes.get(i);
    TORCH_CHECK_VALUE(tuning->add(format, dtype_named(op, dtype), N[i], K[i], variant_named(op, variants.get(i))),
                      "torch_qgemv._use_tuning: there are two entries for ", formats[format].name, ", ", dtype,
                      ", N = ", N[i], ", K = ", K[i]);
  }
  use(std::move(tuning));
}

at::Tensor linear_variant_mps(const at::Tensor& x, const at::Tensor& weight, int64_t quant_type,
                              c10::string_view variant) {
  const MatrixSize size = check_linear(x, weight, quant_type, std::nullopt);
  const int chosen = variant_named("_linear_variant", variant);
  const Weight w = describe(weight, quant_type, size);
  TORCH_CHECK_VALUE(x.numel() == w.K, "torch_qgemv._linear_variant: x must be one row of K = ", w.K, ", got shape ",
                    x.sizes());
  TORCH_CHECK_VALUE(weight.stride(1) == 1 && is_aligned(w),
                    "torch_qgemv._linear_variant: weight must have rows of neighbouring bytes that start at multiples "
                    "of ",
                    formats[w.format].alignment, " bytes");
  const at::Tensor y = at::empty_symint(linear_shape(x, size), x.options());
  if (y.numel() == 0 || w.K == 0) return y.zero_();
  const at::Tensor rows = aligned_rows(x, w.K);
  const Rows row = describe_rows(rows);
  const auto plan = plan_gemv(w, 1, row.x_stride, row.dtype, no_bias, chosen);
  dispatch<LinearParams, 4>(plan, {bind(weight), bind(rows), bind(weight), bind(y)}, rows, y);
  return y;
}

}  // namespace

const Tuning& tuning_in_use() { return *in_use.load(std::memory_order_acquire); }

TORCH_LIBRARY_IMPL(torch_qgemv, MPS, m) { m.impl("_linear_variant", &linear_variant_mps); }
TORCH_LIBRARY_IMPL(torch_qgemv, CatchAll, m) { m.impl("_use_tuning", &use_tuning); }

}  // namespace qgemv::mps
