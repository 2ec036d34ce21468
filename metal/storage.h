// How the kernels read GGUF blocks: storages (formats/common.h) beside Plain.
#pragma once
#include "params.h"

namespace qgemv {

// Blocks that start where Alignment<F> says, at an even address at least: two bytes a load.
struct Aligned : Plain {
  static uint word(device const uchar* bytes, int i) {
    device const ushort* pair = (device const ushort*)bytes + 2 * i;
    return as_type<uint>(ushort2(pair[0], pair[1]));
  }
};

// Blocks at any address: single bytes.
struct Anywhere : Plain {
  struct Half {
    uchar low, high;
  };
  using Short = Half;
  static uint u16(Half v) { return uint(v.low) | (uint(v.high) << 8); }
  static float real(Half v) { return float(as_type<half>(ushort(u16(v)))); }
};

template <typename F, typename S>
using Block = typename F::template Fields<S>;

// Numbers of 0..1023 as they lie masked in 16 bits. Read as a half such a number n is the subnormal n * 2^-24, exactly,
// and a float multiply-add takes it as it is: no integer is converted. What is made from it is 2^24 times too small.
static constant constexpr float tiny_unit = 16777216.0f;  // 2^24
inline float tiny(uint n) { return float(as_type<half>(ushort(n))); }
inline float2 tiny2(uint pair) { return float2(as_type<half2>(pair)); }

// sum + the masked bytes of a word times four x, 2^24 times too small. The mask is for bytes 0 and 2: 0x000f000f takes
// low nibbles, 0x00f000f0 the high ones as 16 * nibble.
inline float dot_masked(uint bytes, uint mask, thread const float* x, float sum) {
  const float2 even = tiny2(bytes & mask), odd = tiny2((bytes >> 8) & mask);
  return fma(x[3], odd.y, fma(x[2], even.y, fma(x[1], odd.x, fma(x[0], even.x, sum))));
}

// x[0..n) of 16-byte aligned activations; n is a multiple of 4.
template <int n, typename T>
inline void load_x(device const T* from, thread float* x) {
  device const vec<T, 4>* four = (device const vec<T, 4>*)from;
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    const vec<T, 4> v = four[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[4 * i + j] = float(v[j]);
  }
}

template <int n>
inline float sum(thread const float* x) {
  float4 s = float4(0.0f);
#pragma unroll
  for (int i = 0; i < n; ++i) s[i % 4] += x[i];
  return (s.x + s.y) + (s.z + s.w);
}

}  // namespace qgemv
