// Which gemv kernel MPS takes: schemas, and what can be told on any machine. On MPS: csrc/mps/tuning.mm.
#include <torch/library.h>

#include "check.h"
#include "mps/launch_plan.h"

namespace qgemv {
namespace {

std::vector<std::string> gemv_variants() { return {mps::gemv_names, mps::gemv_names + mps::plain_gemv}; }

std::string gemv_choice(int64_t quant_type, int64_t N, int64_t K) {
  const int format = mps::format_index(check_quant_type("_gemv_choice", quant_type).id);
  TORCH_CHECK_VALUE(N > 0 && K > 0, "torch_qgemv._gemv_choice: N and K must be positive, got ", N, " and ", K);
  return mps::gemv_names[mps::choose_gemv(mps::formats[format].gemv_rows, N, K)];
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_qgemv, m) {
  // The gemv kernels that aligned weights can have, and the one that they get unless a table says otherwise.
  m.def("_gemv_variants() -> str[]", &gemv_variants);
  m.def("_gemv_choice(int quant_type, int N, int K) -> str", &gemv_choice);
  // linear for one row of x by one of them.
  m.def("_linear_variant(Tensor x, Tensor weight, int quant_type, str variant) -> Tensor");
  // Replaces the table, for the process; empty lists: the built-in choice. An entry holds for a type, a dtype of x
  // ("float16"), and all N and K between the same powers of two as its own.
  m.def("_use_tuning(int[] quant_types, str[] dtypes, int[] N, int[] K, str[] variants) -> ()");
}

}  // namespace qgemv
