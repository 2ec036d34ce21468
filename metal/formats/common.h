// What the format structs are written in: the common subset of MSL and C++. Included by formats.h only, which undefines
// the address-space words again for C++.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
using namespace metal;
#else
#include <cstdint>
#include <cstring>
#define device
#define thread
#define constant
#endif

namespace qgemv {

#ifndef __METAL_VERSION__
using uchar = uint8_t;
using ushort = uint16_t;
using uint = uint32_t;

// IEEE half, for compilers without _Float16. Static, as every plain function here: a copy per source file, so that one
// compiled for a newer instruction set can never be linked into code that must run without it.
struct half {
  uint16_t bits;
};
static inline float half_to_float(half h) {
  const uint32_t sign = uint32_t(h.bits & 0x8000) << 16, magnitude = h.bits & 0x7fff;
  uint32_t bits = (magnitude << 13) + 0x38000000u;  // exponent bias 15 -> 127
  if (magnitude >= 0x7c00) bits += 0x38000000u;     // infinity, NaN
  float value;
  if (magnitude < 0x400) {  // subnormal
    value = float(magnitude) * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
#endif

// A format is written once for every place its blocks may lie; that place is its `Storage`:
//   Plain   one block as it is in the file
//   panels  the same block of several neighbouring rows, interleaved, one row a vector lane (csrc/cpu/simd_*.h)
// A storage has the types Word (32 bits a row) and Float, and how fields lie in it (Half, Short, Bytes<n>).
template <typename Storage>
using Half = typename Storage::Half;
template <typename Storage>
using Short = typename Storage::Short;
template <typename Storage, int n>
using Bytes = typename Storage::template Bytes<n>::type;

struct Plain {
  using Word = uint;
  using Float = float;
  using Half = half;
  using Short = ushort;
  template <int n>
  struct Bytes {
    using type = uchar[n];
  };
  // Signed codes are moved to unsigned by this much.
  static constant constexpr int code_bias = 128;

  static float real(half h) {
#ifdef __METAL_VERSION__
    return float(h);
#else
    return half_to_float(h);
#endif
  }
  static uint u16(ushort v) { return v; }
  // Bytes 4i..4i+3; a block may start at any byte.
  static uint word(device const uchar* bytes, int i) {
    bytes += 4 * i;
    return uint(bytes[0]) | (uint(bytes[1]) << 8) | (uint(bytes[2]) << 16) | (uint(bytes[3]) << 24);
  }
  static float to_float(uint v) { return float(int(v)); }
  // Four signed bytes as biased codes.
  static uint signed_codes(uint v) { return v ^ 0x80808080u; }
  // The biased codes of four indices into a table of 16 int8.
  static uint lookup(uint index, constant const int8_t* table) {
    uint codes = 0;
    for (int i = 0; i < 4; ++i) codes |= uint(table[(index >> (8 * i)) & 15u] + code_bias) << (8 * i);
    return codes;
  }
  // Bits 0..3 to bit 4 of the four bytes.
  static uint fifth_bits(uint v) { return (((v & 15u) * 0x00204081u) & 0x01010101u) << 4; }
};

// Byte b of each word, unsigned or signed, as a float.
template <typename Storage>
inline typename Storage::Float byte_of(typename Storage::Word v, int b) {
  return Storage::to_float((v >> (8 * b)) & 255u);
}
template <typename Storage>
inline typename Storage::Float signed_byte_of(typename Storage::Word v, int b) {
  return Storage::to_float(((v >> (8 * b)) & 255u) ^ 128u) - 128.0f;
}

// Four nibbles, one a byte: the low (n = 0) or the high ones (n = 1) of four bytes.
template <typename Word>
inline Word nibbles(Word v, int n) {
  return (v >> (4 * n)) & 0x0f0f0f0fu;
}

// The scales of one block: scale(g) and min(g) of group g. Here for formats that scale a block as a whole.
template <typename Storage>
struct OneScale {
  using Float = typename Storage::Float;
  Float d;
  Float scale(int) const { return d; }
  Float min(int) const { return Float{}; }
};
template <typename Storage>
struct ScaleAndMin {
  using Float = typename Storage::Float;
  Float d, m;
  Float scale(int) const { return d; }
  Float min(int) const { return -m; }
};

// What formats have in common. A format F has
//   id                the GGUF type id
//   block_size        weights in a block
//   group             weights that share a scale, 16 or 32
//   leading_halves    16-bit fields before the bytes of a block, trailing_halves: behind them
//   Fields<Storage>   the block, with ggml's field names; Block = Fields<Plain> is the GGUF block byte for byte
//   scales<S>(b)      its scales, unpacked
//   codes<S>(b, i)    its weights 4i..4i+3 as codes, one unsigned byte each
//   zero<S>()         the code of 0
//   has_min           whether min(g) can be other than 0
// and every weight is  w = scale(g) * (code - zero) - min(g).
struct BlockScaled {
  static constant constexpr int block_size = 32, group = 32, leading_halves = 1, trailing_halves = 0;
  static constant constexpr bool has_min = false;
  template <typename S, typename B>
  static OneScale<S> scales(device const B& b) {
    return {S::real(b.d)};
  }
};
struct BlockScaledWithMin {
  static constant constexpr int block_size = 32, group = 32, leading_halves = 2, trailing_halves = 0;
  static constant constexpr bool has_min = true;
  template <typename S, typename B>
  static ScaleAndMin<S> scales(device const B& b) {
    return {S::real(b.d), S::real(b.m)};
  }
  template <typename S>
  static constexpr int zero() {
    return 0;
  }
};

// Weights 16 * chunk .. 16 * chunk + 15 of one block of any format, in a storage of single blocks.
static constant constexpr int chunk_size = 16;
template <typename F, typename S = Plain>
inline void decode(device const typename F::template Fields<S>& b, int chunk, thread float* w) {
  const auto scales = F::template scales<S>(b);
  const int g = chunk * chunk_size / F::group, zero = F::template zero<S>();
  const float scale = scales.scale(g), min = scales.min(g);
  for (int i = 0; i < chunk_size / 4; ++i) {
    const uint codes = F::template codes<S>(b, chunk * (chunk_size / 4) + i);
    for (int j = 0; j < 4; ++j) w[4 * i + j] = scale * float(int((codes >> (8 * j)) & 255u) - zero) - min;
  }
}

}  // namespace qgemv
