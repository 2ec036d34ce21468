#pragma once
#include "common.h"

namespace qgemv {

struct Q3_K {  // w = d * (6-bit scale - 32) * (q - 4)
  static constant constexpr int id = 11, block_size = 256, group = 16, leading_halves = 0, trailing_halves = 1;
  static constant constexpr bool has_min = false;
  template <typename S>
  struct Fields {
    Bytes<S, 32> hmask;   // bit i of byte j: third bit of weight 32i + j
    Bytes<S, 64> qs;      // 2 bits; byte j of a 32-byte half holds weights j, j + 32, j + 64, j + 96
    Bytes<S, 12> scales;  // 16 scales: 4 low bits in the first 8 bytes, 2 high bits in the last 4
    Half<S> d;
  };
  using Block = Fields<Plain>;
  template <typename S>
  struct Scales {
    typename S::Float d;
    typename S::Word six[4];
    typename S::Float scale(int g) const { return d * (byte_of<S>(six[g / 4], g % 4) - 32.0f); }
    typename S::Float min(int) const { return typename S::Float{}; }
  };
  template <typename S, typename B>
  static Scales<S> scales(device const B& b) {
    using Word = typename S::Word;
    const Word a = S::word(b.scales, 0), c = S::word(b.scales, 1), high = S::word(b.scales, 2);
    return {S::real(b.d),
            {nibbles(a, 0) | ((high & 0x03030303u) << 4), nibbles(c, 0) | (((high >> 2) & 0x03030303u) << 4),
             nibbles(a, 1) | (((high >> 4) & 0x03030303u) << 4), nibbles(c, 1) | (((high >> 6) & 0x03030303u) << 4)}};
  }
  template <typename S>
  static constexpr int zero() {
    return 4;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    const typename S::Word low = (S::word(b.qs, 8 * (i / 32) + i % 8) >> (2 * (i / 8 % 4))) & 0x03030303u;
    return low | (((S::word(b.hmask, i % 8) >> (i / 8)) & 0x01010101u) << 2);
  }
};
static_assert(sizeof(Q3_K::Block) == 110, "Q3_K block");

}  // namespace qgemv
