// y = x W^T on one instruction set V, for any format. Rows of W are taken 16 at a time, a panel, one row an element of
// the vectors; each block is read once for all rows of x.
#pragma once
#include <type_traits>

#include "activations.h"
#include "unpacked.h"

namespace qgemv::cpu {

template <class V, int L>
inline typename V::Float join(const typename V::Int (&acc)[L]) {  // two 8-bit limbs of a group still fit 32 bits
  if constexpr (L == 1)
    return V::to_float(acc[0]);
  else if constexpr (V::limb_bits == 16)
    return V::to_float(acc[0]) * 65536.0f + V::to_float(acc[1]);
  else if constexpr (L == 2)
    return V::to_float((acc[0] << 8) + acc[1]);
  else
    return V::to_float((acc[0] << 8) + acc[1]) * 256.0f + V::to_float(acc[2]);
}

// The scales of a panel's block in memory. Kept in registers, where these are few, they would push out the sums of
// products, which are used much more often.
template <class V, class F>
struct StoredScales {
  using Float = typename V::Float;
  static constexpr int groups = F::block_size / F::group;
  alignas(64) float scales[groups][panel_rows], mins[F::has_min ? groups : 1][panel_rows];

  template <class Scales>
  void set(const Scales& from) {
    QGEMV_UNROLL_BLOCK(16)
    for (int g = 0; g < groups; ++g) {
      store(scales[g], from.scale(g));
      if (F::has_min) store(mins[g], from.min(g));
    }
    asm volatile("" ::"r"(this) : "memory");
  }
  Float scale(int g) const { return load<Float>(scales[g]); }
  Float min(int g) const { return F::has_min ? load<Float>(mins[g]) : Float{}; }
};

// One block of each of P panels times M rows of x, added to sum; `first`: the block's first weight in its chunk;
// `fetch`: whether the blocks lie in memory, one after the other.
template <class V, class F, int P, int M, int L, class Block>
inline void multiply_block(const Block* const (&w)[P], const Activations<typename V::Isa, L>* x, int first, bool fetch,
                           typename V::Float (&sum)[P][M]) {
  using Int = typename V::Int;
  using Float = typename V::Float;
  constexpr int groups = F::block_size / F::group, words = F::group / 4, zero = F::template zero<V>();
  constexpr bool stored = V::Isa::registers < 32 && groups > 1 && !requires { F::scales_in_memory; };
  using Scales = decltype(F::template scales<V>(*w[0]));
  std::conditional_t<stored, StoredScales<V, F>, Scales> scales[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
    if constexpr (stored)
      scales[p].set(F::template scales<V>(*w[p]));
    else
      scales[p] = F::template scales<V>(*w[p]);
  const int first_group = first / F::group;
  QGEMV_UNROLL_BLOCK(16)
  for (int g = 0; g < groups; ++g) {
    asm volatile("" ::: "memory");  // keeps each group's code together: mixed groups spill registers
    if (fetch)
      for (int p = 0; p < P; ++p) fetch_behind(*w[p], g, groups);
    Int acc[P][M][L];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
        for (int l = 0; l < L; ++l) acc[p][m][l] = zero ? V::splat(x[m].start[l][first_group + g]) : Int{};
    QGEMV_UNROLL_BLOCK(8)
    for (int i = g * words; i < (g + 1) * words; ++i) {
      typename V::Word codes[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) codes[p] = F::template codes<V>(*w[p], i);
#pragma GCC unroll 3
      for (int l = 0; l < L; ++l)
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) acc[p][m][l] = V::dot(acc[p][m][l], codes[p], x[m].limbs[l] + first + 4 * i);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Float scale = scales[p].scale(g), min = scales[p].min(g);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        sum[p][m] = V::fma(scale, join<V, L>(acc[p][m]), sum[p][m]);
        if constexpr (F::has_min) sum[p][m] = V::fma(-min, V::splat(x[m].sum[first_group + g]), sum[p][m]);
      }
    }
  }
}

// One chunk, `count` blocks, of each of P panels times M rows of x, added to total. Not inlined: GCC would keep the
// sums of some of them in memory.
template <class V, class F, int P, int M, int L, class Block>
__attribute__((noinline)) void multiply_chunk(const Block* const (&blocks)[P], int count,
                                              const Activations<typename V::Isa, L>* x, bool fetch,
                                              float (*const (&total)[P])[panel_rows], int64_t first_token) {
  using Float = typename V::Float;
  Float sum[P][M] = {};
  for (int b = 0; b < count; ++b) {
    const Block* w[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) w[p] = blocks[p] + b;
    multiply_block<V, F, P, M, L>(w, x + first_token, b * F::block_size, fetch, sum);
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float* to = total[p][first_token + m];
      store(to, V::fma(sum[p][m], V::splat(x[first_token + m].scale), load<Float>(to)));
    }
}

// So many rows of x at a time as leave four registers beside the sums of products, and at most four.
template <class V, int P, int L>
constexpr int most_tokens() {
  const int tokens = (V::Isa::registers - 4) / (P * L * V::Int::count);
  return tokens < 1 ? 1 : tokens < 4 ? tokens : 4;
}

// The same for rows [first, tokens) of x, T at a time, then fewer.
template <class V, class F, int P, int L, int T = most_tokens<V, P, L>(), class Block>
inline void multiply_tokens(const Block* const (&blocks)[P], int count, const Activations<typename V::Isa, L>* x,
                            int64_t first, int64_t tokens, bool fetch, float (*const (&total)[P])[panel_rows]) {
  for (; first + T <= tokens; first += T, fetch = false)
    multiply_chunk<V, F, P, T, L>(blocks, count, x, fetch, total, first);
  if constexpr (T > 1) multiply_tokens<V, F, P, L, (T + 1) / 2>(blocks, count, x, first, tokens, fetch, total);
}

// Where the chunks of a panel come from: the panel of an interleaved weight, or plain rows, interleaved on the way.
template <class V, class F>
class PanelReader {
 public:
  static constexpr int blocks_per_chunk = chunk / F::block_size;

  void start(const Weight& w, int64_t panel) {
    blocks_ = w.K / F::block_size, stride_ = w.row_stride;
    const int64_t first = panel * panel_rows, left = w.N - first;
    for (int r = 0; r < panel_rows; ++r)  // past the last row: that row again, its results are not stored
      rows_[r] = w.data + (first + (r < left ? r : left - 1)) * w.row_stride;
    is_panel_ = w.interleaved && left >= panel_rows;
  }
  bool is_panel() const { return is_panel_; }
  int count(int64_t c) const {  // blocks in chunk c
    const int64_t left = blocks_ - c * blocks_per_chunk;
    return left < blocks_per_chunk ? int(left) : blocks_per_chunk;
  }
  const Panel<V, F>* read(int64_t c) {
    if (is_panel_) return (const Panel<V, F>*)rows_[0] + c * blocks_per_chunk;
    constexpr int64_t block_bytes = sizeof(typename F::Block), chunk_bytes = blocks_per_chunk * block_bytes;
    const int64_t next = (c + prefetch_chunks) * chunk_bytes, row_bytes = blocks_ * block_bytes;
    const int64_t jump = next < row_bytes ? next : next - row_bytes + panel_rows * stride_;
    for (int r = 0; r < panel_rows; ++r)
      for (int64_t o = 0; o < chunk_bytes; o += 64) __builtin_prefetch(rows_[r] + jump + o, 0, 3);
    for (int b = 0; b < count(c); ++b) interleave_block<V, F>(rows_, c * chunk_bytes + b * block_bytes, buffer_[b]);
    asm volatile("" ::: "memory");  // else the compiler keeps whole panels in registers, and spills them
    return buffer_;
  }

 private:
  static constexpr int prefetch_chunks = 4;  // rows are fetched from memory this many chunks ahead
  alignas(64) Panel<V, F> buffer_[blocks_per_chunk];
  const uint8_t* rows_[panel_rows];
  int64_t blocks_, stride_;
  bool is_panel_;
};

// The outputs of one panel: total + bias, rounded.
template <class V>
void store_outputs(const LinearArgs& args, int64_t panel, const float (*total)[panel_rows]) {
  using Float = typename V::Float;
  const int64_t N = args.weight.N, first = panel * panel_rows;
  const int item = args.dtype == Dtype::f32 ? 4 : 2;
  const int valid = N - first < panel_rows ? int(N - first) : panel_rows;
  float bias[panel_rows] = {};
  if (args.bias) memcpy(bias, args.bias + first, sizeof(float) * valid);
  for (int64_t m = 0; m < args.tokens; ++m) {
    alignas(64) char out[4 * panel_rows];
    V::store_as(out, args.dtype, load<Float>(total[m]) + load<Float>(bias));
    memcpy((char*)args.y + (m * N + first) * item, out, size_t(item) * valid);
  }
}

// P panels times all rows of x; `once`: each chunk is unpacked once, and not by every few rows of x again.
template <class V, class F, int P, int L, bool once>
void linear_together(const LinearArgs& args, int64_t panel) {
  using U = Unpacked<V, F>;
  using Reader = PanelReader<V, F>;
  const int64_t chunks = (args.weight.K + chunk - 1) / chunk, M = args.tokens;
  const auto* x = (const Activations<typename V::Isa, L>*)args.activations;
  alignas(64) float total[P][token_block][panel_rows];
  float (*totals[P])[panel_rows];
  for (int p = 0; p < P; ++p) memset(totals[p] = total[p], 0, sizeof total[p][0] * M);

  Reader readers[P];
  for (int p = 0; p < P; ++p) readers[p].start(args.weight, panel + p);
  typename U::Block unpacked[once ? P : 1];
  for (int64_t c = 0; c < chunks; ++c, x += M) {
    const int count = readers[0].count(c);
    if constexpr (once) {
      const typename U::Block* w[P];
      for (int p = 0; p < P; ++p)
        unpack<V, F>(readers[p].read(c), count, readers[p].is_panel(), unpacked[p]), w[p] = unpacked + p;
      multiply_tokens<V, U, P, L>(w, 1, x, 0, M, false, totals);
    } else {
      const Panel<V, F>* w[P];
      for (int p = 0; p < P; ++p) w[p] = readers[p].read(c);
      multiply_tokens<V, F, P, L>(w, count, x, 0, M, readers[0].is_panel(), totals);
    }
  }
  for (int p = 0; p < P; ++p) store_outputs<V>(args, panel + p, total[p]);
}

template <class V, class F, int L>
void linear_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.tokens < V::Isa::unpack_tokens) {
    for (int64_t p = begin; p < end; ++p) linear_together<V, F, 1, L, false>(args, p);
    return;
  }
  constexpr int P = V::Isa::tile_panels;
  int64_t p = begin;
  for (; p + P <= end; p += P) linear_together<V, F, P, L, true>(args, p);
  for (; p < end; ++p) linear_together<V, F, 1, L, true>(args, p);
}

}  // namespace qgemv::cpu
