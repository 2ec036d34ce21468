#pragma once
#include "common.h"

namespace qgemv {

struct Q5_1 : BlockScaledWithMin {  // w = d * q + m
  static constant constexpr int id = 7;
  template <typename S>
  struct Fields {
    Half<S> d, m;
    Bytes<S, 4> qh;   // bit j: fifth bit of weight j
    Bytes<S, 16> qs;  // low nibbles: weights 0..15, high ones: 16..31
  };
  using Block = Fields<Plain>;
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return nibbles(S::word(b.qs, i % 4), i / 4) | S::fifth_bits(S::word(b.qh, 0) >> (4 * i));
  }
};
static_assert(sizeof(Q5_1::Block) == 24, "Q5_1 block");

}  // namespace qgemv
