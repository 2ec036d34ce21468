// The product for many rows of x, and its transposed form for gradients:
//   Forward     y[m][n] = sum over k of x[m][k] * W[n][k], + bias
//   Transposed  y[m][k] = sum over n of x[m][n] * W[n][k]; here x is the gradient of an output
// A threadgroup makes a tile of R rows and matmul_outputs columns of y. Step by step, it decodes matmul_outputs by 32
// weights into threadgroup memory, once for all R rows, and puts R by 32 x beside them, in their own type; then each of
// its SIMD-groups multiplies 32 x 32 of the tile by 8x8 matrices, with float sums.
//
// A step is one piece of each row of the weight (decode8.h). The order of a piece's weights along K is of no matter to
// a sum over K, as long as x follows it; along y it is put right in the end.
#pragma once
#include "bias.h"
#include "decode8.h"

namespace qgemv {

// Memory of a step: the weights' rows, then x's rows, each with 16 bytes to spare, so that neighbouring rows lie in
// different banks.
template <typename T>
struct Step {
  enum { size = 32, weight_words = matmul_outputs * (size + 4), x_stride = size + 16 / sizeof(T) };
};
// Rows of the finished tile lie in the same memory.
enum { tile_stride = matmul_outputs + 4 };

template <typename T, int R>
struct TileMemory {
  enum {
    step = Step<T>::weight_words * 4 + R * Step<T>::x_stride * sizeof(T),
    finished = R * tile_stride * 4,
    vectors = (step > finished ? step : finished) / 16
  };
};

template <typename P>
inline void put_piece(thread const P& piece, threadgroup const uint* table, threadgroup float* to) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float w[8];
    piece.decode(i, table, w);
    ((threadgroup float4*)to)[2 * i] = float4(w[0], w[1], w[2], w[3]);
    ((threadgroup float4*)to)[2 * i + 1] = float4(w[4], w[5], w[6], w[7]);
  }
}

// Step s takes piece s of matmul_outputs rows of the weight, a row a thread.
template <typename F, typename S>
struct Forward {
  typedef Piece<F, S> P;
  enum { transposed = false, weight_stride = 32 + 4 };
  uint first, N, steps;
  device const uchar* row;

  Forward(device const uchar* weight, constant LinearParams& p, uint tile, uint thread_index)
      : first(tile * matmul_outputs), N(p.N), steps(p.K / piece_size) {
    row = weight + ulong(min(first + thread_index, N - 1)) * p.row_bytes;  // past the last row: that one
  }
  void put_weights(uint step, uint thread_index, threadgroup const uint* table, threadgroup float* to) const {
    P piece;
    piece.load(row + ulong(step / P::per_block) * sizeof(typename F::Block), step % P::per_block);
    put_piece(piece, table, to + thread_index * weight_stride);
  }
  // Where the four x begin that go with the step's weights 4 * quad ..
  uint x_column(uint step, uint quad) const {
    return step / P::per_block * F::block_size + P::start(step % P::per_block) + P::quad(quad);
  }
  uint outputs() const { return N; }
  uint output(uint column) const { return first + column; }
};

// Step s takes 32 rows of the weight, of each of them the pieces 2 * tile and 2 * tile + 1: a piece a thread.
template <typename F, typename S>
struct Transposed {
  typedef Piece<F, S> P;
  enum { transposed = true, weight_stride = matmul_outputs + 4 };
  uint first, pieces, N, steps, t;
  ulong row_bytes;
  device const uchar* block;

  Transposed(device const uchar* weight, constant LinearParams& p, uint tile, uint thread_index)
      : first(2 * tile), pieces(p.K / piece_size), N(p.N), steps((p.N + 31) / 32), row_bytes(p.row_bytes) {
    const uint piece = min(first + thread_index / 32, pieces - 1);  // past the last one: that one
    t = piece % P::per_block;
    block = weight + ulong(piece / P::per_block) * sizeof(typename F::Block);
  }
  // Rows past the last are that one again; x is 0 there.
  void put_weights(uint step, uint thread_index, threadgroup const uint* table, threadgroup float* to) const {
    P piece;
    piece.load(block + min(32 * step + thread_index % 32, N - 1) * row_bytes, t);
    put_piece(piece, table, to + thread_index % 32 * weight_stride + thread_index / 32 * piece_size);
  }
  uint x_column(uint step, uint quad) const { return 32 * step + 4 * quad; }
  uint outputs() const { return pieces * piece_size; }
  uint output(uint column) const {
    const uint piece = first + column / piece_size;
    if (piece >= pieces) return outputs();
    return piece / P::per_block * F::block_size + P::start(piece % P::per_block) + P::quad(column % piece_size / 4) +
           column % 4;
  }
};

// 32 x 32 of the tile, in one SIMD-group.
template <typename T>
struct Products {
  // Each 128 products are summed apart: one chain of additions over K would cost 1e-6.
  simdgroup_matrix<float, 8, 8> product[4][4];  // [columns of y][rows of y]
  float2 sum[4][4];

  Products() {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        product[n][m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        sum[n][m] = float2(0.0f);
      }
    }
  }
  template <typename Side>
  void add(threadgroup const float* weights, threadgroup const T* x) {
#pragma unroll
    for (int k = 0; k < 32; k += 8) {
      simdgroup_matrix<float, 8, 8> w[4];
      simdgroup_matrix<T, 8, 8> v;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        threadgroup const float* from = weights + (Side::transposed ? k * Side::weight_stride + 8 * n  //
                                                                    : 8 * n * Side::weight_stride + k);
        simdgroup_load(w[n], from, Side::weight_stride, ulong2(0), Side::transposed);
      }
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        simdgroup_load(v, x + 8 * m * Step<T>::x_stride + k, Step<T>::x_stride, ulong2(0), true);
#pragma unroll
        for (int n = 0; n < 4; ++n) simdgroup_multiply_accumulate(product[n][m], w[n], v, product[n][m]);
      }
    }
  }
  // Element by element: whatever elements a lane has.
  void take_products() {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        sum[n][m] += float2(product[n][m].thread_elements()[0], product[n][m].thread_elements()[1]);
        product[n][m] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
  }
  void store(threadgroup float* tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        product[n][m].thread_elements()[0] = sum[n][m].x;
        product[n][m].thread_elements()[1] = sum[n][m].y;
        simdgroup_store(product[n][m], tile + 8 * m * tile_stride + 8 * n, tile_stride, ulong2(0), true);
      }
    }
  }
};

// A tile of up to R rows of y. Side: Forward or Transposed. R: 32 or 64, with R / 16 SIMD-groups.
template <typename Side, typename T, int R, typename Rows>
inline void make_tile(device const uchar* weight, device const T* x, Rows rows, device T* y, constant LinearParams& p,
                      uint tile, uint simdgroup, uint lane, threadgroup uint* table,
                      threadgroup vec<float, 4>* memory) {
  const uint threads = 2 * R, thread_index = simdgroup * simd_width + lane;
  Side::P::fill_table(table, thread_index, threads);
  threadgroup float* weights = (threadgroup float*)memory;
  threadgroup T* xs = (threadgroup T*)(weights + Step<T>::weight_words);

  const Side side(weight, p, tile, thread_index);
  // A thread brings one quad of four rows of x.
  const uint quad = thread_index % 8, x_row = thread_index / 8;
  device const T* x_rows[4];
#pragma unroll
  for (uint i = 0; i < 4; ++i) x_rows[i] = x + rows.x_row(x_row + i * (threads / 8)) * p.x_stride;
  const uint my_rows = simdgroup / 2 * 32, my_outputs = simdgroup % 2 * 32;
  Products<T> products;
  for (uint step = 0; step < side.steps; ++step) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index < matmul_outputs) side.put_weights(step, thread_index, table, weights);
    const uint column = side.x_column(step, quad);
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      threadgroup T* to = xs + (x_row + i * (threads / 8)) * Step<T>::x_stride + 4 * quad;
      *(threadgroup vec<T, 4>*)to = *(device const vec<T, 4>*)(x_rows[i] + column);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    products.template add<Side>(weights + my_outputs * (Side::transposed ? 1 : Side::weight_stride),
                                xs + my_rows * Step<T>::x_stride);
    if (step % 4 == 3) products.take_products();
  }
  products.take_products();

  threadgroup_barrier(mem_flags::mem_threadgroup);
  products.store(weights + my_rows * tile_stride + my_outputs);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < R * matmul_outputs; i += threads) {
    const uint m = i / matmul_outputs, n = side.output(i % matmul_outputs);
    if (m < rows.count && n < side.outputs()) {
      const float sum = weights[m * tile_stride + i % matmul_outputs];
      y[rows.y_row(m) * side.outputs() + n] = T(sum + rows.term(n));
    }
  }
}

template <typename Side, typename T, int R>
kernel void matmul(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                   device const uchar* bias [[buffer(2)]], device T* y [[buffer(3)]],
                   constant LinearParams& p [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint table[Side::P::table_size];
  threadgroup vec<float, 4> memory[TileMemory<T, R>::vectors];
  static_assert(sizeof(table) + sizeof(memory) <= 19 * 1024, "more of them have to fit on a GPU core");
  const PlainRows rows = {group.x * R, p.M - group.x * R, bias, p.bias_type};
  make_tile<Side, T, R>(weight, x, rows, y, p, group.y, simdgroup, lane, table, memory);
}

}  // namespace qgemv
