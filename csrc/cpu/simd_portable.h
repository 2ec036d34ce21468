// Any processor: 16-bit limbs of x times 8-bit codes, in 32-bit multiplies.
#pragma once
#include "simd.h"

namespace qgemv::cpu {

static inline uint16_t float_to_half(float f) {
  uint32_t v;
  memcpy(&v, &f, 4);
  const uint32_t sign = (v >> 16) & 0x8000, magnitude = v & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));  // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);                               // rounds to infinity
  if (magnitude < 0x38800000) {  // subnormal: let the float addition round, 0.5 has just the bits that half keeps
    float m;
    memcpy(&m, &magnitude, 4);
    m += 0.5f;
    uint32_t bits;
    memcpy(&bits, &m, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

struct Portable : Vectors<Portable, 4> {
  static constexpr int limb_bits = 16, code_bias = 128;
  static Float real(const Half& h) {
    Float v;
    for (int i = 0; i < lanes; ++i) v[i] = half_to_float({h[i]});
    return v;
  }
  static void store_half(uint16_t* p, Float v) {
    for (int i = 0; i < lanes; ++i) p[i] = float_to_half(v[i]);
  }
  static Word u16(const Short& s) {
    Word v;
    for (int i = 0; i < lanes; ++i) v[i] = s[i];
    return v;
  }
  static Word signed_codes(Word v) { return v ^ 0x80808080u; }
  static Word lookup(Word index, const int8_t* table) {
    uint8_t b[4 * lanes];
    memcpy(b, &index, sizeof b);
    for (uint8_t& c : b) c = uint8_t(table[c] + code_bias);
    memcpy(&index, b, sizeof b);
    return index;
  }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Int round(Float v) {  // to nearest even, for |v| < 2^23: the sum has no bits left for a fraction
    const Float magic = splat(12582912.0f);
    return __builtin_convertvector((v + magic) - magic, Int);
  }
  // x: limbs of weights 0, 2, 1, 3
  static Int dot(Int acc, Word codes, const int16_t* x) {
    return acc + (Int)(codes & 255u) * x[0] + (Int)((codes >> 16) & 255u) * x[1] + (Int)((codes >> 8) & 255u) * x[2] +
           (Int)(codes >> 24) * x[3];
  }
};

}  // namespace qgemv::cpu
