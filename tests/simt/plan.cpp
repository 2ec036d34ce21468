// The launch plan of csrc/mps as a library for Python: which kernel, which arguments, which grid.
#include <cstring>

#include "../../csrc/mps/bench_plan.h"
#include "../../csrc/mps/matmul_plan.h"

using namespace qgemv;
using namespace qgemv::mps;

struct Launch {
  char error[256], kernel[96];
  uint64_t grid[2], threadgroup[2];  // threads
  uint64_t params_size;
  unsigned char params[64];
};

// A product of M rows of x, K elements apart, and no bias or one of float32. variant: of the gemv kernel; negative: the
// one that the plan chooses.
struct Product {
  int64_t quant_type, N, K, M, offset, row_bytes, dtype, bias, variant;
};

namespace {

template <typename Make>
void fill(Launch* launch, Make make) {
  *launch = {};
  try {
    const auto plan = make();
    static_assert(sizeof plan.params <= sizeof launch->params);
    strncpy(launch->kernel, plan.kernel.name(), sizeof launch->kernel - 1);
    launch->grid[0] = plan.grid.x, launch->grid[1] = plan.grid.y;
    launch->threadgroup[0] = plan.threadgroup.x, launch->threadgroup[1] = plan.threadgroup.y;
    launch->params_size = sizeof plan.params;
    memcpy(launch->params, &plan.params, sizeof plan.params);
  } catch (const std::exception& e) {
    strncpy(launch->error, e.what(), sizeof launch->error - 1);
  }
}

Weight weight_of(const Product& p) {
  return {format_index(p.quant_type), p.N, p.K, uint64_t(p.offset), uint64_t(p.row_bytes)};
}

// What the launcher does for `linear`, on a GPU of as many cores as an H100 or H200 has.
Plan<LinearParams> plan_product(const Product& p) {
  constexpr uint32_t cores = 132;
  const Rows x{p.M, p.K, Dtype(p.dtype)};
  auto plan = plan_linear(weight_of(p), x, p.bias ? float_bias : no_bias, /*lane_order_known=*/true, Tuning(), cores);
  if (p.variant >= 0) {
    const GemvShape shape = gemv_shapes[p.variant];
    plan.kernel.variant = int(p.variant);
    plan.grid.x = (uint64_t(p.N) + shape.outputs() - 1) / shape.outputs() * shape.threads();
    plan.threadgroup.x = shape.threads();
  }
  return plan;
}

}  // namespace

extern "C" {
int variant_count() { return plain_gemv; }  // of aligned weights
void plan_linear(const Product* p, Launch* launch) {
  fill(launch, [&] { return plan_product(*p); });
}
void plan_published(const Product* p, Launch* launch) {
  fill(launch, [&] { return plan_published(weight_of(*p), Dtype(p->dtype)); });
}
void plan_read(uint64_t bytes, uint64_t vectors_per_thread, Launch* launch) {
  fill(launch, [&] { return plan_read(bytes, vectors_per_thread); });
}
}
