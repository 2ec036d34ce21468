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

static inline uint16_t float_to_bf16(float f) {
  uint32_t v;
  memcpy(&v, &f, 4);
  return uint16_t(f != f ? (v >> 16) | 0x40 : (v + 0x7fff + ((v >> 16) & 1)) >> 16);
}

struct Portable : RegisterTypes<4> {  // `registers` is a guess
  static constexpr int limb_bits = 16, code_bias = 128, registers = 32, unpack_tokens = 9, tile_panels = 1;
  using Limb = int16_t;

  static Float half(const uint16_t* h) {
    Float v;
    for (int i = 0; i < lanes; ++i) v[i] = half_to_float({h[i]});
    return v;
  }
  static void store_half(uint16_t* p, Float v) {
    for (int i = 0; i < lanes; ++i) p[i] = float_to_half(v[i]);
  }
  static Word u16(const uint16_t* s) { return __builtin_convertvector(load<Short>(s), Word); }
  static Int bytes(const uint8_t* p) { return Int{p[0], p[1], p[2], p[3]}; }
  static Word lookup(Word index, const int8_t* table) { return lookup_16(index, table) ^ 0x80808080u; }
  static FourWords lookup_16(FourWords index, const int8_t* table) {
    uint8_t b[16];
    store(b, index);
    for (uint8_t& c : b) c = uint8_t(table[c]);
    return load<FourWords>(b);
  }
  static Word fifth_bits(Word v) { return (((v & 15u) * 0x00204081u) & 0x01010101u) << 4; }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Float min(Float a, Float b) { return a < b ? a : b; }
  static Float max(Float a, Float b) { return a > b ? a : b; }
  static Int round(Float v) {  // to nearest even, for |v| < 2^23: the sum has no bits left for a fraction
    const Float magic = 12582912.0f - Float{};
    return __builtin_convertvector((v + magic) - magic, Int);
  }
  static int32_t reduce_max(Int v) {
    int32_t most = v[0];
    for (int i = 1; i < lanes; ++i) most = v[i] > most ? v[i] : most;
    return most;
  }

  static const int16_t* four_limbs(const int16_t* x) { return x; }
  static Int dot(Int acc, Word codes, const int16_t* x) {
    return acc + (Int)(codes & 255u) * x[0] + (Int)((codes >> 8) & 255u) * x[1] + (Int)((codes >> 16) & 255u) * x[2] +
           (Int)(codes >> 24) * x[3];
  }
  static void store_limbs(int16_t* to, Int v) {
    for (int i = 0; i < lanes; ++i) to[i] = int16_t(v[i]);
  }
  static void sums_of_16(const int16_t* limbs, int32_t* sums) {
    for (int g = 0; g < 16; ++g) {
      sums[g] = 0;
      for (int k = 0; k < 16; ++k) sums[g] += limbs[16 * g + k];
    }
  }
  static void interleave_words(const uint8_t* const* rows, size_t offset, uint32_t (*out)[panel_rows]) {
    for (int r = 0; r < panel_rows; ++r)
      for (int i = 0; i < 4; ++i) out[i][r] = load<uint32_t>(rows[r] + offset + 4 * i);
  }
};

}  // namespace qgemv::cpu
