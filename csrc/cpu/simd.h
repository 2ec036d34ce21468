// What all instruction sets share. An instruction set `Isa` (simd_*.h) has `registers` of `lanes` elements of 32 bits,
// and a few functions on them; here they become vectors of one element for each of the 16 rows of a panel, and the
// storage (metal/formats/common.h) of panels.
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

// Parts (below) are loaded and stored one by one: through a copy of them all, GCC would keep them in memory.
template <class T>
static inline T load(const void* from) {
  if constexpr (requires { T::count; }) {
    return T::make([&](int i) { return load<typename T::Part>((const char*)from + i * sizeof(typename T::Part)); });
  } else {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
  }
}
template <class T>
static inline void store(void* to, const T& value) {
  if constexpr (requires { T::count; }) {
#pragma GCC unroll 4
    for (int i = 0; i < T::count; ++i) store((char*)to + i * sizeof value.part[i], value.part[i]);
  } else {
    memcpy(to, &value, sizeof value);
  }
}

// The registers that every instruction set has, as types of the compiler. `Isa` is a parameter of all templates that
// are compiled for one instruction set, so that no two of them share a function.
template <int n>
struct RegisterTypes {
  static constexpr int lanes = n;
  typedef uint32_t Word __attribute__((vector_size(4 * n)));
  typedef int32_t Int __attribute__((vector_size(4 * n)));
  typedef float Float __attribute__((vector_size(4 * n)));
  typedef uint16_t Short __attribute__((vector_size(2 * n)));
  typedef uint32_t FourWords __attribute__((vector_size(16)));
};

// `lanes` values of x or y, as floats.
template <class Isa>
inline typename Isa::Float load_as(const void* p, Dtype dtype) {
  using Float = typename Isa::Float;
  if (dtype == Dtype::f32) return load<Float>(p);
  return dtype == Dtype::f16 ? Isa::half((const uint16_t*)p) : (Float)(Isa::u16((const uint16_t*)p) << 16);
}
template <class Isa>
inline void store_as(void* p, Dtype dtype, typename Isa::Float v) {
  if (dtype == Dtype::f32) return store(p, v);
  if (dtype == Dtype::f16) return Isa::store_half((uint16_t*)p, v);
  using Word = typename Isa::Word;
  const Word bits = (Word)v, nan = (Word)(v != v);
  const Word rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
  store(p, __builtin_convertvector((nan & quiet) | (~nan & rounded), typename Isa::Short));
}

// 16 elements, in as many registers as they need.
template <class Isa, class T>
struct Parts {
  using Part = T;
  static constexpr int count = panel_rows / Isa::lanes;
  T part[count];

  template <class Fn>
  static Parts make(Fn fn) {
    static_assert(count == 1 || count == 2 || count == 4, "registers of 16, 8 or 4 elements");
    if constexpr (count == 1)
      return {{fn(0)}};
    else if constexpr (count == 2)
      return {{fn(0), fn(1)}};
    else
      return {{fn(0), fn(1), fn(2), fn(3)}};
  }
#define QGEMV_OPERATOR(op)                                      \
  friend Parts operator op(const Parts& a, const Parts& b) {    \
    return make([&](int i) { return a.part[i] op b.part[i]; }); \
  }                                                             \
  template <class Scalar>                                       \
  friend Parts operator op(const Parts& a, Scalar b) {          \
    return make([&](int i) { return a.part[i] op b; });         \
  }
  QGEMV_OPERATOR(+)
  QGEMV_OPERATOR(-)
  QGEMV_OPERATOR(*)
  QGEMV_OPERATOR(/)
  QGEMV_OPERATOR(&)
  QGEMV_OPERATOR(|)
  QGEMV_OPERATOR(^)
  QGEMV_OPERATOR(<<)
  QGEMV_OPERATOR(>>)
#undef QGEMV_OPERATOR
  friend Parts operator-(const Parts& a) {
    return make([&](int i) { return -a.part[i]; });
  }
  // All bits where a < b, and none elsewhere; and a where a mask has its bits, b elsewhere.
  using Mask = Parts<Isa, typename Isa::Int>;
  friend Mask less(const Parts& a, const Parts& b) {
    return Mask::make([&](int i) { return a.part[i] < b.part[i]; });
  }
  friend Parts select(const Mask& mask, const Parts& a, const Parts& b) {
    return make([&](int i) { return mask.part[i] ? a.part[i] : b.part[i]; });
  }
};

// The storage of panels: one block of each of 16 neighbouring rows, interleaved unit by unit, a unit being a field of
// 16 bits or a word of 32. Word w of row r is the r-th word of its 16.
template <class IsaType>
struct Vectors {
  using Isa = IsaType;
  using Word = Parts<Isa, typename Isa::Word>;
  using Int = Parts<Isa, typename Isa::Int>;
  using Float = Parts<Isa, typename Isa::Float>;
  using Half = uint16_t[panel_rows];
  using Short = uint16_t[panel_rows];
  template <int bytes>
  struct Bytes {
    using type = uint32_t[bytes / 4][panel_rows];
  };
  static constexpr int limb_bits = Isa::limb_bits, code_bias = Isa::code_bias, lanes = Isa::lanes;
  using Limb = typename Isa::Limb;

  static Float real(const Half& h) {
    return Float::make([&](int p) { return Isa::half(h + p * lanes); });
  }
  static Word u16(const Short& s) {
    return Word::make([&](int p) { return Isa::u16(s + p * lanes); });
  }
  static Word word(const uint32_t (*bytes)[panel_rows], int i) { return load<Word>(bytes[i]); }
  static Word signed_codes(const Word& v) { return code_bias ? v ^ 0x80808080u : v; }
  static Word lookup(const Word& index, const int8_t* table) {
    return Word::make([&](int p) { return Isa::lookup(index.part[p], table); });
  }
  static Word fifth_bits(const Word& v) {
    return Word::make([&](int p) { return Isa::fifth_bits(v.part[p]); });
  }
  static Float to_float(const Word& v) {
    return to_float(Int::make([&](int p) { return (typename Isa::Int)v.part[p]; }));
  }
  static Float to_float(const Int& v) {
    return Float::make([&](int p) { return __builtin_convertvector(v.part[p], typename Isa::Float); });
  }
  static Word to_word(const Float& v) {
    return Word::make([&](int p) { return (typename Isa::Word)Isa::round(v.part[p]); });
  }
  static Float abs(const Float& v) {
    return Float::make([&](int p) { return (typename Isa::Float)((typename Isa::Word)v.part[p] & 0x7fffffffu); });
  }
  static Float min(const Float& a, const Float& b) {
    return Float::make([&](int p) { return Isa::min(a.part[p], b.part[p]); });
  }
  static Float max(const Float& a, const Float& b) {
    return Float::make([&](int p) { return Isa::max(a.part[p], b.part[p]); });
  }
  static void store_u16(Short& to, const Word& v) {
    for (int p = 0; p < Word::count; ++p)
      store(to + p * lanes, __builtin_convertvector(v.part[p], typename Isa::Short));
  }
  // The power of two next below each value.
  static Float power_of_two(const Float& v) {
    return Float::make([&](int p) { return (typename Isa::Float)((typename Isa::Word)v.part[p] & 0x7f800000u); });
  }
  static Float splat(float v) {
    return Float::make([&](int) { return v - typename Isa::Float{}; });
  }
  static Int splat(int32_t v) {
    return Int::make([&](int) { return v - typename Isa::Int{}; });
  }
  static Float fma(const Float& a, const Float& b, const Float& c) {
    return Float::make([&](int p) { return Isa::fma(a.part[p], b.part[p], c.part[p]); });
  }
  // acc + codes of four weights times one limb of four x
  static Int dot(const Int& acc, const Word& codes, const Limb* x) {
    const auto four = Isa::four_limbs(x);
    return Int::make([&](int p) { return Isa::dot(acc.part[p], codes.part[p], four); });
  }
  static void store_as(void* to, Dtype dtype, const Float& v) {
    const int bytes = lanes * (dtype == Dtype::f32 ? 4 : 2);
    for (int p = 0; p < Float::count; ++p) cpu::store_as<Isa>((char*)to + p * bytes, dtype, v.part[p]);
  }
};

template <class V, class F>
using Panel = typename F::template Fields<V>;

}  // namespace qgemv::cpu
