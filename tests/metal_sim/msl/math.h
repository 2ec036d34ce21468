// Scalar and element-wise mathematics, with MSL's names.
#pragma once

namespace metal {

template <typename V, typename Fn>
MSL_INLINE V each(Fn fn, V a) {
  V out{};
  for (int i = 0; i < vector_traits<V>::size; ++i) out[i] = fn(a[i]);
  return out;
}

// Half and bfloat results are those of float, rounded.
#define MSL_FUNCTION(name, builtin)                                      \
  MSL_INLINE float name(float x) { return builtin(x); }                  \
  MSL_INLINE half name(half x) { return (half)builtin((float)x); }       \
  MSL_INLINE bfloat name(bfloat x) { return (bfloat)builtin((float)x); } \
  template <typename V, typename = enable_if_t<is_vector<V>>>            \
  MSL_INLINE V name(V v) {                                               \
    return each([](element_t<V> x) { return name(x); }, v);              \
  }
MSL_INLINE float msl_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
MSL_INLINE float msl_saturate(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
MSL_INLINE float msl_sign(float x) { return float(x > 0) - float(x < 0); }
MSL_FUNCTION(exp, __builtin_expf)
MSL_FUNCTION(exp2, __builtin_exp2f)
MSL_FUNCTION(log, __builtin_logf)
MSL_FUNCTION(log2, __builtin_log2f)
MSL_FUNCTION(sqrt, __builtin_sqrtf)
MSL_FUNCTION(rsqrt, msl_rsqrt)
MSL_FUNCTION(floor, __builtin_floorf)
MSL_FUNCTION(ceil, __builtin_ceilf)
MSL_FUNCTION(round, __builtin_roundf)
MSL_FUNCTION(rint, __builtin_rintf)
MSL_FUNCTION(trunc, __builtin_truncf)
MSL_FUNCTION(fabs, __builtin_fabsf)
MSL_FUNCTION(tanh, __builtin_tanhf)
MSL_FUNCTION(sin, __builtin_sinf)
MSL_FUNCTION(cos, __builtin_cosf)
MSL_FUNCTION(saturate, msl_saturate)
MSL_FUNCTION(sign, msl_sign)
#undef MSL_FUNCTION

#define MSL_MIN_MAX(T)                                 \
  MSL_INLINE T min(T a, T b) { return b < a ? b : a; } \
  MSL_INLINE T max(T a, T b) { return a < b ? b : a; } \
  MSL_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
MSL_MIN_MAX(char)
MSL_MIN_MAX(uchar)
MSL_MIN_MAX(short)
MSL_MIN_MAX(ushort)
MSL_MIN_MAX(int)
MSL_MIN_MAX(uint)
MSL_MIN_MAX(long)
MSL_MIN_MAX(ulong)
#undef MSL_MIN_MAX
// Of a NaN and a number, MSL's float functions give the number.
#define MSL_FLOAT_MIN_MAX(T)                                                    \
  MSL_INLINE T min(T a, T b) { return (T)__builtin_fminf((float)a, (float)b); } \
  MSL_INLINE T max(T a, T b) { return (T)__builtin_fmaxf((float)a, (float)b); } \
  MSL_INLINE T fmin(T a, T b) { return min(a, b); }                             \
  MSL_INLINE T fmax(T a, T b) { return max(a, b); }                             \
  MSL_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
MSL_FLOAT_MIN_MAX(half)
MSL_FLOAT_MIN_MAX(bfloat)
MSL_FLOAT_MIN_MAX(float)
#undef MSL_FLOAT_MIN_MAX

MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// A product of two halves is exact in float; their sum with a third may be rounded twice, which double avoids.
MSL_INLINE half fma(half a, half b, half c) { return (half)((double)a * (double)b + (double)c); }
MSL_INLINE float powr(float a, float b) { return __builtin_powf(a, b); }
MSL_INLINE float pow(float a, float b) { return __builtin_powf(a, b); }
MSL_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
MSL_INLINE float fmod(float a, float b) { return __builtin_fmodf(a, b); }

MSL_INLINE float abs(float x) { return __builtin_fabsf(x); }
MSL_INLINE half abs(half x) { return (half)__builtin_fabsf((float)x); }
MSL_INLINE short abs(short x) { return x < 0 ? -x : x; }
MSL_INLINE int abs(int x) { return x < 0 ? -x : x; }

#define MSL_ELEMENTWISE(name)                                                   \
  template <typename V, typename = enable_if_t<is_vector<V>>>                   \
  MSL_INLINE V name(V a, V b) {                                                 \
    V out{};                                                                    \
    for (int i = 0; i < vector_traits<V>::size; ++i) out[i] = name(a[i], b[i]); \
    return out;                                                                 \
  }
MSL_ELEMENTWISE(min)
MSL_ELEMENTWISE(max)
#undef MSL_ELEMENTWISE

template <typename V, typename = enable_if_t<is_vector<V>>>
MSL_INLINE V fma(V a, V b, V c) {
  V out{};
  for (int i = 0; i < vector_traits<V>::size; ++i) out[i] = fma(a[i], b[i], c[i]);
  return out;
}
template <typename V, typename = enable_if_t<is_vector<V>>>
MSL_INLINE V clamp(V x, V lo, V hi) {
  return min(max(x, lo), hi);
}
template <typename V, typename = enable_if_t<is_vector<V>>>
MSL_INLINE V abs(V v) {
  return each([](element_t<V> x) { return abs(x); }, v);
}

template <typename V>
MSL_INLINE element_t<V> dot(V a, V b) {
  static_assert(is_vector<V>, "dot takes vectors");
  element_t<V> sum = a[0] * b[0];
  for (int i = 1; i < vector_traits<V>::size; ++i) sum += a[i] * b[i];
  return sum;
}

template <typename T>
MSL_INLINE T select(T a, T b, bool c) {
  return c ? b : a;
}
MSL_INLINE bool isnan(float x) { return __builtin_isnan(x); }
MSL_INLINE bool isinf(float x) { return __builtin_isinf(x); }
MSL_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }

MSL_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_INLINE uint rotate(uint x, uint left) { return __builtin_rotateleft32(x, left); }
MSL_INLINE uint mulhi(uint a, uint b) { return uint((ulong)a * b >> 32); }
template <typename T>
MSL_INLINE T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return T(0);
  const uint above = 8 * sizeof(T) - bits;  // shifted out on the left, then back: repeats the sign of a signed type
  return T(T(x << (above - offset)) >> above);
}

// MSL's namespaces for a chosen precision. The simulator has one.
namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

}  // namespace metal
