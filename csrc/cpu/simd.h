// What all instruction sets share: vectors of one 32-bit element per lane, a lane being one row of W, and the storage
// (metal/formats/common.h) of panels: a block of each of `lanes` neighbouring rows, interleaved field by field. An
// instruction set (simd_*.h) adds what it does best.
#pragma once
#include "../../metal/formats.h"
#include "kernels.h"

namespace qgemv::cpu {

static inline float bf16_to_float(uint16_t v) {
  const uint32_t bits = uint32_t(v) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static inline uint16_t float_to_bf16(float f) {
  uint32_t v;
  memcpy(&v, &f, 4);
  return uint16_t(f != f ? (v >> 16) | 0x40 : (v + 0x7fff + ((v >> 16) & 1)) >> 16);
}

template <int lanes>
struct VectorTypes;
#define QGEMV_VECTOR_TYPES(lanes)                                  \
  template <>                                                      \
  struct VectorTypes<lanes> {                                      \
    typedef uint32_t Word __attribute__((vector_size(4 * lanes))); \
    typedef int32_t Int __attribute__((vector_size(4 * lanes)));   \
    typedef float Float __attribute__((vector_size(4 * lanes)));   \
  };
QGEMV_VECTOR_TYPES(4)
QGEMV_VECTOR_TYPES(8)
QGEMV_VECTOR_TYPES(16)
#undef QGEMV_VECTOR_TYPES

// `Isa` makes every function here one of its own, compiled for it alone.
template <class Isa, int n>
struct Vectors {
  static constexpr int lanes = n;
  using Word = typename VectorTypes<n>::Word;
  using Int = typename VectorTypes<n>::Int;
  using Float = typename VectorTypes<n>::Float;

  using Half = uint16_t[n];
  using Short = uint16_t[n];
  template <int bytes>
  struct Bytes {
    using type = uint32_t[bytes / 4][n];
  };

  static Word word(const uint32_t (*bytes)[n], int i) {
    Word v;
    memcpy(&v, bytes[i], sizeof v);
    return v;
  }
  static Float to_float(Word v) { return __builtin_convertvector((Int)v, Float); }
  static Float to_float(Int v) { return __builtin_convertvector(v, Float); }
  static Float splat(float v) { return v - Float{}; }
  static Int splat(int32_t v) { return v - Int{}; }
  static Float load(const float* p) {
    Float v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, Float v) { memcpy(p, &v, sizeof v); }

  static Float load_bf16(const uint16_t* p) {
    Float v;
    for (int i = 0; i < n; ++i) v[i] = bf16_to_float(p[i]);
    return v;
  }
  static void store_bf16(uint16_t* p, Float f) {
    for (int i = 0; i < n; ++i) p[i] = float_to_bf16(f[i]);
  }

  // `n` values of x or y.
  static Float load_as(const void* p, Dtype dtype) {
    if (dtype == Dtype::f32) return load((const float*)p);
    return dtype == Dtype::f16 ? Isa::real(*(const Half*)p) : Isa::load_bf16((const uint16_t*)p);
  }
  static void store_as(void* p, Dtype dtype, Float v) {
    if (dtype == Dtype::f32) return store((float*)p, v);
    dtype == Dtype::f16 ? Isa::store_half((uint16_t*)p, v) : Isa::store_bf16((uint16_t*)p, v);
  }

  static Word fifth_bits(Word v) { return (((v & 15u) * 0x00204081u) & 0x01010101u) << 4; }

  // Words first..first+3 of a block of each row, interleaved. rows: where the four words of each row start.
  static void interleave_words(const uint8_t* const (&rows)[n], size_t offset, uint32_t (*out)[n]) {
    for (int r = 0; r < n; ++r) {
      uint32_t four[4];
      memcpy(four, rows[r] + offset, 16);
      for (int i = 0; i < 4; ++i) out[i][r] = four[i];
    }
  }
};

template <class V, class F>
using Panel = typename F::template Fields<V>;

}  // namespace qgemv::cpu
