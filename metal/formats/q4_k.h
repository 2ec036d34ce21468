#pragma once
#include "common.h"

namespace qgemv {

// Scales and minimums of Q4_K and Q5_K: 6 bits each, eight of both in 12 bytes. Bytes 0..3 and 4..7 hold the first four
// scales and minimums, with two high bits of the last four above them; bytes 8..11 the low nibbles of those.
template <typename S>
struct ScalesK4 {
  using Float = typename S::Float;
  Float d, dmin;
  typename S::Word six[2], min6[2];
  Float scale(int g) const { return d * byte_of<S>(six[g / 4], g % 4); }
  Float min(int g) const { return dmin * byte_of<S>(min6[g / 4], g % 4); }
};
struct SuperBlockK4 {
  static constant constexpr int block_size = 256, group = 32, leading_halves = 2, trailing_halves = 0;
  static constant constexpr bool has_min = true;
  template <typename S, typename B>
  static ScalesK4<S> scales(device const B& b) {
    using Word = typename S::Word;
    const Word low = S::word(b.scales, 0), mins = S::word(b.scales, 1), last = S::word(b.scales, 2);
    return {S::real(b.d),
            S::real(b.dmin),
            {low & 0x3f3f3f3fu, nibbles(last, 0) | ((low >> 2) & 0x30303030u)},
            {mins & 0x3f3f3f3fu, nibbles(last, 1) | ((mins >> 2) & 0x30303030u)}};
  }
  template <typename S>
  static constexpr int zero() {
    return 0;
  }
};

struct Q4_K : SuperBlockK4 {  // w = d * (6-bit scale) * q - dmin * (6-bit min)
  static constant constexpr int id = 12;
  template <typename S>
  struct Fields {
    Half<S> d, dmin;
    Bytes<S, 12> scales;
    Bytes<S, 128> qs;  // 32 bytes per two groups: low nibbles the even group, high ones the odd
  };
  using Block = Fields<Plain>;
  template <typename S, typename B>
  static typename S::Word codes(device const B& b, int i) {
    return nibbles(S::word(b.qs, 8 * (i / 16) + i % 8), i / 8 % 2);
  }
};
static_assert(sizeof(Q4_K::Block) == 144, "Q4_K block");

}  // namespace qgemv
