// How each format is searched (search.h) and how its codes, scales and minimums lie in its fields: the inverse of
// `codes` and `scales` in metal/formats. On panels of 16 blocks, one a vector lane.
#pragma once
#include "search.h"

namespace qgemv::cpu {

// Four codes, scales or minimums a word, as bytes.
template <class V>
struct Fields {
  typename V::Word codes[64], scales[4], mins[4];
};

template <class V>
inline void put(uint32_t (&word)[panel_rows], const typename V::Word& bits) {
  store(word, load<typename V::Word>(word) | bits);
}
template <class Word>
inline Word low_nibbles(const Word& v) {
  return v & 0x0f0f0f0fu;
}

// ---- Blocks of 32
// Low nibbles of `qs`: weights 0..15, high ones: 16..31.
template <class V, class P>
inline void put_nibbles(P& panel, const Fields<V>& f) {
  for (int i = 0; i < 8; ++i) put<V>(panel.qs[i % 4], low_nibbles(f.codes[i]) << (4 * (i / 4)));
}
template <class V, class P>
inline void put_fifth_bits(P& panel, const Fields<V>& f) {
  for (int i = 0; i < 8; ++i)  // the product gathers bits 0, 8, 16, 24 in bits 24..27
    put<V>(panel.qh[0], ((((f.codes[i] >> 4) & 0x01010101u) * 0x01020408u) >> 24) << (4 * i));
}

template <class F>
struct Encoder;

template <>
struct Encoder<Q4_0> : OneScale<Integers<-8, 7, 8>, 32, 1, 31> {
  template <class V>
  static void pack(Panel<V, Q4_0>& panel, const Fields<V>& f) {
    put_nibbles(panel, f);
  }
};
template <>
struct Encoder<Q4_1> : OneScaleAndMin<Integers<0, 15, 0>, 32, 1, 5> {
  template <class V>
  static void pack(Panel<V, Q4_1>& panel, const Fields<V>& f) {
    put_nibbles(panel, f);
  }
};
template <>
struct Encoder<Q5_0> : OneScale<Integers<-16, 15, 16>, 32, 2, 31> {
  template <class V>
  static void pack(Panel<V, Q5_0>& panel, const Fields<V>& f) {
    put_nibbles(panel, f);
    put_fifth_bits(panel, f);
  }
};
template <>
struct Encoder<Q5_1> : OneScaleAndMin<Integers<0, 31, 0>, 32, 1, 5> {
  template <class V>
  static void pack(Panel<V, Q5_1>& panel, const Fields<V>& f) {
    put_nibbles(panel, f);
    put_fifth_bits(panel, f);
  }
};
template <>
struct Encoder<Q8_0> : OneScale<Integers<-128, 127, 0>, 32, 1, 2> {
  static constexpr float floor = 1.0f;  // little is to be won by importance, and much to be lost without
  template <class V>
  static void pack(Panel<V, Q8_0>& panel, const Fields<V>& f) {
    for (int i = 0; i < 8; ++i) put<V>(panel.qs[i], f.codes[i]);
  }
};
template <>
struct Encoder<IQ4_NL> : OneScale<Iq4Levels, 32, 23, 23> {
  static constexpr float floor = 0.06f;
  template <class V>
  static void pack(Panel<V, IQ4_NL>& panel, const Fields<V>& f) {
    put_nibbles(panel, f);
  }
};

// ---- Blocks of 256
template <class V, class P>
inline void put_scales_k4(P& panel, const Fields<V>& f) {
  store(panel.scales[0], f.scales[0] | ((f.scales[1] & 0x30303030u) << 2));
  store(panel.scales[1], f.mins[0] | ((f.mins[1] & 0x30303030u) << 2));
  store(panel.scales[2], low_nibbles(f.scales[1]) | (low_nibbles(f.mins[1]) << 4));
}
template <class V, class P>
inline void put_nibbles_k4(P& panel, const Fields<V>& f) {
  for (int i = 0; i < 64; ++i) put<V>(panel.qs[8 * (i / 16) + i % 8], low_nibbles(f.codes[i]) << (4 * (i / 8 % 2)));
}
template <class V, class P>
inline void put_pairs(P& panel, const Fields<V>& f) {
  for (int i = 0; i < 64; ++i) put<V>(panel.qs[8 * (i / 32) + i % 8], (f.codes[i] & 0x03030303u) << (2 * (i / 8 % 4)));
}

template <>
struct Encoder<Q2_K> : SharedScalesAndMins<Integers<0, 3, 0>, 16, 15, 3, 6> {
  template <class V>
  static void pack(Panel<V, Q2_K>& panel, const Fields<V>& f) {
    for (int i = 0; i < 4; ++i) store(panel.scales[i], f.scales[i] | (f.mins[i] << 4));
    put_pairs(panel, f);
  }
};
template <>
struct Encoder<Q3_K> : SharedScales<Integers<-4, 3, 4>, 16, -32, 31, 32, 23, 3, 6, 11> {
  static constexpr float floor = 0.13f;
  template <class V>
  static void pack(Panel<V, Q3_K>& panel, const Fields<V>& f) {
    const auto* s = f.scales;
    store(panel.scales[0], low_nibbles(s[0]) | (low_nibbles(s[2]) << 4));
    store(panel.scales[1], low_nibbles(s[1]) | (low_nibbles(s[3]) << 4));
    typename V::Word high = (s[0] >> 4) & 0x03030303u;
    for (int i = 1; i < 4; ++i) high = high | (((s[i] >> 4) & 0x03030303u) << (2 * i));
    store(panel.scales[2], high);
    put_pairs(panel, f);
    for (int i = 0; i < 64; ++i) put<V>(panel.hmask[i % 8], ((f.codes[i] >> 2) & 0x01010101u) << (i / 8));
  }
};
template <>
struct Encoder<Q4_K> : SharedScalesAndMins<Integers<0, 15, 0>, 32, 63, 5, 6> {
  template <class V>
  static void pack(Panel<V, Q4_K>& panel, const Fields<V>& f) {
    put_scales_k4(panel, f);
    put_nibbles_k4(panel, f);
  }
};
template <>
struct Encoder<Q5_K> : SharedScalesAndMins<Integers<0, 31, 0>, 32, 63, 5, 6> {
  template <class V>
  static void pack(Panel<V, Q5_K>& panel, const Fields<V>& f) {
    put_scales_k4(panel, f);
    put_nibbles_k4(panel, f);
    for (int i = 0; i < 64; ++i) put<V>(panel.qh[i % 8], ((f.codes[i] >> 4) & 0x01010101u) << (i / 8));
  }
};
template <>
struct Encoder<Q6_K> : SharedScales<Integers<-32, 31, 32>, 16, -128, 127, 0, 25, 8, 8, 5> {
  template <class V>
  static void pack(Panel<V, Q6_K>& panel, const Fields<V>& f) {
    for (int i = 0; i < 4; ++i) store(panel.scales[i], f.scales[i]);
    for (int i = 0; i < 64; ++i) {
      const int half_block = i / 32, quarter = i / 8 % 4;
      put<V>(panel.ql[16 * half_block + i % 16], low_nibbles(f.codes[i]) << (4 * (quarter / 2)));
      put<V>(panel.qh[8 * half_block + i % 8], ((f.codes[i] >> 4) & 0x03030303u) << (2 * quarter));
    }
  }
};
template <>
struct Encoder<IQ4_XS> : SharedScales<Iq4Levels, 32, -32, 31, 32, 23, 8, 6, 5> {
  template <class V>
  static void pack(Panel<V, IQ4_XS>& panel, const Fields<V>& f) {
    typename V::Word high = f.scales[0] & 0u;
    for (int g = 0; g < 8; ++g) {
      const typename V::Word scale = (f.scales[g / 4] >> (8 * (g % 4))) & 63u;
      put<V>(panel.scales_l[0], (scale & 15u) << (4 * g));
      high = high | ((scale >> 4) << (2 * g));
    }
    V::store_u16(panel.scales_h, high);
    for (int i = 0; i < 64; ++i) put<V>(panel.qs[4 * (i / 8) + i % 4], low_nibbles(f.codes[i]) << (4 * (i / 4 % 2)));
  }
};

}  // namespace qgemv::cpu
