#pragma once
#include "common.h"

namespace qgemv {

// The 16 levels of IQ4_NL and IQ4_XS.
static constant constexpr int8_t kvalues_iq4nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};

struct IQ4_NL : BlockScaled {  // w = d * kvalues_iq4nl[q]
  static constant constexpr int id = 20;
  template <typename S>
  struct Fields {
    Half<S> d;
    Bytes<S, 16> qs;  // low nibbles: weights 0..15, high ones: 16..31
  };
  using Block = Fields<Plain>;
  template <typename S>
  static constexpr int zero() {
    return S::code_bias;
  }
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return S::lookup(nibbles(S::word(b.qs, i % 4), i / 4), kvalues_iq4nl);
  }
};
static_assert(sizeof(IQ4_NL::Block) == 18, "IQ4_NL block");

}  // namespace qgemv
