// The hot loop of grad_y W, for any instruction set: unpacked rows of W times rows of grad_y. Of `Isa` it needs the
// type Float, the number of its lanes and fma.
#pragma once
#include <cstring>

#include "kernels.h"

namespace qgemv::cpu {

// M rows of grad_y from row m, and `vectors` vectors of columns from column c. Every loop over the sums is unrolled: an
// index that isn't a constant would keep them in memory.
template <class Isa, int M, int vectors>
inline void add_block(const Products& p, int64_t m, int64_t c) {
  using Float = typename Isa::Float;
  const float *w = p.w + c, *grad_y = p.grad_y + m * p.stride;
  Float sum[M][vectors] = {};
  for (int64_t r = 0; r < p.rows; ++r, w += transposed_stride) {
    Float v[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) memcpy(&v[j], w + j * Isa::lanes, sizeof v[j]);
#pragma GCC unroll 6
    for (int i = 0; i < M; ++i) {
      const Float factor = grad_y[i * p.stride + r] - Float{};
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sum[i][j] = Isa::fma(factor, v[j], sum[i][j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      float* out = p.sums + (m + i) * transposed_stride + c + j * Isa::lanes;
      Float before;
      memcpy(&before, out, sizeof before);
      before += sum[i][j];
      memcpy(out, &before, sizeof before);
    }
  }
}

template <class Isa>
void add_products(const Products& p) {
  constexpr int vectors = Isa::lanes == 16 ? 4 : 2;  // as many sums as fit into the registers
  for (int64_t c = 0; c < transposed_columns; c += vectors * Isa::lanes) {
    int64_t m = 0;
    for (; m + 6 <= p.tokens; m += 6) add_block<Isa, 6, vectors>(p, m, c);
    for (; m + 2 <= p.tokens; m += 2) add_block<Isa, 2, vectors>(p, m, c);
    if (m < p.tokens) add_block<Isa, 1, vectors>(p, m, c);
  }
}

}  // namespace qgemv::cpu
