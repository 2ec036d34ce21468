#pragma once
#include "common.h"

namespace qgemv {

struct Q4_0 : BlockScaled {  // w = d * (q - 8)
  static constant constexpr int id = 2;
  template <typename S>
  struct Fields {
    Half<S> d;
    Bytes<S, 16> qs;  // low nibbles: weights 0..15, high ones: 16..31
  };
  using Block = Fields<Plain>;
  template <typename S>
  static constexpr int zero() {
    return 8;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return nibbles(S::word(b.qs, i % 4), i / 4);
  }
};
static_assert(sizeof(Q4_0::Block) == 18, "Q4_0 block");

}  // namespace qgemv
