// Vector types. clang's extended vectors have MSL's swizzles, arithmetic and layout.
#pragma once

#define MSL_VECTORS(T)                                \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <typename T>
struct vector_traits {
  static constexpr int size = 0;
  using element = T;
};
template <typename T, int N>
struct vector_traits<T __attribute__((ext_vector_type(N)))> {
  static constexpr int size = N;
  using element = T;
};
template <typename T>
struct vector_traits<const T> : vector_traits<T> {};
template <typename T>
constexpr bool is_vector = vector_traits<T>::size != 0;
template <typename T>
using element_t = typename vector_traits<T>::element;

// float4(a), float4(a, b, c, d), float4(float2, float2), float4(half4): the arguments' components in order.
template <typename V, typename... Parts>
MSL_INLINE constexpr V make_vector(Parts... parts) {
  using E = element_t<V>;
  constexpr int size = vector_traits<V>::size;
  if constexpr (sizeof...(parts) == 0) {
    return V(0);
  } else if constexpr (sizeof...(parts) == 1 && (!is_vector<Parts> && ...)) {
    return V((E)(parts, ...));  // one scalar fills the vector
  } else {
    V out{};
    int at = 0;
    static_assert(((is_vector<Parts> ? vector_traits<Parts>::size : 1) + ...) == size, "wrong number of components");
    auto put = [&](auto part) {
      if constexpr (is_vector<decltype(part)>) {
        for (int i = 0; i < vector_traits<decltype(part)>::size; ++i) out[at++] = (E)part[i];
      } else {
        out[at++] = (E)part;
      }
    };
    (put(parts), ...);
    return out;
  }
}

template <typename To, typename From>
MSL_INLINE To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, from);
}

// Three elements in the space of three; a vector of three takes that of four.
template <typename T>
struct packed3 {
  T x, y, z;
  packed3() = default;
  packed3(vec<T, 3> v) : x(v.x), y(v.y), z(v.z) {}
  packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  operator vec<T, 3>() const { return vec<T, 3>{x, y, z}; }
  T& operator[](int i) { return (&x)[i]; }
  T operator[](int i) const { return (&x)[i]; }
};

template <typename T, int columns, int rows>
struct matrix {
  vec<T, rows> column[columns];
  vec<T, rows>& operator[](int i) { return column[i]; }
  const vec<T, rows>& operator[](int i) const { return column[i]; }
};

}  // namespace metal

// Packed vectors: the same, aligned as their elements.
#define MSL_PACKED(T)                                                              \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T)))); \
  typedef metal::packed3<T> packed_##T##3;
MSL_PACKED(char)
MSL_PACKED(uchar)
MSL_PACKED(short)
MSL_PACKED(ushort)
MSL_PACKED(int)
MSL_PACKED(uint)
MSL_PACKED(half)
MSL_PACKED(bfloat)
MSL_PACKED(float)
#undef MSL_PACKED

typedef metal::matrix<float, 2, 4> float2x4;
typedef metal::matrix<float, 4, 4> float4x4;
typedef metal::matrix<half, 2, 4> half2x4;
typedef metal::matrix<half, 4, 4> half4x4;

using metal::vec;
