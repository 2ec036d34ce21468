// Everything about a launch that can be decided, and be wrong, without a GPU: which kernel, its arguments, its grid.
// Portable C++, tested on any machine; launcher.mm does what is planned here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include "gemv_plan.h"
#include "tuning.h"

namespace qgemv::mps {

// ---- Kernels
enum Family {
  gemv,
  dequantize,
  embedding,
  // By rows of x, or of a tile of y.
  rows2,
  rows3,
  rows4,
  tiles,
  matmul32,
  matmul64,
  transposed32,
  transposed64,
  // By experts.
  expert_gemv,
  routes,
  expert_tiles,
  expert_matmul,
  expert_transposed,
  family_count
};
enum Dtype { float32, float16, bfloat16, dtype_count };
constexpr const char* metal_types[] = {"float", "half", "bfloat"};

// What Metal compiles at once: a source, for one format and type of x.
enum Source {
  gemv_source,
  dequantize_source,
  rows_source,
  tiles_source,
  matmul_source,
  transposed_source,
  expert_gemv_source,
  experts_source,
  source_count
};
constexpr Source family_sources[family_count] = {
    gemv_source,    dequantize_source, dequantize_source, rows_source,       rows_source,       rows_source,
    tiles_source,   matmul_source,     matmul_source,     transposed_source, transposed_source, expert_gemv_source,
    experts_source, experts_source,    experts_source,    experts_source};
constexpr Source source_of(Family family) { return family_sources[family]; }

struct Format {
  const char* name;
  int64_t id;
  uint32_t block_size, type_size, alignment, gemv_rows;
};
constexpr Format formats[] = {
#define QGEMV_FORMAT(F) {#F, F::id, F::block_size, sizeof(F::Block), Alignment<F>::bytes, GemvRows<F>::most},
    QGEMV_FORMATS(QGEMV_FORMAT)
#undef QGEMV_FORMAT
};
constexpr int format_count = int(std::size(formats));

// Where the GGUF type id is in formats; it has been checked to be there.
constexpr int format_index(int64_t id) {
  int index = 0;
  while (formats[index].id != id) ++index;
  return index;
}

// SIMD-groups of the rows kernels, in the order of the kernels' names. The plain one is the last.
constexpr uint32_t rows_shapes[] = {
#define QGEMV_SIMDGROUPS(none, simdgroups) simdgroups,
    QGEMV_ROWS_SHAPES(QGEMV_SIMDGROUPS, ) QGEMV_PLAIN_ROWS_SHAPE(QGEMV_SIMDGROUPS, )
#undef QGEMV_SIMDGROUPS
};

// A kernel's variants: the usual ones, and behind them the plain one for weights that aren't aligned.
constexpr bool is_gemv(Family family) { return family == gemv || family == expert_gemv; }
constexpr bool is_rows(Family family) { return family == rows2 || family == rows3 || family == rows4; }
constexpr int variant_count(Family family) {
  return is_gemv(family) ? gemv_variants : is_rows(family) ? int(std::size(rows_shapes)) : family == routes ? 1 : 2;
}
constexpr int plain_variant(Family family) { return variant_count(family) - 1; }

constexpr const char* kernel_names[] = {
#define QGEMV_SHAPE_NAME(family, F, T, rows, simdgroups, splits) \
  #family "_" #F "_" #T "_r" #rows "_s" #simdgroups "_k" #splits,
#define QGEMV_GEMV_NAMES(family, F, T) QGEMV_GEMV_SHAPES(QGEMV_SHAPE_NAME, family, F, T) #family "_" #F "_" #T "_plain",
#define QGEMV_ROWS_NAME(family, F, T, simdgroups) #family "_" #F "_" #T "_s" #simdgroups,
#define QGEMV_ROWS_NAMES(family, F, T) QGEMV_ROWS_SHAPES(QGEMV_ROWS_NAME, family, F, T) #family "_" #F "_" #T "_plain",
#define QGEMV_ONE_NAME(family, F, T) #family "_" #F "_" #T,
#define QGEMV_TWO_NAMES(family, F, T) #family "_" #F "_" #T, #family "_" #F "_" #T "_plain",
#define QGEMV_GEMV(F) QGEMV_EACH_TYPE(QGEMV_GEMV_NAMES, gemv, F)
#define QGEMV_DEQUANTIZE(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, dequantize, F)
#define QGEMV_EMBEDDING(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, embedding, F)
#define QGEMV_ROWS2(F) QGEMV_EACH_TYPE(QGEMV_ROWS_NAMES, rows2, F)
#define QGEMV_ROWS3(F) QGEMV_EACH_TYPE(QGEMV_ROWS_NAMES, rows3, F)
#define QGEMV_ROWS4(F) QGEMV_EACH_TYPE(QGEMV_ROWS_NAMES, rows4, F)
#define QGEMV_TILES(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, tiles, F)
#define QGEMV_MATMUL32(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, matmul32, F)
#define QGEMV_MATMUL64(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, matmul64, F)
#define QGEMV_TRANSPOSED32(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, transposed32, F)
#define QGEMV_TRANSPOSED64(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, transposed64, F)
#define QGEMV_EXPERT_GEMV(F) QGEMV_EACH_TYPE(QGEMV_GEMV_NAMES, expert_gemv, F)
#define QGEMV_ROUTES(F) QGEMV_EACH_TYPE(QGEMV_ONE_NAME, routes, F)
#define QGEMV_EXPERT_TILES(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, expert_tiles, F)
#define QGEMV_EXPERT_MATMUL(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, expert_matmul, F)
#define QGEMV_EXPERT_TRANSPOSED(F) QGEMV_EACH_TYPE(QGEMV_TWO_NAMES, expert_transposed, F)
    QGEMV_FORMATS(QGEMV_GEMV) QGEMV_FORMATS(QGEMV_DEQUANTIZE) QGEMV_FORMATS(QGEMV_EMBEDDING) QGEMV_FORMATS(QGEMV_ROWS2)
        QGEMV_FORMATS(QGEMV_ROWS3) QGEMV_FORMATS(QGEMV_ROWS4) QGEMV_FORMATS(QGEMV_TILES) QGEMV_FORMATS(QGEMV_MATMUL32)
            QGEMV_FORMATS(QGEMV_MATMUL64) QGEMV_FORMATS(QGEMV_TRANSPOSED32) QGEMV_FORMATS(QGEMV_TRANSPOSED64)
                QGEMV_FORMATS(QGEMV_EXPERT_GEMV) QGEMV_FORMATS(QGEMV_ROUTES) QGEMV_FORMATS(QGEMV_EXPERT_TILES)
                    QGEMV_FORMATS(QGEMV_EXPERT_MATMUL) QGEMV_FORMATS(QGEMV_EXPERT_TRANSPOSED)
#undef QGEMV_EXPERT_TRANSPOSED
#undef QGEMV_EXPERT_MATMUL
#undef QGEMV_EXPERT_TILES
#undef QGEMV_ROUTES
#undef QGEMV_EXPERT_GEMV
#undef QGEMV_TRANSPOSED64
#undef QGEMV_TRANSPOSED32
#undef QGEMV_MATMUL64
#undef QGEMV_MATMUL32
#undef QGEMV_TILES
#undef QGEMV_ROWS4
#undef QGEMV_ROWS3
#undef QGEMV_ROWS2
#undef QGEMV_EMBEDDING
#undef QGEMV_DEQUANTIZE
#undef QGEMV_GEMV
#undef QGEMV_TWO_NAMES
#undef QGEMV_ONE_NAME
#undef QGEMV_ROWS_NAMES
#undef QGEMV_ROWS_NAME
#undef QGEMV_GEMV_NAMES
#undef QGEMV_SHAPE_NAME
};
constexpr int kernel_count = int(std::size(kernel_names));

// Where a family's kernels begin in kernel_names.
constexpr int first_kernel(Family family) {
  int first = 0;
  for (int f = 0; f < family; ++f) first += format_count * dtype_count * variant_count(Family(f));
  return first;
}
static_assert(kernel_count == first_kernel(family_count));

// No threadgroup is larger.
constexpr uint64_t max_threads_per_group = 256;

struct Kernel {
  Family family;
  int format;
  Dtype dtype;
  int variant;
  constexpr int index() const {
    return first_kernel(family) + (format * dtype_count + dtype) * variant_count(family) + variant;
  }
  constexpr const char* name() const { return kernel_names[index()]; }
  // Of its largest threadgroup.
  constexpr uint64_t threads() const {
    if (is_gemv(family)) return gemv_shapes[variant].threads();
    return is_rows(family) ? rows_shapes[variant] * simd_width : max_threads_per_group;
  }
};

// ---- Plans
struct Size {
  uint64_t x, y;
};

template <typename Params, typename AnyKernel = Kernel>
struct Plan {
  AnyKernel kernel;
  Params params;
  Size grid, threadgroup;  // threads
};

// A packed weight as it lies in its buffer.
struct Weight {
  int format;
  int64_t N, K;
  uint64_t offset, row_bytes;  // bytes before its first row, and from one row to the next
};

inline void check_range(const char* op, const char* what, int64_t size, uint64_t limit, const Weight& w) {
  if (size >= 0 && uint64_t(size) <= limit) return;
  throw std::length_error(std::string("torch_qgemv.") + op + ": " + what + " = " + std::to_string(size) +
                          " is more than the " + std::to_string(limit) + " that an MPS kernel takes (weight of N = " +
                          std::to_string(w.N) + ", K = " + std::to_string(w.K) + ")");
}

constexpr uint64_t max_uint32 = 0xffffffff;
// Metal counts threads in 32 bits: by the kernels that make large N, 8 to an output.
constexpr uint64_t max_gemv_N = max_uint32 / 8 / 8 * 8;
// Within the rows of a SIMD-group of the gemv kernels, of a lane of the rows kernels, offsets have 32 bits.
constexpr uint64_t max_gemv_row_bytes = max_uint32 / 8;

constexpr bool is_aligned(const Weight& w) {
  const uint32_t alignment = formats[w.format].alignment;
  return w.offset % alignment == 0 && w.row_bytes % alignment == 0;
}

// The gemv kernel for N outputs of such a weight, all those that one launch makes: the plain one where it isn't
// aligned, else the one that a table names, else the one of the rule. All plans of gemv kernels choose by this.
inline int choose_variant(const Weight& w, int64_t N, Dtype dtype, const Tuning& tuning,
                          uint32_t cores = assumed_cores) {
  if (!is_aligned(w)) return plain_gemv;
  const int built_in = choose_gemv(formats[w.format].gemv_rows, N, w.K, cores);
  return tuning.find(w.format, dtype, N, w.K).value_or(built_in);
}

// Rows of x of the gemv kernels, each of which reads the weight again.
constexpr int64_t max_gemv_M = 8;

// Rows of x are read in whole vectors; others are copied first.
constexpr uint64_t x_alignment = 16;
constexpr bool x_is_aligned(uint64_t offset, uint64_t row_bytes) {
  return offset % x_alignment == 0 && row_bytes % x_alignment == 0;
}

// M rows of x, x_stride elements apart, by a kernel that choose_variant() gives, or another one where w is aligned.
inline Plan<LinearParams> plan_gemv(const Weight& w, int64_t M, int64_t x_stride, Dtype dtype, uint32_t bias_type,
                                    int variant) {
  check_range("linear", "M", M, max_gemv_M, w);
  check_range("linear", "N", w.N, max_gemv_N, w);
  check_range("linear", "K", w.K, max_uint32, w);
  check_range("linear", "bytes from row to row", int64_t(w.row_bytes), max_gemv_row_bytes, w);
  const GemvShape shape = gemv_shapes[variant];
  const uint64_t groups = (uint64_t(w.N) + shape.outputs() - 1) / shape.outputs();
  return {{gemv, w.format, dtype, variant},
          {w.row_bytes, uint64_t(x_stride), uint32_t(w.N), uint32_t(w.K), bias_type, 0},
          {groups * shape.threads(), uint64_t(M)},
          {shape.threads(), 1}};
}

// One thread for every 16 weights of every row.
inline Size decode_grid(const Weight& w, int64_t rows) { return {uint64_t(w.K) / chunk_size, uint64_t(rows)}; }
inline Size decode_threadgroup(const Size& grid) {
  const uint64_t x = std::min(grid.x, max_threads_per_group);
  return {x, std::min(grid.y, max_threads_per_group / x)};
}

// Of a family that has a usual kernel and a plain one.
inline Kernel kernel_for(Family family, const Weight& w, Dtype dtype) {
  return {family, w.format, dtype, is_aligned(w) ? 0 : plain_variant(family)};
}

inline Plan<DequantizeParams> plan_dequantize(const Weight& w, Dtype dtype) {
  check_range("dequantize", "N", w.N, max_uint32, w);
  check_range("dequantize", "K", w.K, max_uint32, w);
  const Size grid = decode_grid(w, w.N);
  return {kernel_for(dequantize, w, dtype), {w.row_bytes, uint32_t(w.K), 0}, grid, decode_threadgroup(grid)};
}

inline Plan<EmbeddingParams> plan_embedding(const Weight& w, int64_t indices, uint32_t index_bytes, Dtype dtype) {
  check_range("embedding", "number of indices", indices, max_uint32, w);
  check_range("embedding", "N", w.N, max_uint32, w);
  check_range("embedding", "K", w.K, max_uint32, w);
  const Size grid = decode_grid(w, indices);
  return {kernel_for(embedding, w, dtype),
          {w.row_bytes, uint32_t(w.N), uint32_t(w.K), index_bytes, 0},
          grid,
          decode_threadgroup(grid)};
}

}  // namespace qgemv::mps
