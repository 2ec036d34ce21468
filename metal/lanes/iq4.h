#pragma once
#include "generic.h"

namespace qgemv {

// What the lanes of IQ4_NL and IQ4_XS share: 32 weights a lane, of which the low nibbles of 16 bytes index the first 16
// and the high ones the others. A byte is looked up at once, in a table of 256 pairs of levels.
template <typename T>
struct LevelPairs {
  enum { table_words = 256 };
  static constant constexpr float unit = 1.0f;
  using Sums = float;
  threadgroup const uint* table;
  T x[32];

  LevelPairs(threadgroup const uint* t) : table(t) {}

  static void fill_table(threadgroup uint* table, uint thread_index, uint threads) {
    for (uint i = thread_index; i < table_words; i += threads) {
      table[i] = as_type<uint>(half2(half(kvalues_iq4nl[i & 15u]), half(kvalues_iq4nl[i >> 4])));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  float dot_levels(uint4 indices) const {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const half2 levels = as_type<half2>(table[(indices[i] >> (8 * j)) & 255u]);
        low = fma(float(x[4 * i + j]), float(levels.x), low);
        high = fma(float(x[16 + 4 * i + j]), float(levels.y), high);
      }
    }
    return low + high;
  }
};

// IQ4_NL: a lane a block. At most four times two bytes a load, as blocks of 18 bytes are aligned to no more.
//
//   blocks  | d | 16 bytes | d | 16 bytes | ...
//   byte     0   2          18  20         36
//   lane         0              1            ...
//   its x        0..31          32..63       ...
template <typename T, bool wide>
struct Lane<IQ4_NL, Aligned, T, wide> : LevelPairs<T> {
  using Base = LevelPairs<T>;
  enum { lanes = 1, ahead = 0 };

  struct Data {
    half d;
    uint4 indices;
  };

  Lane(int, threadgroup const uint* t) : Base(t) {}

  void load(device const T* x_block) { load_x<32>(x_block, Base::x); }
  Data fetch(device const uchar* block) const { return {*(device const half*)block, Aligned::words4(block + 2)}; }
  float dot(Data data) const { return Base::dot_levels(data.indices); }
  float add(Data data, float levels, float total) const { return fma(real_half(data.d), levels, total); }
};

// IQ4_XS: 8 lanes a block, a group of 32 weights a lane.
//
//   block   | d | scales_h | scales_l | group 0 | group 1 | ... | group 7 |
//   byte     0   2          4          8         24              120      136
//   lane     all  0..3 4..7  01 23 45 67   0         1                7
//   its x, low nibbles                     0..15     32..47           224..239
//   its x, high nibbles                    16..31    48..63           240..255
template <typename T, bool wide>
struct Lane<IQ4_XS, Aligned, T, wide> : LevelPairs<T> {
  using Base = LevelPairs<T>;
  enum { lanes = 8, ahead = 1 };
  struct Data {
    half d;
    uchar low, high;  // where the bits of its scale are
    uint4 indices;
  };
  int slot;
  uint low_mask, high_mask;  // of its 4 and 2 bits of the scale
  float low_unit, high_unit;

  Lane(int s, threadgroup const uint* t) : Base(t), slot(s) {
    const uint place = 1u << (s % 4 * 2);
    low_mask = s % 2 ? 0xf0u : 0x0fu;
    low_unit = s % 2 ? tiny_unit / 16 : tiny_unit;
    high_mask = 3u * place;
    high_unit = 16.0f * tiny_unit / float(place);
  }

  void load(device const T* x_block) { load_x<32>(x_block + 32 * slot, Base::x); }
  Data fetch(device const uchar* block) const {
    device const uint2* qs = (device const uint2*)(block + 8) + 2 * slot;
    return {*(device const half*)block, block[4 + slot / 2], block[2 + slot / 4], uint4(qs[0], qs[1])};
  }
  float dot(Data data) const { return Base::dot_levels(data.indices); }
  float add(Data data, float levels, float total) const {
    const float high = fma(tiny(data.high & high_mask), high_unit, -32.0f);
    const float scale = fma(tiny(data.low & low_mask), low_unit, high);
    return fma(real_half(data.d) * scale, levels, total);
  }
};

}  // namespace qgemv
