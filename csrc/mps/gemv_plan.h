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
constexpr int gemv_variants = int(std::size(gemv_shapes));
constexpr int plain_gemv = gemv_variants - 1;

constexpr int gemv_variant(GemvShape shape) {
  int variant = 0;
  while (gemv_shapes[variant] != shape) ++variant;
  return variant;
}

// Metal does not tell how many cores a GPU has. Between 7 (M1) and 80 (M2 Ultra), most Macs in use have 8 to 20. A
// wrong guess costs little: next to a limit both kernels are about as good.
constexpr uint32_t assumed_cores = 16;

// By N, K, the bytes of a number of x and the GPU's cores. The format makes no difference.
//
//   N from, a core   rows  splits  SIMD-groups a core   why
//   512              8     1       64 and more          fewest operations: wide lanes, 0.27 cycles a weight less
//   96               8     2       24 and more          more SIMD-groups, which hide the memory's latency
//   0                8     4       up to 48             the same
//
// K has to be worth that: below 2048 a kernel of 4 rows without splits, below 4096 no more than two.
//
// Evidence: the cost table, where 8 rows instead of 4 save 0.01 (IQ4_XS) to 0.14 cycles per weight, as the sum of x
// serves twice as many outputs; and an NVIDIA H200 (132 cores), whose times say nothing of Apple's but show latency.
// There, in percent of a pure read for Q4_K, the kernels 8/1, 8/2, 8/4 and 4/1 (rows/splits) reached
//   K x N            8/1    8/2    8/4    4/1
//   4096 x 4096      48.3   60.9   69.4   52.2
//   14336 x 4096     40.9   54.4   65.8   44.4
//   4096 x 14336     50.3   60.0   57.2   55.3
//   8192 x 28672     60.9   67.2   66.0   64.9
// 8/1 suffers there from its 168 registers a lane. With float32 x it would take still more, so such x never gets it.
// No time has been measured on an Apple GPU.
constexpr int choose_gemv(int64_t N, int64_t K, uint32_t x_bytes, uint32_t cores = assumed_cores) {
  if (K < 2048) return gemv_variant({4, 2, 1});
  if (N >= 512 * int64_t(cores) && x_bytes == 2) return gemv_variant({8, 2, 1});
  if (N >= 96 * int64_t(cores) || K < 4096) return gemv_variant({8, 2, 2});
  return gemv_variant({8, 4, 4});
}

}  // namespace qgemv::mps
