#pragma once
#include "generic.h"

namespace qgemv {

// Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: a lane a block of 32 weights, in two parts of 16: in all but Q8_0 the low nibbles of
// 16 bytes and the high ones. At most four times two bytes a load, as most blocks are aligned to no more.
//
//   blocks  | d (m) (qh) | qs: 16 bytes | d (m) (qh) | qs: 16 bytes | ...
//   lane               0                            1                  ...
//   its x            0..31                        32..63               ...
//
// The two parts are summed apart, each from what its code of 0 takes off: shorter sums round less.
template <typename T>
struct WholeBlock {
  enum { lanes = 1, ahead = 0 };
  using Sums = float;
  static constant constexpr float unit = tiny_unit;
  T x[32];
  float2 x_sum;  // of the two parts, times 1 / unit

  void load(device const T* x_block) {
    load_x<32>(x_block, x);
    x_sum = float2(sum<16>(x), sum<16>(x + 16)) / tiny_unit;
  }
  // total + d * codes + m * x, of the halfs before a block's other fields
  static float add_scaled(half d, float codes, float total) { return fma(real_half(d), codes, total); }
  float add_scaled(half2 d, float codes, float total) const {
    return fma(real_half(d.y), x_sum.x + x_sum.y, fma(real_half(d.x), codes, total));
  }
};

inline half first_half(device const uchar* block) { return *(device const half*)block; }
inline half2 first_halves(device const uchar* block) {
  device const half* d = (device const half*)block;
  return half2(d[0], d[1]);
}

// sums of both parts + x times the nibbles
template <typename T>
inline float dot_nibbles(uint4 q, thread const T* x, float2 sums) {
  float low = sums.x, high = sums.y * 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    low = dot_masked(q[i], 0x000f000fu, x + 4 * i, low);
    high = dot_masked(q[i], 0x00f000f0u, x + 16 + 4 * i, high);
  }
  return fma(high, 1.0f / 16, low);
}

template <typename T, bool wide>
struct Lane<Q4_0, Aligned, T, wide> : WholeBlock<T>, NoTable {
  using Base = WholeBlock<T>;
  struct Data {
    half d;
    uint4 q;
  };

  Lane(int, threadgroup const uint*) {}

  Data fetch(device const uchar* block) const { return {first_half(block), Aligned::words4(block + 2)}; }
  float dot(Data data) const { return dot_nibbles(data.q, Base::x, Base::x_sum * -8.0f); }
  float add(Data data, float codes, float total) const { return Base::add_scaled(data.d, codes, total); }
};

template <typename T, bool wide>
struct Lane<Q4_1, Aligned, T, wide> : WholeBlock<T>, NoTable {
  using Base = WholeBlock<T>;
  struct Data {
    half2 d;
    uint4 q;
  };

  Lane(int, threadgroup const uint*) {}

  Data fetch(device const uchar* block) const { return {first_halves(block), Aligned::words4(block + 4)}; }
  float dot(Data data) const { return dot_nibbles(data.q, Base::x, float2(0.0f)); }
  float add(Data data, float codes, float total) const { return Base::add_scaled(data.d, codes, total); }
};

// The fifth bits of 32 weights are 32 bits in a row. A byte of them is looked up: two words, each with four bits, in
// place 4 of its bytes.
struct FifthBits {
  enum { table_words = 512 };
  threadgroup const uint2* table;

  FifthBits(threadgroup const uint* t) : table((threadgroup const uint2*)t) {}

  static void fill_table(threadgroup uint* table, uint thread_index, uint threads) {
    for (uint i = thread_index; i < table_words; i += threads) table[i] = Plain::fifth_bits(i % 2 ? i >> 5 : i >> 1);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // sums of both parts + x times the codes of 5 bits
  template <typename T>
  float dot_codes(uint bits, uint4 q, thread const T* x, float2 sums) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 low = table[(bits >> (8 * i)) & 255u], high = table[(bits >> (16 + 8 * i)) & 255u];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int k = 2 * i + j;
        sums.x = dot_bytes((q[k] & 0x0f0f0f0fu) | low[j], x + 4 * k, sums.x);
        sums.y = dot_bytes(((q[k] >> 4) & 0x0f0f0f0fu) | high[j], x + 16 + 4 * k, sums.y);
      }
    }
    return sums.x + sums.y;
  }
};

template <typename T, bool wide>
struct Lane<Q5_0, Aligned, T, wide> : WholeBlock<T>, FifthBits {
  using Base = WholeBlock<T>;
  struct Data {
    half d;
    uint bits;
    uint4 q;
  };

  Lane(int, threadgroup const uint* t) : FifthBits(t) {}

  Data fetch(device const uchar* block) const {
    return {first_half(block), Aligned::word(block + 2, 0), Aligned::words4(block + 6)};
  }
  float dot(Data data) const { return dot_codes(data.bits, data.q, Base::x, Base::x_sum * -16.0f); }
  float add(Data data, float codes, float total) const { return Base::add_scaled(data.d, codes, total); }
};

template <typename T, bool wide>
struct Lane<Q5_1, Aligned, T, wide> : WholeBlock<T>, FifthBits {
  using Base = WholeBlock<T>;
  struct Data {
    half2 d;
    uint bits;
    uint4 q;
  };

  Lane(int, threadgroup const uint* t) : FifthBits(t) {}

  Data fetch(device const uchar* block) const {
    return {first_halves(block), Aligned::word(block + 4, 0), Aligned::words4(block + 8)};
  }
  float dot(Data data) const { return dot_codes(data.bits, data.q, Base::x, float2(0.0f)); }
  float add(Data data, float codes, float total) const { return Base::add_scaled(data.d, codes, total); }
};

}  // namespace qgemv
