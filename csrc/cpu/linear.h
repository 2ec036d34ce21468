// y = x W^T on one instruction set V, for any format. Rows of W are taken `lanes` at a time, one row a vector lane:
// their blocks are interleaved into a panel in the L1 cache, and each panel serves every row of x.
#pragma once
#include "activations.h"

// Instruction sets with few registers, or none for these types, gain nothing from unrolled blocks but compile time.
#ifndef QGEMV_UNROLL_BLOCK
#define QGEMV_UNROLL_BLOCK(n) QGEMV_PRAGMA(GCC unroll n)
#endif

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

// One block of each row of a panel times M rows of x, added to sum; `first`: the block's first weight in its chunk.
template <class V, class F, int M, int L>
inline void multiply_block(const Panel<V, F>& w, const Activations<V, L>* x, int first, typename V::Float (&sum)[M]) {
  using Int = typename V::Int;
  using Float = typename V::Float;
  constexpr int groups = F::block_size / F::group, words = F::group / 4, zero = F::template zero<V>();
  const auto scales = F::template scales<V>(w);
  const int first_group = first / F::group;
  QGEMV_UNROLL_BLOCK(16)
  for (int g = 0; g < groups; ++g) {
    asm volatile("" ::: "memory");  // keeps each group's code together: mixed groups spill registers
    Int acc[M][L];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
      for (int l = 0; l < L; ++l) acc[m][l] = zero ? V::splat(x[m].start[first_group + g][l]) : Int{};
    QGEMV_UNROLL_BLOCK(8)
    for (int i = g * words; i < (g + 1) * words; ++i) {
      const typename V::Word codes = F::template codes<V>(w, i);
#pragma GCC unroll 3
      for (int l = 0; l < L; ++l)
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) acc[m][l] = V::dot(acc[m][l], codes, x[m].limbs[l] + first + 4 * i);
    }
    const Float scale = scales.scale(g), min = scales.min(g);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      sum[m] = V::fma(scale, join<V, L>(acc[m]), sum[m]);
      if constexpr (F::has_min) sum[m] = V::fma(-min, V::splat(x[m].sum[first_group + g]), sum[m]);
    }
  }
}

// Interleaves the block at `offset` of each row: the unit (half or word) at byte o of row r goes to lanes * o + unit *
// r.
template <class V, class F>
inline void interleave_block(const uint8_t* const (&rows)[V::lanes], size_t offset, Panel<V, F>& panel) {
  constexpr int bytes = sizeof(typename F::Block), first_word = 2 * F::leading_halves;
  constexpr int words = (bytes - first_word - 2 * F::trailing_halves) / 4;
  static_assert(sizeof(panel) == size_t(V::lanes) * bytes, "a panel is a permutation of its blocks");
  uint8_t* out = (uint8_t*)&panel;
  uint32_t four[4][V::lanes];
  auto halves = [&](const uint32_t (&word)[V::lanes], int shift, int o) {  // one half of each row's word to byte o
    uint16_t half[V::lanes];
    for (int r = 0; r < V::lanes; ++r) half[r] = uint16_t(word[r] >> shift);
    memcpy(out + V::lanes * o, half, sizeof half);
  };
  if (F::leading_halves > 0) {
    V::interleave_words(rows, offset, four);
    halves(four[0], 0, 0);
    if (F::leading_halves == 2) halves(four[0], 16, 2);
  }
  if (F::trailing_halves > 0) {
    V::interleave_words(rows, offset + bytes - 16, four);
    if (F::trailing_halves == 2) halves(four[3], 0, bytes - 4);
    halves(four[3], 16, bytes - 2);
  }
  auto* word_rows = (uint32_t (*)[V::lanes])(out + V::lanes * first_word);
  QGEMV_UNROLL_BLOCK(16)
  for (int i = 0; i < words; i += 4) {
    const int from = i < words - 4 ? i : words - 4;  // the last four may overlap
    V::interleave_words(rows, offset + first_word + 4 * from, word_rows + from);
  }
}

// One chunk of a panel times M rows of x, added to total.
template <class V, class F, int M, int L>
inline void multiply_chunk(const Panel<V, F>* blocks, int count, const Activations<V, L>* x, float (*total)[V::lanes]) {
  typename V::Float sum[M] = {};
  for (int b = 0; b < count; ++b) multiply_block<V, F, M, L>(blocks[b], x, b * F::block_size, sum);
  for (int m = 0; m < M; ++m) V::store(total[m], V::fma(sum[m], V::splat(x[m].scale), V::load(total[m])));
}

// Chunks that lie ahead by this much are fetched from memory while this one is multiplied.
constexpr int prefetch_chunks = 4;

template <class V, class F, int L>
void linear_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  constexpr int lanes = V::lanes, blocks_per_chunk = chunk / F::block_size;
  constexpr int64_t block_bytes = sizeof(typename F::Block), chunk_bytes = blocks_per_chunk * block_bytes;
  const Weight& w = args.weight;
  const int64_t blocks = w.K / F::block_size, chunks = (blocks + blocks_per_chunk - 1) / blocks_per_chunk;
  const int64_t row_bytes = blocks * block_bytes, M = args.tokens;
  const auto* activations = (const Activations<V, L>*)args.activations;
  alignas(64) Panel<V, F> panel[blocks_per_chunk];
  alignas(64) float total[token_block][lanes];

  for (int64_t p = begin; p < end; ++p) {
    const int64_t first = p * lanes;
    const uint8_t* rows[lanes];  // past the last row: that row again, its results are not stored
    for (int r = 0; r < lanes; ++r) rows[r] = w.data + (first + r < w.N ? first + r : w.N - 1) * w.row_stride;
    memset(total, 0, sizeof total[0] * M);

    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t ahead = (c + prefetch_chunks) * chunk_bytes;
      const int64_t jump = ahead < row_bytes ? ahead : ahead - row_bytes + lanes * w.row_stride;
      for (int r = 0; r < lanes; ++r)
        for (int64_t o = 0; o < chunk_bytes; o += 64) __builtin_prefetch(rows[r] + jump + o, 0, 3);

      const int64_t left = blocks - c * blocks_per_chunk;
      const int count = left < blocks_per_chunk ? int(left) : blocks_per_chunk;
      for (int b = 0; b < count; ++b) interleave_block<V, F>(rows, c * chunk_bytes + b * block_bytes, panel[b]);
      asm volatile("" ::: "memory");  // else the compiler keeps whole panels in registers, and spills them

      const Activations<V, L>* x = activations + c * M;
      int64_t m = 0;
      for (; m + 4 <= M; m += 4) multiply_chunk<V, F, 4, L>(panel, count, x + m, total + m);
      if (M - m >= 2) multiply_chunk<V, F, 2, L>(panel, count, x + m, total + m), m += 2;
      if (M - m == 1) multiply_chunk<V, F, 1, L>(panel, count, x + m, total + m);
    }

    const int item = args.dtype == Dtype::f32 ? 4 : 2;
    const int valid = w.N - first < lanes ? int(w.N - first) : lanes;
    float bias[lanes] = {};
    if (args.bias) memcpy(bias, args.bias + first, sizeof(float) * valid);
    for (int64_t m = 0; m < M; ++m) {
      alignas(64) char out[4 * lanes];
      V::store_as(out, args.dtype, V::load(total[m]) + V::load(bias));
      memcpy((char*)args.y + (m * w.N + first) * item, out, size_t(item) * valid);
    }
  }
}

// ---- The entries of Kernels
template <int L>
struct Limbs {
  constexpr int operator()() const { return L; }
};

// fn(F{}) for the format F of this id; the operators have checked that there is one.
template <class V, class Fn>
inline void with_format(int64_t quant_type, Fn fn) {
  switch (quant_type) {
#define QGEMV_CASE(F) \
  case F::id:         \
    return fn(F{});
    QGEMV_FORMATS(QGEMV_CASE)
#undef QGEMV_CASE
  }
}

// fn(number of limbs, as a constant)
template <class V, class Fn>
inline auto with_limbs(Dtype dtype, Fn fn) {
  if (activation_bits(dtype) == 16) return fn(Limbs<limb_count<V>(16)>());
  return fn(Limbs<limb_count<V>(24)>());
}

template <class V>
size_t activation_bytes(Dtype dtype) {
  return with_limbs<V>(dtype, [](auto limbs) { return sizeof(Activations<V, limbs()>); });
}

template <class V>
bool pack(const Weight& w, const void* x, Dtype dtype, int64_t token, int64_t tokens, void* activations) {
  bool regular = true;
  with_format<V>(w.quant_type, [&](auto format) {
    using F = decltype(format);
    with_limbs<V>(dtype, [&](auto limbs) {
      auto* out = (Activations<V, limbs()>*)activations + token;
      const int item = dtype == Dtype::f32 ? 4 : 2;
      for (int64_t k = 0; k < w.K; k += chunk, out += tokens) {
        const int count = w.K - k < chunk ? int(w.K - k) : chunk;
        regular &= out->pack((const char*)x + k * item, dtype, count, F::group, F::template zero<V>());
      }
    });
  });
  return regular;
}

template <class V>
void linear(const LinearArgs& args, int64_t begin, int64_t end) {
  with_format<V>(args.weight.quant_type, [&](auto format) {
    using F = decltype(format);
    with_limbs<V>(args.dtype, [&](auto limbs) { linear_panels<V, F, limbs()>(args, begin, end); });
  });
}

template <class V>
uint32_t read(const uint8_t* data, int64_t bytes) {
  constexpr int64_t size = sizeof(typename V::Word), streams = 8;
  typename V::Word sum[streams] = {};
  for (int64_t i = 0; i + streams * size <= bytes; i += streams * size) {
    for (int64_t line = 0; line < streams * size; line += 64) __builtin_prefetch(data + i + 4096 + line, 0, 3);
#pragma GCC unroll 8
    for (int s = 0; s < streams; ++s) {
      typename V::Word v;
      memcpy(&v, data + i + s * size, size);
      sum[s] ^= v;
    }
  }
  uint32_t all = 0;
  for (int s = 0; s < streams; ++s)
    for (int lane = 0; lane < V::lanes; ++lane) all ^= sum[s][lane];
  for (int64_t i = bytes - bytes % (streams * size); i < bytes; ++i) all ^= uint32_t(data[i]) << (i % 4 * 8);
  return all;
}

template <class V>
constexpr Kernels make_kernels(const char* name, bool (*supported)()) {
  return {name, supported, V::lanes, &activation_bytes<V>, &pack<V>, &linear<V>, &read<V>};
}

}  // namespace qgemv::cpu
