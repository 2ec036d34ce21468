#pragma once
#include "q4_k.h"

namespace qgemv {

struct Q5_K : SuperBlockK4 {  // w = d * (6-bit scale) * q - dmin * (6-bit min)
  static constant constexpr int id = 13;
  template <typename S>
  struct Fields {
    Half<S> d, dmin;
    Bytes<S, 12> scales;
    Bytes<S, 32> qh;   // bit g of byte j: fifth bit of weight j of group g
    Bytes<S, 128> qs;  // 32 bytes per two groups: low nibbles the even group, high ones the odd
  };
  using Block = Fields<Plain>;
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    const typename S::Word low = nibbles(S::word(b.qs, 8 * (i / 16) + i % 8), i / 8 % 2);
    return low | (((S::word(b.qh, i % 8) >> (i / 8)) & 0x01010101u) << 4);
  }
};
static_assert(sizeof(Q5_K::Block) == 176, "Q5_K block");

}  // namespace qgemv
