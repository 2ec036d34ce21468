#pragma once
#include "common.h"

namespace qgemv {

struct Q8_0 : BlockScaled {  // w = d * q
  static constant constexpr int id = 8;
  template <typename S>
  struct Fields {
    Half<S> d;
    Bytes<S, 32> qs;  // int8
  };
  using Block = Fields<Plain>;
  template <typename S>
  static constexpr int zero() {
    return S::code_bias;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return S::signed_codes(S::word(b.qs, i));
  }
};
static_assert(sizeof(Q8_0::Block) == 34, "Q8_0 block");

}  // namespace qgemv
