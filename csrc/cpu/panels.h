// Rows of GGUF blocks to panels and back.
#pragma once
#include "simd.h"

// Instruction sets with few registers, or none for these types, gain nothing from unrolled blocks but compile time.
#ifndef QGEMV_UNROLL_BLOCK
#define QGEMV_UNROLL_BLOCK(n) QGEMV_PRAGMA(GCC unroll n)
#endif

namespace qgemv::cpu {

// Bytes behind a panel's block that are fetched while it is multiplied, to the first cache and to the second one.
// Measured on a Xeon with AVX-512 as a fraction of a pure read, Q4_K / Q6_K: 0.94 / 0.84; with the first alone 0.86 /
// 0.75, alone and four times as far 0.67 / 0.70; neither 0.80 / 0.75.
constexpr int64_t near = 2048, far = 4096;

// That part of the fetching that belongs to group g of a block: many at once would wait for each other.
template <class Block>
inline void fetch_behind(const Block& block, int g, int groups) {
  constexpr int lines = (sizeof block + 63) / 64;
  for (int line = lines * g / groups; line < lines * (g + 1) / groups; ++line) {
    __builtin_prefetch((const char*)&block + near + 64 * line, 0, 3);
    __builtin_prefetch((const char*)&block + far + 64 * line, 0, 2);
  }
}

// Where the units of a block are: halves before, words, halves behind.
template <class F>
struct Units {
  static constexpr int bytes = sizeof(typename F::Block), first_word = 2 * F::leading_halves;
  static constexpr int words = (bytes - first_word - 2 * F::trailing_halves) / 4, behind = first_word + 4 * words;
};

template <class F>
static inline int64_t row_bytes(const Weight& w) {
  return w.K / F::block_size * int64_t(sizeof(typename F::Block));
}

// The block at `offset` of each row to a panel: the unit at byte o of row r goes to 16 * o + unit * r.
template <class V, class F>
inline void interleave_block(const uint8_t* const (&rows)[panel_rows], size_t offset, Panel<V, F>& panel) {
  using U = Units<F>;
  static_assert(sizeof panel == size_t(panel_rows) * U::bytes, "a panel is a permutation of its blocks");
  uint8_t* out = (uint8_t*)&panel;
  uint32_t four[4][panel_rows];
  auto halves = [&](const uint32_t (&word)[panel_rows], int shift, int o) {  // one half of each row's word to byte o
    uint16_t half[panel_rows];
    for (int r = 0; r < panel_rows; ++r) half[r] = uint16_t(word[r] >> shift);
    memcpy(out + panel_rows * o, half, sizeof half);
  };
  if (F::leading_halves > 0) {
    V::Isa::interleave_words(rows, offset, four);
    halves(four[0], 0, 0);
    if (F::leading_halves == 2) halves(four[0], 16, 2);
  }
  if (F::trailing_halves > 0) {
    V::Isa::interleave_words(rows, offset + U::bytes - 16, four);
    if (F::trailing_halves == 2) halves(four[3], 0, U::bytes - 4);
    halves(four[3], 16, U::bytes - 2);
  }
  auto* word_rows = (uint32_t (*)[panel_rows])(out + panel_rows * U::first_word);
  QGEMV_UNROLL_BLOCK(16)
  for (int i = 0; i < U::words; i += 4) {
    const int from = i < U::words - 4 ? i : U::words - 4;  // the last four may overlap
    V::Isa::interleave_words(rows, offset + U::first_word + 4 * from, word_rows + from);
  }
}

template <class V, class F>
void interleave_panels(const Weight& w, int64_t begin, int64_t end, uint8_t* out) {
  const int64_t bytes = row_bytes<F>(w);
  for (int64_t p = begin; p < end; ++p) {
    const uint8_t* rows[panel_rows];
    for (int r = 0; r < panel_rows; ++r) rows[r] = w.data + (p * panel_rows + r) * w.row_stride;
    auto* panel = (Panel<V, F>*)(out + p * panel_rows * bytes);
    for (int64_t b = 0; b < w.K / F::block_size; ++b)
      interleave_block<V, F>(rows, b * sizeof(typename F::Block), panel[b]);
  }
}

// Block b of row n: where it lies, or, out of a panel, its bytes in `copy`.
template <class F>
static inline const typename F::Block& block_of(const Weight& w, int64_t n, int64_t b, typename F::Block& copy) {
  using U = Units<F>;
  const int64_t rows_in_panels = w.interleaved ? w.N / panel_rows * panel_rows : 0;
  if (n >= rows_in_panels) return *(const typename F::Block*)(w.data + n * w.row_stride + b * U::bytes);
  const int64_t r = n % panel_rows;
  const uint8_t* panel = w.data + (n - r) * row_bytes<F>(w) + b * panel_rows * U::bytes;
  auto take = [&](int o, int unit) { memcpy((uint8_t*)&copy + o, panel + panel_rows * o + unit * r, unit); };
  for (int o = 0; o < U::first_word; o += 2) take(o, 2);
  for (int o = U::first_word; o < U::behind; o += 4) take(o, 4);
  for (int o = U::behind; o < U::bytes; o += 2) take(o, 2);
  return copy;
}

}  // namespace qgemv::cpu
