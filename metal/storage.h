// How the kernels read GGUF blocks: storages (formats/common.h) beside Plain.
#pragma once
#include "params.h"

namespace qgemv {

// An index of 4 or 8 bytes.
inline long index_at(device const uchar* indices, uint i, uint bytes) {
  return bytes == 8 ? ((device const long*)indices)[i] : long(((device const int*)indices)[i]);
}

// A number of 0..1023 lies masked in 16 bits. Read as a half it is the subnormal n * 2^-24, exactly, and a float
// multiply-add takes it as it is: no integer is converted. What is made from it is 2^24 times too small.
//
// That needs a device on which a subnormal half is not taken for 0. csrc/mps/device_check.mm looks once; where it is,
// the kernels are compiled with QGEMV_CONVERT_HALFS, and the numbers are converted. The results are the same.
static constant constexpr float tiny_unit = 16777216.0f;  // 2^24
#ifdef QGEMV_CONVERT_HALFS
inline float tiny(uint n) { return float(ushort(n)) / tiny_unit; }
inline float2 tiny2(uint pair) { return float2(as_type<ushort2>(pair)) / tiny_unit; }
inline float real_half(half h) {
  const ushort bits = as_type<ushort>(h), magnitude = bits & 0x7fffu;
  const float subnormal = tiny(magnitude);
  return magnitude < 0x400u ? (bits == magnitude ? subnormal : -subnormal) : float(h);
}
#else
inline float tiny(uint n) { return float(as_type<half>(ushort(n))); }
inline float2 tiny2(uint pair) { return float2(as_type<half2>(pair)); }
inline float real_half(half h) { return float(h); }
#endif

// Blocks that start where Alignment<F> says, at an even address at least: two bytes a load, or four times two.
struct Aligned : Plain {
  static float real(half h) { return real_half(h); }
  static uint word(device const uchar* bytes, int i) {
    device const ushort* pair = (device const ushort*)bytes + 2 * i;
    return as_type<uint>(ushort2(pair[0], pair[1]));
  }
  static uint2 words2(device const uchar* bytes) {
    return as_type<uint2>(ushort4(*(device const packed_ushort4*)bytes));
  }
  static uint4 words4(device const uchar* bytes) { return uint4(words2(bytes), words2(bytes + 8)); }
};

// Blocks at any address: single bytes.
struct Anywhere : Plain {
  struct Half {
    uchar low, high;
  };
  using Short = Half;
  static uint u16(Half v) { return uint(v.low) | (uint(v.high) << 8); }
  static float real(Half v) { return real_half(as_type<half>(ushort(u16(v)))); }
};

template <typename F, typename S>
using Block = typename F::template Fields<S>;

// Two bytes as the halves of a word.
inline uint halves(uchar low, uchar high) { return as_type<uint>(ushort2(low, high)); }

// sum + the masked bytes of a word times four x, 2^24 times too small. The mask is for bytes 0 and 2: 0x000f000f takes
// low nibbles, 0x00f000f0 the high ones as 16 * nibble.
template <typename T>
inline float dot_masked(uint bytes, uint mask, thread const T* x, float sum) {
  const float2 even = tiny2(bytes & mask), odd = tiny2((bytes >> 8) & mask);
  return fma(float(x[3]), odd.y, fma(float(x[2]), even.y, fma(float(x[1]), odd.x, fma(float(x[0]), even.x, sum))));
}
template <typename T>
inline float dot_bytes(uint bytes, thread const T* x, float sum) {
  return dot_masked(bytes, 0x00ff00ffu, x, sum);
}

inline void unpack(uint word, thread float* x) { x[0] = as_type<float>(word); }
template <typename T>
inline void unpack(uint word, thread T* x) {
  const vec<T, 2> pair = as_type<vec<T, 2>>(word);
  x[0] = pair.x;
  x[1] = pair.y;
}

// x[0..n) of 16-byte aligned activations; n is a multiple of 8. They stay in their type, as multiply-adds take halfs.
template <int n, typename T>
inline void load_x(device const T* from, thread T* x) {
  const int of_word = 4 / sizeof(T);
#pragma unroll
  for (int i = 0; i < n / (4 * of_word); ++i) {
    const uint4 words = ((device const uint4*)from)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) unpack(words[j], x + (4 * i + j) * of_word);
  }
}

// The same as floats; n is a multiple of 4.
template <int n, typename T>
inline void load_floats(device const T* from, thread float* x) {
  device const vec<T, 4>* four = (device const vec<T, 4>*)from;
#pragma unroll
  for (int i = 0; i < n / 4; ++i) {
    const vec<T, 4> v = four[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[4 * i + j] = float(v[j]);
  }
}

template <int n, typename T>
inline float sum(thread const T* x) {
  float4 s = float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
#pragma unroll
  for (int i = 4; i < n; ++i) s[i % 4] += float(x[i]);
  return (s.x + s.y) + (s.z + s.w);
}

}  // namespace qgemv
