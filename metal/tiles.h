// y = x W^T + bias for 5 to 8 rows of x, by 8x8 matrix products of SIMD-groups. Weights are decoded into the lanes'
// elements of the matrices; nothing passes through threadgroup memory.
//
// A SIMD-group makes tiles_outputs outputs for 8 rows of x. 256 neighbouring weights of a row are 8 pieces (decode8.h);
// row s of a matrix of weights, and column s of one of x, stand for piece s. So a lane takes the same two pieces of x,
// and the same one of each of its weight rows, for 32 products: their order along K is of no matter to the sum.
#pragma once
#include "bias.h"
#include "decode8.h"
#include "place.h"

namespace qgemv {

typedef simdgroup_matrix<float, 8, 8> Matrix;

template <typename F, typename S, typename T>
struct TilesLane {
  typedef Piece<F, S> P;
  enum { n_tiles = tiles_outputs / 8, slots = 8, slot_blocks = slots / P::per_block };

  Place place;
  uint pieces;
  threadgroup const uint* table;
  device const T* x;
  device const uchar* weight[n_tiles][2];
  Matrix product[n_tiles];
  float2 sum[n_tiles];

  TilesLane(uint lane) : place(lane) {}

  // Slots 0..7 stand for pieces `at`..; `whole`: all of them are there. Elsewhere x is 0 and the last piece is read.
  template <bool whole>
  void add(uint at) {
    P piece[n_tiles][2];
    const uint mine = at + place.row, here = whole ? mine : min(mine, pieces - 1);
    const ulong offset = ulong(here / P::per_block) * sizeof(typename F::Block);
#pragma unroll
    for (uint n = 0; n < n_tiles; ++n) {
#pragma unroll
      for (uint e = 0; e < 2; ++e) piece[n][e].load(weight[n][e] + offset, here % P::per_block);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[2][8], w[n_tiles][2][8];
#pragma unroll
      for (uint e = 0; e < 2; ++e) load_x_or_0<whole>(at + place.column + e, i, v[e]);
#pragma unroll
      for (uint n = 0; n < n_tiles; ++n) {
#pragma unroll
        for (uint e = 0; e < 2; ++e) piece[n][e].decode(i, table, w[n][e]);
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        Matrix a, b;
        a.thread_elements()[0] = v[0][k];
        a.thread_elements()[1] = v[1][k];
#pragma unroll
        for (uint n = 0; n < n_tiles; ++n) {
          b.thread_elements()[0] = w[n][0][k];
          b.thread_elements()[1] = w[n][1][k];
          simdgroup_multiply_accumulate(product[n], a, b, product[n]);
        }
      }
      if (i % 2 == 1) take_products();
    }
  }
  template <bool whole>
  void load_x_or_0(uint at, int i, thread float* v) const {
    const bool there = whole || at < pieces;
    const uint here = there ? at : pieces - 1;
    device const T* from = x + here / P::per_block * F::block_size + P::start(here % P::per_block);
    load_x_of<P>(from, i, v);
    if (whole) return;
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = there ? v[k] : 0.0f;
  }
  // Moves the products, 128 to a sum, to the sums: one chain of additions over K would cost 1e-6. Element by element:
  // whatever the lanes' order.
  void take_products() {
#pragma unroll
    for (uint n = 0; n < n_tiles; ++n) {
      sum[n] += float2(product[n].thread_elements()[0], product[n].thread_elements()[1]);
      product[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }
};

// The outputs of threadgroup `group` for up to 8 rows of x.
template <typename F, typename S, typename T, typename Rows>
inline void tiles_outputs_of(device const uchar* weight, device const T* x, Rows rows, device T* y,
                             constant LinearParams& p, uint group, uint simdgroup, uint lane, threadgroup uint* table) {
  Piece<F, S>::fill_table(table, simdgroup * simd_width + lane, tiles_simdgroups * simd_width);

  const uint first = (group * tiles_simdgroups + simdgroup) * tiles_outputs;
  if (first >= p.N) return;  // the whole SIMD-group leaves together
  TilesLane<F, S, T> part(lane);
  part.pieces = p.K / piece_size;
  part.table = table;
  const uint m = part.place.row, column = part.place.column;
  part.x = x + rows.x_row(m) * p.x_stride;
#pragma unroll
  for (uint n = 0; n < tiles_outputs / 8; ++n) {
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      part.weight[n][e] = weight + ulong(min(first + 8 * n + column + e, p.N - 1)) * p.row_bytes;
    }
    part.product[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    part.sum[n] = float2(0.0f);
  }
  uint at = 0;
  for (; at + 8 <= part.pieces; at += 8) part.template add<true>(at);
  if (F::block_size % 256 != 0 && at < part.pieces) part.template add<false>(at);

  if (m >= rows.count) return;
  y += rows.y_row(m) * p.N;
#pragma unroll
  for (uint n = 0; n < tiles_outputs / 8; ++n) {
#pragma unroll
    for (uint e = 0; e < 2; ++e) {
      const uint output = first + 8 * n + column + e;
      if (output < p.N) y[output] = T(part.sum[n][e] + rows.term(output));
    }
  }
}

template <typename F, typename S, typename T>
kernel void tiles(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                  device const uchar* bias [[buffer(2)]], device T* y [[buffer(3)]],
                  constant LinearParams& p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
                  uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint table[Piece<F, S>::table_size];
  const PlainRows rows = {0, p.M, bias, p.bias_type};
  tiles_outputs_of<F, S>(weight, x, rows, y, p, group, simdgroup, lane, table);
}

}  // namespace qgemv
