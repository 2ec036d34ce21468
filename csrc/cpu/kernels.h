// The seam between the operators and the CPU kernels. Kernel files include no torch header; each is compiled for one
// instruction set and chosen at run time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace qgemv::cpu {

enum class Dtype { f32, f16, bf16 };

constexpr int chunk = 256;        // activations that share one scale
constexpr int token_block = 128;  // most rows of x in one call of `linear`
constexpr int panel_rows = 16;    // rows of W that are multiplied together, and interleaved in a panel

// Packed weights of N rows. Plain: row n starts at data + n * row_stride. Interleaved: the first N / 16 * 16 rows lie
// in panels, 16 rows each, in the same bytes as those rows would; the rows left over follow them as they are. In a
// panel lie, block by block, the same block of its 16 rows, and in there, unit by unit (halves before, words, halves
// behind, see metal/formats/common.h), the same unit of the 16 rows. The same on every processor.
struct Weight {
  int64_t quant_type;
  const uint8_t* data;
  int64_t row_stride, N, K;
  bool interleaved;
};

struct LinearArgs {
  Weight weight;
  const void* activations;  // as written by pack: [chunks of K][tokens] structs of activation_bytes
  int64_t tokens;           // rows of x, at most token_block
  const float* bias;        // [N] or null
  void* y;                  // [tokens, N]
  Dtype dtype;              // of x and y
};

constexpr int64_t transposed_columns = 256;  // whole blocks of every format
constexpr int64_t transposed_stride = 272;   // of rows of as many columns: a power of two would strain the L1 cache

// sums[m][c] += sum over r < rows of grad_y[m * stride + r] * w[r][c]
struct Products {
  const float* grad_y;
  int64_t stride, tokens;
  const float* w;  // [rows][transposed_stride]
  int64_t rows;
  float* sums;  // [tokens][transposed_stride]
};

struct QuantizeArgs {
  int64_t quant_type;
  const void* x;            // [N, K] values of `dtype`
  const float* importance;  // [K], not negative, with a mean of 1; or null
  int64_t N, K;
  Dtype dtype;
  uint8_t* out;  // [N, row_bytes]
};

// One instruction set. Activations become integers once per call: 16 bits for bf16 x, 24 for fp16 and fp32 x.
struct Kernels {
  const char* name;
  bool (*supported)();
  // Bytes of one chunk of one row of x.
  size_t (*activation_bytes)(Dtype dtype);
  // Packs row `token` of x, contiguous, K values of `dtype`. False: it holds an infinity, a NaN or only tiny numbers,
  // and integers can't stand for it; use linear_exact for that row.
  bool (*pack)(const Weight& weight, const void* x, Dtype dtype, int64_t token, int64_t tokens, void* activations);
  // Panels [begin, end), the last of which may have fewer rows.
  void (*linear)(const LinearArgs& args, int64_t begin, int64_t end);
  // `count` columns of row n of W from column `first` on, both whole blocks, as values of `dtype`.
  void (*dequantize_row)(const Weight& weight, int64_t n, int64_t first, int64_t count, Dtype dtype, void* out);
  void (*add_products)(const Products& products);
  // Full panels [begin, end) of plain rows, to where they start.
  void (*interleave)(const Weight& plain, int64_t begin, int64_t end, uint8_t* out);
  // Encodes blocks [16 * begin, 16 * end) of all, counted row by row. Returns the first that can't be encoded, or -1:
  // it holds an infinity, a NaN or values too large for the format's scale.
  int64_t (*quantize)(const QuantizeArgs& args, int64_t begin, int64_t end);
  // Reads `bytes` bytes as fast as this instruction set can, and does nothing else: the yardstick of the benchmarks.
  uint32_t (*read)(const uint8_t* data, int64_t bytes);
  // Multiply-adds of floats and nothing else; writes a sum of them, returns how many floating-point operations it made.
  double (*fma_rate)(int64_t passes, float* out);
};

extern const Kernels avx512_vnni, avx_vnni, avx2, neon_dotprod, portable;

// All that were built for this processor family, best first. Which of them can run here: supported().
inline constexpr const Kernels* all_kernels[] = {
#if defined(__x86_64__)
    &avx512_vnni,
    &avx_vnni,
    &avx2,
#elif defined(__aarch64__)
    &neon_dotprod,
#endif
    &portable,
};

// Row n of an interleaved weight as GGUF has it.
void deinterleave_row(const Weight& weight, int64_t n, uint8_t* out);

// y[n] = x . w_n + bias[n] for rows [begin, end) in double precision, any finite or non-finite x. Slow.
void linear_exact(const Weight& weight, const float* x, const float* bias, float* y, int64_t begin, int64_t end);

// K values of `dtype` as floats, and back.
void to_float(const void* from, Dtype dtype, int64_t count, float* to);
void from_float(const float* from, Dtype dtype, int64_t count, void* to);

}  // namespace qgemv::cpu
