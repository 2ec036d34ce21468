#pragma once
#include "common.h"

namespace qgemv {

struct Q6_K {  // w = d * (int8 scale) * (q - 32)
  static constant constexpr int id = 14, block_size = 256, group = 16, leading_halves = 0, trailing_halves = 1;
  static constant constexpr bool has_min = false;
  template <typename S>
  struct Fields {
    Bytes<S, 128> ql;     // 64 bytes per half block: low nibbles its weights 0..63, high ones 64..127
    Bytes<S, 64> qh;      // 32 bytes per half block: 2 bits of weights j, j + 32, j + 64, j + 96
    Bytes<S, 16> scales;  // int8
    Half<S> d;
  };
  using Block = Fields<Plain>;
  template <typename S>
  struct Scales {
    typename S::Float d;
    typename S::Word eight[4];
    typename S::Float scale(int g) const { return d * signed_byte_of<S>(eight[g / 4], g % 4); }
    typename S::Float min(int) const { return typename S::Float{}; }
  };
  template <typename S, typename B>
  static Scales<S> scales(device const B& b) {
    return {S::real(b.d), {S::word(b.scales, 0), S::word(b.scales, 1), S::word(b.scales, 2), S::word(b.scales, 3)}};
  }
  template <typename S>
  static constexpr int zero() {
    return 32;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    const int half_block = i / 32, quarter = i / 8 % 4;
    const typename S::Word low = nibbles(S::word(b.ql, 16 * half_block + i % 16), quarter / 2);
    return low | (((S::word(b.qh, 8 * half_block + i % 8) >> (2 * quarter)) & 0x03030303u) << 4);
  }
};
static_assert(sizeof(Q6_K::Block) == 210, "Q6_K block");

}  // namespace qgemv
