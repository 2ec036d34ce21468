// What the benchmark's launcher and its kernels agree on. Read by the Metal compiler and by csrc/mps/bench_plan.h.
#pragma once
#include "params.h"

namespace qgemv {

struct ReadParams {
  uint64_t bytes;
};
static_assert(sizeof(ReadParams) == 8, "the same on both sides");

struct FmaParams {
  uint32_t passes;  // each of fma_per_pass multiply-adds a thread
  float factor, term;
  uint32_t reserved;
};
static_assert(sizeof(FmaParams) == 16, "the same on both sides");

enum : uint32_t {
  fma_chains = 16,  // multiply-adds that don't wait for each other
  fma_per_pass = 8 * fma_chains,
  published_rows = 2,  // outputs that a SIMD-group of the published kernel makes
  published_simdgroups = 2
};

}  // namespace qgemv
