// The part of <metal_type_traits> that kernels use.
#pragma once

namespace metal {

template <typename A, typename B>
constexpr bool is_same_v = false;
template <typename A>
constexpr bool is_same_v<A, A> = true;
template <typename A, typename B>
struct is_same {
  static constexpr bool value = is_same_v<A, B>;
};

template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, typename A, typename B>
struct conditional {
  using type = A;
};
template <typename A, typename B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool condition, typename A, typename B>
using conditional_t = typename conditional<condition, A, B>::type;

template <typename T>
using remove_reference_t = __remove_reference_t(T);
template <typename T>
using remove_cv_t = __remove_cv(T);
template <typename T>
using remove_const_t = __remove_cv(T);

template <typename T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <typename T>
constexpr bool is_integral_v = __is_integral(T);
template <typename T>
struct is_floating_point {
  static constexpr bool value = is_floating_point_v<T>;
};
template <typename T>
struct is_integral {
  static constexpr bool value = is_integral_v<T>;
};

template <typename T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float max() { return FLT_MAX; }
  static constexpr float lowest() { return -FLT_MAX; }
  static constexpr float infinity() { return INFINITY; }
};
template <>
struct numeric_limits<half> {
  static constexpr half max() { return HALF_MAX; }
  static constexpr half lowest() { return -HALF_MAX; }
};

}  // namespace metal
