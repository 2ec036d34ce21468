#pragma once
#include "iq4_nl.h"

namespace qgemv {

struct IQ4_XS {  // w = d * (6-bit scale - 32) * kvalues_iq4nl[q]
  static constant constexpr int id = 23, block_size = 256, group = 32, leading_halves = 2, trailing_halves = 0;
  static constant constexpr bool has_min = false;
  template <typename S>
  struct Fields {
    Half<S> d;
    Short<S> scales_h;     // 2 high bits of the 8 scales
    Bytes<S, 4> scales_l;  // 4 low bits
    Bytes<S, 128> qs;      // per group 16 bytes: low nibbles weights 0..15, high ones 16..31
  };
  using Block = Fields<Plain>;
  template <typename S>
  struct Scales {
    typename S::Float d;
    typename S::Word high, low;
    typename S::Float scale(int g) const {
      return d * (S::to_float(((low >> (4 * g)) & 15u) | (((high >> (2 * g)) & 3u) << 4)) - 32.0f);
    }
    typename S::Float min(int) const { return typename S::Float{}; }
  };
  template <typename S, typename B>
  static Scales<S> scales(device const B& b) {
    return {S::real(b.d), S::u16(b.scales_h), S::word(b.scales_l, 0)};
  }
  template <typename S>
  static constexpr int zero() {
    return S::code_bias;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return S::lookup(nibbles(S::word(b.qs, 4 * (i / 8) + i % 4), i / 4 % 2), kvalues_iq4nl);
  }
};
static_assert(sizeof(IQ4_XS::Block) == 136, "IQ4_XS block");

}  // namespace qgemv
