#pragma once
#include "common.h"

namespace qgemv {

struct Q2_K {  // w = d * (4-bit scale) * q - dmin * (4-bit min)
  static constant constexpr int id = 10, block_size = 256, group = 16, leading_halves = 0, trailing_halves = 2;
  static constant constexpr bool has_min = true;
  template <typename S>
  struct Fields {
    Bytes<S, 16> scales;  // low nibble: scale, high: min
    Bytes<S, 64> qs;      // 2 bits; byte j of a 32-byte half holds weights j, j + 32, j + 64, j + 96
    Half<S> d, dmin;
  };
  using Block = Fields<Plain>;
  template <typename S>
  struct Scales {
    typename S::Float d, dmin;
    typename S::Word both[4];
    typename S::Float scale(int g) const { return d * S::to_float((both[g / 4] >> (8 * (g % 4))) & 15u); }
    typename S::Float min(int g) const { return dmin * S::to_float((both[g / 4] >> (8 * (g % 4) + 4)) & 15u); }
  };
  template <typename S, typename B>
  static Scales<S> scales(device const B& b) {
    return {S::real(b.d),
            S::real(b.dmin),
            {S::word(b.scales, 0), S::word(b.scales, 1), S::word(b.scales, 2), S::word(b.scales, 3)}};
  }
  template <typename S>
  static constexpr int zero() {
    return 0;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return (S::word(b.qs, 8 * (i / 32) + i % 8) >> (2 * (i / 8 % 4))) & 0x03030303u;
  }
};
static_assert(sizeof(Q2_K::Block) == 84, "Q2_K block");

}  // namespace qgemv
