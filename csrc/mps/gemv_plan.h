// Which of the gemv kernels makes a product of few rows of x. They differ in how the work is cut (QGEMV_GEMV_SHAPES in
// metal/params.h); the results are as exact.
#pragma once
#include <cstdint>
#include <iterator>

#include "../../metal/params.h"

namespace qgemv::mps {

struct GemvShape {
  uint32_t rows, simdgroups, splits;
  constexpr uint32_t outputs() const { return rows * (simdgroups / splits); }  // of a threadgroup
  constexpr uint32_t threads() const { return simdgroups * simd_width; }
  constexpr bool operator==(const GemvShape&) const = default;
};

// In the order of the kernels' names. The plain one is the last.
constexpr GemvShape gemv_shapes[] = {
#define QGEMV_SHAPE(none, ...) {__VA_ARGS__},
    QGEMV_GEMV_SHAPES(QGEMV_SHAPE, ) QGEMV_PLAIN_GEMV_SHAPE(QGEMV_SHAPE, )
#undef QGEMV_SHAPE
};
constexpr const char* gemv_names[] = {
#define QGEMV_SHAPE_NAME(none, rows, simdgroups, splits) "r" #rows "_s" #simdgroups "_k" #splits,
    QGEMV_GEMV_SHAPES(QGEMV_SHAPE_NAME, ) "plain"
#undef QGEMV_SHAPE_NAME
};
constexpr int gemv_variants = int(std::size(gemv_shapes));
static_assert(std::size(gemv_names) == gemv_variants);
constexpr int plain_gemv = gemv_variants - 1;

constexpr int gemv_variant(GemvShape shape) {
  int variant = 0;
  while (gemv_shapes[variant] != shape) ++variant;
  return variant;
}

// Metal does not tell how many cores a GPU has. Between 7 (M1) and 80 (M2 Ultra), most Macs in use have 8 to 20. A
// wrong guess costs little: next to a limit both kernels are about as good.
constexpr uint32_t assumed_cores = 16;

// By N, K, the GPU's cores, and the format: by how many rows fit its registers (GemvRows). A table that was measured on
// the user's GPU may say otherwise: tuning.h.
//
//   N from, a core   rows  splits  SIMD-groups a core   why
//   96               8     2       24 and more          fewest operations of those that keep up with the memory
//   0                8     4       up to 48             more SIMD-groups, which hide the memory's latency
//   any              4     2                            for formats whose 8 rows would not fit
//
// K has to be worth that: below 2048 a kernel of 4 rows without splits, below 4096 no more than two.
//
// Evidence: an NVIDIA H200 (132 cores), with the 128 registers a lane that Apple's GPUs have. Its times say nothing of
// Apple's but show latency. There, in percent of a pure read for half x, the kernels (rows/splits) reached
//   K x N            Q4_K 8/1  8/2   8/4   4/1   4/2     Q6_K 8/2   8/4   4/1   4/2
//   4096 x 4096      43.5      62.6  70.0  54.1  68.1         26.2  21.5  44.9  53.1
//   14336 x 4096     33.9      54.0  65.4  44.3  63.1         25.2  23.0  40.1  48.8
//   4096 x 14336     55.1      61.9  59.0  57.1  61.6         21.7  20.6  49.2  49.0
//   8192 x 28672     55.0      67.0  65.9  65.4  66.6         22.2  22.2  49.5  50.9
// 8/1 has wide lanes, the fewest operations of all (0.27 cycles a weight less by the cost table), but waits longest: no
// plan chooses it, only a table. No time has been measured on an Apple GPU.
constexpr int choose_gemv(uint32_t most_rows, int64_t N, int64_t K, uint32_t cores = assumed_cores) {
  if (K < 2048) return gemv_variant({4, 2, 1});
  if (most_rows < 8) return gemv_variant({most_rows, 2, 2});
  if (N >= 96 * int64_t(cores) || K < 4096) return gemv_variant({8, 2, 2});
  return gemv_variant({8, 4, 4});
}

}  // namespace qgemv::mps
