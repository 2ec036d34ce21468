// What the launcher and the kernels agree on: arguments, geometry, alignment. Read by the Metal compiler and by
// csrc/mps/launch_plan.h.
#pragma once
#include "formats.h"

namespace qgemv {

enum : uint32_t { simd_width = 32 };  // lanes of a SIMD-group

// The gemv kernels that there are for every format and type of x, _(arguments..., rows, simdgroups, splits):
//   rows        outputs that a SIMD-group makes
//   simdgroups  SIMD-groups in a threadgroup
//   splits      how many of them share the same outputs, a part of K each
// csrc/mps/gemv_plan.h chooses, and has the reasons. Weights that aren't aligned have one more kernel, the plain one.
#define QGEMV_GEMV_SHAPES(_, ...) \
  _(__VA_ARGS__, 8, 2, 1)         \
  _(__VA_ARGS__, 8, 2, 2) _(__VA_ARGS__, 8, 4, 4) _(__VA_ARGS__, 4, 2, 1) _(__VA_ARGS__, 4, 2, 2)
#define QGEMV_PLAIN_GEMV_SHAPE(_, ...) _(__VA_ARGS__, 4, 2, 1)

// The types of x and y: all, or the one that a library is compiled for.
#ifdef QGEMV_TYPE
#define QGEMV_EXPANDED(_, ...) _(__VA_ARGS__)
#define QGEMV_EACH_TYPE(_, ...) QGEMV_EXPANDED(_, __VA_ARGS__, QGEMV_TYPE)
#else
#define QGEMV_EACH_TYPE(_, ...) _(__VA_ARGS__, float) _(__VA_ARGS__, half) _(__VA_ARGS__, bfloat)
#endif

// Geometry of the kernels for several rows of x.
enum : uint32_t {
  rows_outputs = 4,  // outputs a row of x that a lane of the rows kernels adds to; four lanes have different ones
  max_rows = 4,      // most rows of x that they are made for

  tiles_outputs = 16,  // the same of the tiles kernels
  tiles_simdgroups = 2,
  max_tiles_rows = 8,

  matmul_outputs = 64  // columns of a tile of the matrix kernels
};

// The rows kernels that there are for every format, type and number of rows of x, _(arguments..., simdgroups): those of
// a threadgroup, which share its outputs, a part of K each. csrc/mps/matmul_plan.h chooses. The plain one, for weights
// that aren't aligned, has the fewer.
#define QGEMV_ROWS_SHAPES(_, ...) _(__VA_ARGS__, 8) _(__VA_ARGS__, 4)
#define QGEMV_PLAIN_ROWS_SHAPE(_, ...) _(__VA_ARGS__, 4)

// A bias is read in the type it has.
enum : uint32_t { no_bias, float_bias, half_bias, bfloat_bias };

struct LinearParams {
  uint64_t row_bytes;  // from one row of the weight to the next
  uint64_t x_stride;   // elements from one row of x to the next
  uint32_t N, K;
  uint32_t bias_type;
  uint32_t M;  // rows of x; for the matrix and tiles kernels
};
static_assert(sizeof(LinearParams) == 32, "the same on both sides");

// Products of one row of x with several weights. The first groups of the grid make those of part 0, and so on.
enum : uint32_t { fused_weights = 4 };  // at most, in one launch
struct FusedPart {
  LinearParams product;
  uint32_t groups;       // threadgroups
  uint32_t kernel_case;  // which of the kernels that the library was compiled for
};
struct FusedParams {
  FusedPart part[fused_weights];
};
static_assert(sizeof(FusedParams) == fused_weights * 40, "the same on both sides");

struct DequantizeParams {
  uint64_t row_bytes;
  uint32_t K;
  uint32_t reserved;
};
static_assert(sizeof(DequantizeParams) == 16, "the same on both sides");

struct EmbeddingParams {
  uint64_t row_bytes;
  uint32_t N, K;
  uint32_t index_bytes;  // 4 or 8
  uint32_t reserved;
};
static_assert(sizeof(EmbeddingParams) == 24, "the same on both sides");

// A product by experts. Its rows are those of y, one for each of ids; neighbouring ones have the same row of x.
struct ExpertParams {
  LinearParams product;   // of one expert
  uint64_t expert_bytes;  // from one expert's weight to the next
  uint32_t experts;       // at least one
  uint32_t rows_per_x;    // rows of y for a row of x
  uint32_t index_bytes;   // of an id: 4 or 8
  uint32_t reserved;
};
static_assert(sizeof(ExpertParams) == 56, "the same on both sides");

struct RouteParams {
  uint32_t rows, experts, tile_rows, tiles;
  uint32_t index_bytes;
};
static_assert(sizeof(RouteParams) == 20, "the same on both sides");

// Rows order[first] .. order[first + count - 1] of one expert; `expert` is the number of experts where ids named none
// of them.
struct RouteTile {
  uint32_t expert, first, count;
};
static_assert(sizeof(RouteTile) == 12, "the same on both sides");

enum : uint32_t { expert_tile_rows = 32 };  // of the matrix kernels by experts; those of tiles have max_tiles_rows

// Bytes that the start of every row must be a multiple of for a format's usual kernels; elsewhere its plain kernels
// run, which read single bytes. Without an entry here: two, for fields of 16 bits.
template <typename F>
struct Alignment {
  enum : uint32_t { bytes = 2 };
};
template <>
struct Alignment<Q4_K> {
  enum : uint32_t { bytes = 16 };
};
template <>
struct Alignment<Q5_K> {
  enum : uint32_t { bytes = 16 };
};
template <>
struct Alignment<IQ4_XS> {
  enum : uint32_t { bytes = 8 };
};

// Most outputs of a SIMD-group of gemv whose blocks fit a lane's registers beside its x. An Apple GPU has 128 of 32
// bits; by a compiler for NVIDIA GPUs, 8 outputs of these formats take 168 to 255, of the others 80 to 128.
template <typename F>
struct GemvRows {
  enum : uint32_t { most = 8 };
};
struct FewGemvRows {
  enum : uint32_t { most = 4 };
};
template <>
struct GemvRows<Q2_K> : FewGemvRows {};
template <>
struct GemvRows<Q3_K> : FewGemvRows {};
template <>
struct GemvRows<Q6_K> : FewGemvRows {};

}  // namespace qgemv
