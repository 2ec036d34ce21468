#pragma once
#include "common.h"

namespace qgemv {

struct Q4_1 : BlockScaledWithMin {  // w = d * q + m
  static constant constexpr int id = 3;
  template <typename S>
  struct Fields {
    Half<S> d, m;
    Bytes<S, 16> qs;  // low nibbles: weights 0..15, high ones: 16..31
  };
  using Block = Fields<Plain>;
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return nibbles(S::word(b.qs, i % 4), i / 4);
  }
};
static_assert(sizeof(Q4_1::Block) == 20, "Q4_1 block");

}  // namespace qgemv
