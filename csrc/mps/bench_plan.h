// Launches of the benchmark's kernels (metal/bench.metal): portable, as launch_plan.h is.
#pragma once
#include "../../metal/bench.h"
#include "launch_plan.h"

namespace qgemv::mps {

constexpr const char* bench_kernel_names[] = {"read", "fma_rate", "published_Q4_K_float", "published_Q4_K_half",
                                              "published_Q4_K_bfloat"};
constexpr int bench_kernel_count = int(std::size(bench_kernel_names));

struct BenchKernel {
  enum Id { read, fma_rate, published } id;
  Dtype dtype = float32;  // of the published kernel
  constexpr int index() const { return int(id) + int(dtype); }
  constexpr const char* name() const { return bench_kernel_names[index()]; }
};

template <typename Params>
using BenchPlan = Plan<Params, BenchKernel>;

constexpr uint64_t bench_threads = 256;  // in a threadgroup of read and fma_rate

// A thread reads about so many vectors of 16 bytes.
inline BenchPlan<ReadParams> plan_read(uint64_t bytes, uint64_t vectors_per_thread) {
  const uint64_t threads = std::max<uint64_t>(bytes / 16 / vectors_per_thread, 16);  // 16: the bytes behind the vectors
  const uint64_t groups = (threads + bench_threads - 1) / bench_threads;
  if (groups * bench_threads > max_uint32) throw std::length_error("torch_qgemv._read: too many bytes for one launch");
  return {{BenchKernel::read}, {bytes}, {groups * bench_threads, 1}, {bench_threads, 1}};
}
// How many sums it writes.
inline uint64_t read_sums(const BenchPlan<ReadParams>& plan) { return plan.grid.x / simd_width; }

// A factor below 1 keeps the values finite.
inline BenchPlan<FmaParams> plan_fma_rate(uint64_t threads, uint32_t passes) {
  return {{BenchKernel::fma_rate}, {passes, 0.999f, 0.001f, 0}, {threads, 1}, {bench_threads, 1}};
}
inline double fma_flops(const BenchPlan<FmaParams>& plan) {
  return 2.0 * double(fma_per_pass) * double(plan.params.passes) * double(plan.grid.x);
}

// One row of x, and a Q4_K weight.
inline BenchPlan<LinearParams> plan_published(const Weight& w, Dtype dtype) {
  check_range("_published", "N", w.N, max_uint32 / simd_width, w);
  check_range("_published", "K", w.K, max_uint32, w);
  constexpr uint64_t simdgroups = published_simdgroups, rows = simdgroups * published_rows;
  constexpr uint64_t threads = simdgroups * simd_width;
  return {{BenchKernel::published, dtype},
          {w.row_bytes, uint64_t(w.K), uint32_t(w.N), uint32_t(w.K), no_bias, 0},
          {(uint64_t(w.N) + rows - 1) / rows * threads, 1},
          {threads, 1}};
}

}  // namespace qgemv::mps
