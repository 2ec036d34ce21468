// Single rows of W as numbers, on one instruction set.
#pragma once
#include "panels.h"

namespace qgemv::cpu {

// A storage (metal/formats/common.h) of one block whose vectors are 16 weights next to each other: four words. It gives
// codes(b, i) of weights 4i .. 4i + 15, for i a multiple of four; in every format these lie alike in four neighbouring
// words, but for fifth_bits, which are all in the first.
template <class Isa>
struct Row : Plain {
  using Word = typename Isa::FourWords;
  static Word word(const uint8_t* bytes, int i) { return load<Word>(bytes + 4 * i); }
  static Word signed_codes(Word v) { return v ^ 0x80808080u; }
  static Word lookup(Word index, const int8_t* table) { return Isa::lookup_16(index, table) ^ 0x80808080u; }
  static Word fifth_bits(Word v) {
    const Word bits = {v[0], v[0] >> 4, v[0] >> 8, v[0] >> 12};
    return (((bits & 15u) * 0x00204081u) & 0x01010101u) << 4;
  }
};

template <class V, class F>
void dequantize_row(const Weight& w, int64_t n, int64_t first, int64_t count, Dtype dtype, void* out) {
  using Isa = typename V::Isa;
  using S = Row<Isa>;
  constexpr int lanes = Isa::lanes, zero = F::template zero<S>();
  const int item = dtype == Dtype::f32 ? 4 : 2;
  auto* to = (char*)out;
  for (int64_t b = first / F::block_size; b < (first + count) / F::block_size; ++b) {
    typename F::Block copy;
    const typename F::Block& block = block_of<F>(w, n, b, copy);
    const auto scales = F::template scales<Plain>(block);
    for (int c = 0; c < F::block_size / 16; ++c) {
      const int group = 16 * c / F::group;
      const float scale = scales.scale(group), min = scales.min(group);
      const typename S::Word codes = F::template codes<S>(block, 4 * c);
      for (int k = 0; k < 16; k += lanes, to += lanes * item) {
        const typename Isa::Int code = Isa::bytes((const uint8_t*)&codes + k);
        typename Isa::Float value = __builtin_convertvector(code - zero, typename Isa::Float) * scale;
        if (F::has_min) value = value - min;
        store_as<Isa>(to, dtype, value);
      }
    }
  }
}

}  // namespace qgemv::cpu
