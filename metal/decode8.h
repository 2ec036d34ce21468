// Pieces: how the kernels for several rows of x read weights. A piece is 32 weights of a block, which a lane loads at
// once and decodes 8 at a time, into floats. Piece<F, S>, for the format F in blocks read as S, has
//   per_block    pieces in a block
//   table_size   words of a table in threadgroup memory, which fill_table fills; 1, not used, where there is none
//   start(t)     where in a block piece t begins
//   quad(j)      how far behind that its weights 4j .. 4j + 3 lie, which are neighbours; j = 0..7
//   load(b, t)   takes piece t of the block at b
//   decode(i, table, w)  its quads 2i and 2i + 1; i = 0..3
//
// No code is converted to float: masked, it is read as a subnormal half, which a multiply-add takes as it is
// (storage.h). So a weight costs one multiply-add, w = scale * code + offset, where the offset is what a code of 0
// stands for.
#pragma once
#include "storage.h"

namespace qgemv {

static constant constexpr int piece_size = 32;

struct NoLevels {
  enum { table_size = 1 };
  static void fill_table(threadgroup uint*, uint, uint) {}
};

// Pieces of neighbouring weights.
template <typename F>
struct InOrder : NoLevels {
  enum { per_block = F::block_size / piece_size };
  static uint start(uint t) { return piece_size * t; }
  static uint quad(uint j) { return 4 * j; }
};

// Four weights: the codes in bytes 0 and 2 of `even`, and of `odd`, which are weights 1 and 3; 2^24 times too small.
inline void weights4(uint even, uint odd, float scale, float offset, thread float* w) {
  const float2 e = tiny2(even), o = tiny2(odd);
  w[0] = fma(e.x, scale, offset);
  w[1] = fma(o.x, scale, offset);
  w[2] = fma(e.y, scale, offset);
  w[3] = fma(o.y, scale, offset);
}
inline void weights4(uint codes, float scale, float offset, thread float* w) {
  weights4(codes & 0x00ff00ffu, (codes >> 8) & 0x00ff00ffu, scale, offset, w);
}

template <typename S>
inline float real_at(device const uchar* bytes) {
  return S::real(*(device const typename S::Half*)bytes);
}

// Two neighbouring bytes, each in a half of a word.
template <typename S>
inline uint spread(device const uchar* bytes) {
  return halves(bytes[0], bytes[1]);
}
template <>
inline uint spread<Aligned>(device const uchar* bytes) {
  return as_type<uint>(ushort2(*(device const uchar2*)bytes));
}

// 16 bytes, in as few loads as the format's alignment allows.
template <typename F, typename S>
struct Load16 {
  static uint4 from(device const uchar* bytes) {
    return uint4(S::word(bytes, 0), S::word(bytes, 1), S::word(bytes, 2), S::word(bytes, 3));
  }
};
struct Load16Aligned16 {
  static uint4 from(device const uchar* bytes) { return *(device const uint4*)bytes; }
};
template <>
struct Load16<Q4_K, Aligned> : Load16Aligned16 {};
template <>
struct Load16<Q5_K, Aligned> : Load16Aligned16 {};
template <>
struct Load16<IQ4_XS, Aligned> {
  static uint4 from(device const uchar* bytes) {
    device const uint2* two = (device const uint2*)bytes;
    return uint4(two[0], two[1]);
  }
};

// The 8 x that belong to quads 2i and 2i + 1 of a piece, whose x start at x_piece.
template <typename P, typename T>
inline void load_x_of(device const T* x_piece, int i, thread float* x) {
  if (P::quad(2 * i + 1) == P::quad(2 * i) + 4) {
    load_floats<8>(x_piece + P::quad(2 * i), x);
  } else {
    load_floats<4>(x_piece + P::quad(2 * i), x);
    load_floats<4>(x_piece + P::quad(2 * i + 1), x + 4);
  }
}

// Any format, by the codes and scales that its struct unpacks.
template <typename F, typename S>
struct Piece : InOrder<F> {
  uint codes[8];
  float scale[2], offset[2];  // of 16 weights each

  void load(device const uchar* block, uint t) {
    device const Block<F, S>& b = *(device const Block<F, S>*)block;
    const auto scales = F::template scales<S>(b);
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = F::template codes<S>(b, int(8 * t) + i);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int group = (int(piece_size * t) + 16 * h) / F::group;
      scale[h] = scales.scale(group) * tiny_unit;
      offset[h] = fma(scales.scale(group), -float(F::template zero<S>()), -scales.min(group));
    }
  }
  void decode(int i, threadgroup const uint*, thread float* w) const {
    weights4(codes[2 * i], scale[i / 2], offset[i / 2], w);
    weights4(codes[2 * i + 1], scale[i / 2], offset[i / 2], w + 4);
  }
};

// Q4_K and Q5_K: piece 2j + h is 16 weights of group 2j, from the low nibbles of 16 bytes, and 16 of group 2j + 1.
struct GroupPair : NoLevels {
  enum { per_block = 8 };
  static uint start(uint t) { return 64 * (t / 2) + 16 * (t % 2); }
  static uint quad(uint j) { return 32 * (j / 4) + 4 * (j % 4); }

  // Of the two groups; scale is for codes that are 2^24 times too small, of which the second group's are 16 times too
  // large.
  float2 scale, offset;

  // The fields of the groups are neighbours, and unpacked together: scales as 4 * scale, minimums as 4 * min for groups
  // 0..3, 16 * min for 4..7 (formats/q4_k.h says where their bits lie).
  template <typename S>
  void load_scales(device const uchar* block, uint j) {
    const bool last = j >= 2;
    const uint six = last ? 0x000f000fu : 0x003f003fu, two = last ? 0x00c000c0u : 0u;
    const uint low = last ? 0x00c000c0u : 0x003f003fu, high = last ? 0x00f000f0u : 0u;
    device const uchar* bytes = block + 4 + 2 * (j & 1);
    const uint a = spread<S>(bytes), b = spread<S>(bytes + 4), c = spread<S>(bytes + 8);
    const float d = real_at<S>(block) * (tiny_unit * tiny_unit / 4);
    const float minus_dmin = real_at<S>(block + 2) * (last ? -tiny_unit / 16 : -tiny_unit / 4);
    scale = tiny2((((last ? c : a) & six) << 2) + (a & two)) * float2(d, d * 0.0625f);
    offset = tiny2(((b & low) << 2) + (c & high)) * minus_dmin;
  }
};

template <typename S>
struct Piece<Q4_K, S> : GroupPair {
  uint4 codes;

  void load(device const uchar* block, uint t) {
    codes = Load16<Q4_K, S>::from(block + 16 + 16 * t);
    load_scales<S>(block, t / 2);
  }
  void decode(int i, threadgroup const uint*, thread float* w) const {
    const uint mask = i < 2 ? 0x000f000fu : 0x00f000f0u;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint q = codes[2 * (i % 2) + k];
      weights4(q & mask, (q >> 8) & mask, scale[i / 2], offset[i / 2], w + 4 * k);
    }
  }
};

// With the fifth bits of 16 bytes, of which bits 2j and 2j + 1 are the groups'.
template <typename S>
struct Piece<Q5_K, S> : GroupPair {
  uint4 codes, fifth;

  void load(device const uchar* block, uint t) {
    codes = Load16<Q5_K, S>::from(block + 48 + 16 * t);
    fifth = Load16<Q5_K, S>::from(block + 16 + 16 * (t % 2)) >> (t / 2 * 2);
    load_scales<S>(block, t / 2);
  }
  void decode(int i, threadgroup const uint*, thread float* w) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint q = codes[2 * (i % 2) + k], f = fifth[2 * (i % 2) + k];
      uint even, odd;
      if (i < 2) {
        even = (q & 0x000f000fu) + ((f << 4) & 0x00100010u);
        odd = ((q >> 8) & 0x000f000fu) + ((f >> 4) & 0x00100010u);
      } else {
        even = (q & 0x00f000f0u) + ((f << 7) & 0x01000100u);
        odd = ((q >> 8) & 0x00f000f0u) + ((f >> 1) & 0x01000100u);
      }
      weights4(even, odd, scale[i / 2], offset[i / 2], w + 4 * k);
    }
  }
};

// Q6_K: piece 4n + c is 8 weights in the same place of the four quarters of half n.
template <typename S>
struct Piece<Q6_K, S> : NoLevels {
  enum { per_block = 8 };
  uint low[2][2], high[2];
  float scale[4];  // for codes that are 2^24 times too small, in quarters 2 and 3 16 times too large

  static uint start(uint t) { return 128 * (t / 4) + 8 * (t % 4); }
  static uint quad(uint j) { return 32 * (j / 2) + 4 * (j % 2); }

  void load(device const uchar* block, uint t) {
    const uint n = t / 4, c = t % 4;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      low[0][k] = S::word(block + 64 * n + 8 * c, k);
      low[1][k] = S::word(block + 64 * n + 32 + 8 * c, k);
      high[k] = S::word(block + 128 + 32 * n + 8 * c, k);
    }
    device const uchar* scales = block + 192 + 8 * n + c / 2;
    const float d = real_at<S>(block + 208) * tiny_unit;
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const float unit = g < 2 ? 1.0f : 0.0625f;
      scale[g] = fma(tiny(scales[2 * g] ^ 0x80u), d * (tiny_unit * unit), d * (-128.0f * unit));
    }
  }
  void decode(int i, threadgroup const uint*, thread float* w) const {
    const float offset = scale[i] * ((i < 2 ? -32.0f : -512.0f) / tiny_unit);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint q = low[i % 2][k], h = high[k];
      weights4(code(i, q, h), code(i, q >> 8, h >> 8), scale[i], offset, w + 4 * k);
    }
  }
  // Quarter i's codes of bytes 0 and 2.
  static uint code(int i, uint q, uint h) {
    if (i == 0) return (q & 0x000f000fu) + ((h & 0x00030003u) << 4);
    if (i == 1) return (q & 0x000f000fu) + ((h & 0x000c000cu) << 2);
    if (i == 2) return (q & 0x00f000f0u) + ((h & 0x00300030u) << 4);
    return (q & 0x00f000f0u) + ((h & 0x00c000c0u) << 2);
  }
};

template <typename S>
struct Piece<Q8_0, S> : InOrder<Q8_0> {
  uint codes[8];
  float scale;

  void load(device const uchar* block, uint) {
    scale = real_at<S>(block) * tiny_unit;
#pragma unroll
    for (int i = 0; i < 8; ++i) codes[i] = S::signed_codes(S::word(block + 2, i));
  }
  void decode(int i, threadgroup const uint*, thread float* w) const {
    const float offset = scale * (-float(S::code_bias) / tiny_unit);
    weights4(codes[2 * i], scale, offset, w);
    weights4(codes[2 * i + 1], scale, offset, w + 4);
  }
};

// IQ4_NL and IQ4_XS: 16 bytes, whose low nibbles index 16 weights and high ones the next 16. A byte is looked up at
// once, in a table of 256 pairs of levels.
struct Levels {
  enum { table_size = 256 };
  uint4 indices;
  float scale;

  static uint quad(uint j) { return 4 * (j / 2) + 16 * (j % 2); }

  static void fill_table(threadgroup uint* table, uint thread_index, uint threads) {
    for (uint i = thread_index; i < table_size; i += threads) {
      table[i] = as_type<uint>(half2(half(kvalues_iq4nl[i & 15u]), half(kvalues_iq4nl[i >> 4])));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  void decode(int i, threadgroup const uint* table, thread float* w) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const half2 levels = as_type<half2>(table[(indices[i] >> (8 * j)) & 255u]);
      w[j] = scale * float(levels.x);
      w[4 + j] = scale * float(levels.y);
    }
  }
};

template <typename S>
struct Piece<IQ4_NL, S> : Levels {
  enum { per_block = 1 };
  static uint start(uint) { return 0; }

  void load(device const uchar* block, uint) {
    indices = Load16<IQ4_NL, S>::from(block + 2);
    scale = real_at<S>(block);
  }
};

template <typename S>
struct Piece<IQ4_XS, S> : Levels {
  enum { per_block = 8 };
  static uint start(uint t) { return piece_size * t; }

  void load(device const uchar* block, uint t) {
    indices = Load16<IQ4_XS, S>::from(block + 8 + 16 * t);
    const uint place = 1u << (t % 4 * 2);  // of its two high bits
    const float high = fma(tiny(block[2 + t / 4] & (3u * place)), 16.0f * tiny_unit / float(place), -32.0f);
    const uint low = block[4 + t / 2] & (t % 2 ? 0xf0u : 0x0fu);
    scale = real_at<S>(block) * fma(tiny(low), t % 2 ? tiny_unit / 16 : tiny_unit, high);
  }
};

}  // namespace qgemv
