// The launch of fused_linear: one row of x times several weights. Plain C++, as launch_plan.h.
#pragma once
#include <array>
#include <tuple>
#include <vector>

#include "matmul_plan.h"

namespace qgemv::mps {

constexpr const char* fused_names[dtype_count] = {"fused_float", "fused_half", "fused_bfloat"};

// A kernel of metal/fused.metal: compiled for the gemv kernels that the weights would have alone, `cases` of
// kernel_names, each once and in order; no_case fills up.
struct FusedKernel {
  static constexpr int no_case = kernel_count;

  Dtype dtype;
  uint32_t simdgroups;
  std::array<int, fused_weights> cases;

  bool operator<(const FusedKernel& other) const {
    return std::tie(dtype, simdgroups, cases) < std::tie(other.dtype, other.simdgroups, other.cases);
  }
  constexpr uint64_t threads() const { return simdgroups * simd_width; }
  constexpr const char* name() const { return fused_names[dtype]; }
  // The macros that metal/fused.metal wants to be compiled with.
  std::string definitions() const;
};

using FusedPlan = Plan<FusedParams, FusedKernel>;

// The gemv kernel of kernel_names[index].
constexpr Kernel gemv_kernel(int index) {
  const int in_family = index - first_kernel(gemv), of_one_type = variant_count(gemv);
  const int format_and_dtype = in_family / of_one_type;
  return {gemv, format_and_dtype / dtype_count, Dtype(format_and_dtype % dtype_count), in_family % of_one_type};
}

inline std::string FusedKernel::definitions() const {
  std::string list;
  for (size_t i = 0; i < cases.size() && cases[i] != no_case; ++i) {
    const Kernel kernel = gemv_kernel(cases[i]);
    const GemvShape shape = gemv_shapes[kernel.variant];
    list += " _(" + std::to_string(i) + ", " + formats[kernel.format].name +
            (kernel.variant == plain_gemv ? ", Anywhere, " : ", Aligned, ") + std::to_string(shape.rows) + ", " +
            std::to_string(shape.splits) + ")";
  }
  return "#define QGEMV_SIMDGROUPS " + std::to_string(simdgroups) + "\n#define QGEMV_CASES(_)" + list + "\n";
}

// Each weight keeps the kernel of its own launch, and so its result, whatever the others are; only the SIMD-groups of a
// threadgroup are as many for all. weights: 1 to fused_weights; bias_types: theirs.
inline FusedPlan plan_fused(const std::vector<Weight>& weights, const Rows& x, const std::vector<uint32_t>& bias_types,
                            const Tuning& tuning, uint32_t cores = assumed_cores) {
  std::vector<Plan<LinearParams>> alone;
  std::vector<int> cases;
  FusedPlan plan{{x.dtype, 1, {}}, {}, {0, 1}, {0, 1}};
  for (size_t i = 0; i < weights.size(); ++i) {
    const int variant = choose_variant(weights[i], weights[i].N, x.dtype, tuning, cores);
    alone.push_back(plan_gemv(weights[i], 1, x.x_stride, x.dtype, bias_types[i], variant));
    cases.push_back(alone[i].kernel.index());
    plan.kernel.simdgroups = std::max(plan.kernel.simdgroups, gemv_shapes[alone[i].kernel.variant].simdgroups);
  }
  std::sort(cases.begin(), cases.end());
  cases.erase(std::unique(cases.begin(), cases.end()), cases.end());
  plan.kernel.cases.fill(FusedKernel::no_case);
  std::copy(cases.begin(), cases.end(), plan.kernel.cases.begin());

  plan.threadgroup.x = plan.kernel.threads();
  const uint64_t most_groups = max_uint32 / plan.threadgroup.x;
  uint64_t groups = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const GemvShape shape = gemv_shapes[alone[i].kernel.variant];
    const uint64_t own = groups_of(uint64_t(weights[i].N), shape.rows * (plan.kernel.simdgroups / shape.splits));
    const auto found = std::find(cases.begin(), cases.end(), alone[i].kernel.index());
    plan.params.part[i] = {alone[i].params, uint32_t(own), uint32_t(found - cases.begin())};
    groups += own;
    check_range("fused_linear", "number of threadgroups", int64_t(groups), most_groups, weights[i]);
  }
  plan.grid.x = groups * plan.threadgroup.x;
  return plan;
}

}  // namespace qgemv::mps
