// Everything about a launch that can be decided, and be wrong, without a GPU: which kernel, its arguments, its grid.
// Portable C++, tested on any machine; launcher.mm does what is planned here.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include "../../metal/params.h"

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
  family_count
};
enum Dtype { float32, float16, bfloat16, dtype_count };

// What Metal compiles at once: a source, for one format.
enum Source {
  gemv_source,
  dequantize_source,
  rows_source,
  tiles_source,
  matmul_source,
  transposed_source,
  source_count
};
constexpr Source family_sources[family_count] = {gemv_source,   dequantize_source, dequantize_source, rows_source,
                                                 rows_source,   rows_source,       tiles_source,      matmul_source,
                                                 matmul_source, transposed_source, transposed_source};
constexpr Source source_of(Family family) { return family_sources[family]; }

struct Format {
  const char* name;
  int64_t id;
  uint32_t block_size, type_size, alignment;
};
constexpr Format formats[] = {
#define QGEMV_FORMAT(F) {#F, F::id, F::block_size, sizeof(F::Block), Alignment<F>::bytes},
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

constexpr int variant_count = 2;  // the usual kernel, and the plain one for weights that aren't aligned
constexpr const char* kernel_names[] = {
#define QGEMV_VARIANTS(family, F, T) #family "_" #F "_" #T, #family "_" #F "_" #T "_plain",
#define QGEMV_TYPES(family, F) \
  QGEMV_VARIANTS(family, F, float) QGEMV_VARIANTS(family, F, half) QGEMV_VARIANTS(family, F, bfloat)
#define QGEMV_GEMV(F) QGEMV_TYPES(gemv, F)
#define QGEMV_DEQUANTIZE(F) QGEMV_TYPES(dequantize, F)
#define QGEMV_EMBEDDING(F) QGEMV_TYPES(embedding, F)
#define QGEMV_ROWS2(F) QGEMV_TYPES(rows2, F)
#define QGEMV_ROWS3(F) QGEMV_TYPES(rows3, F)
#define QGEMV_ROWS4(F) QGEMV_TYPES(rows4, F)
#define QGEMV_TILES(F) QGEMV_TYPES(tiles, F)
#define QGEMV_MATMUL32(F) QGEMV_TYPES(matmul32, F)
#define QGEMV_MATMUL64(F) QGEMV_TYPES(matmul64, F)
#define QGEMV_TRANSPOSED32(F) QGEMV_TYPES(transposed32, F)
#define QGEMV_TRANSPOSED64(F) QGEMV_TYPES(transposed64, F)
    QGEMV_FORMATS(QGEMV_GEMV) QGEMV_FORMATS(QGEMV_DEQUANTIZE) QGEMV_FORMATS(QGEMV_EMBEDDING) QGEMV_FORMATS(QGEMV_ROWS2)
        QGEMV_FORMATS(QGEMV_ROWS3) QGEMV_FORMATS(QGEMV_ROWS4) QGEMV_FORMATS(QGEMV_TILES) QGEMV_FORMATS(QGEMV_MATMUL32)
            QGEMV_FORMATS(QGEMV_MATMUL64) QGEMV_FORMATS(QGEMV_TRANSPOSED32) QGEMV_FORMATS(QGEMV_TRANSPOSED64)
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
#undef QGEMV_TYPES
#undef QGEMV_VARIANTS
};
constexpr int kernel_count = int(std::size(kernel_names));
static_assert(kernel_count == family_count * format_count * dtype_count * variant_count);

struct Kernel {
  Family family;
  int format;
  Dtype dtype;
  bool plain;
  constexpr int index() const {
    return ((family * format_count + format) * dtype_count + dtype) * variant_count + plain;
  }
  constexpr const char* name() const { return kernel_names[index()]; }
};

// ---- Plans
struct Size {
  uint64_t x, y;
};

template <typename Params>
struct Plan {
  Kernel kernel;
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
constexpr uint32_t rows_per_group = rows_per_simdgroup * simdgroups_per_group;
// Metal counts threads in 32 bits.
constexpr uint64_t max_gemv_N = max_uint32 / (simd_width * simdgroups_per_group) * rows_per_group;

inline Kernel kernel_for(Family family, const Weight& w, Dtype dtype) {
  const uint32_t alignment = formats[w.format].alignment;
  return {family, w.format, dtype, w.offset % alignment != 0 || w.row_bytes % alignment != 0};
}

// Rows of x of the gemv kernels, each of which reads the weight again.
constexpr int64_t max_gemv_M = 8;

// Rows of x are read in whole vectors; others are copied first.
constexpr uint64_t x_alignment = 16;
constexpr bool x_is_aligned(uint64_t offset, uint64_t row_bytes) {
  return offset % x_alignment == 0 && row_bytes % x_alignment == 0;
}

// M rows of x, x_stride elements apart.
inline Plan<LinearParams> plan_gemv(const Weight& w, int64_t M, int64_t x_stride, Dtype dtype, uint32_t bias_type) {
  check_range("linear", "M", M, max_gemv_M, w);
  check_range("linear", "N", w.N, max_gemv_N, w);
  check_range("linear", "K", w.K, max_uint32, w);
  const uint64_t groups = (uint64_t(w.N) + rows_per_group - 1) / rows_per_group;
  const uint64_t threads = simd_width * simdgroups_per_group;
  return {kernel_for(gemv, w, dtype),
          {w.row_bytes, uint64_t(x_stride), uint32_t(w.N), uint32_t(w.K), bias_type, 0},
          {groups * threads, uint64_t(M)},
          {threads, 1}};
}

// No threadgroup is larger.
constexpr uint64_t max_threads_per_group = 256;

// One thread for every 16 weights of every row.
inline Size decode_grid(const Weight& w, int64_t rows) { return {uint64_t(w.K) / chunk_size, uint64_t(rows)}; }
inline Size decode_threadgroup(const Size& grid) {
  const uint64_t x = std::min(grid.x, max_threads_per_group);
  return {x, std::min(grid.y, max_threads_per_group / x)};
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
