// A chunk of a panel, unpacked: a format of its own, of one block, as far as multiply_block needs it. Formats that are
// alike here share it, and the code that multiplies it.
#pragma once
#include "panels.h"

namespace qgemv::cpu {

template <class V, int group_size, bool with_min, bool with_zero>
struct UnpackedChunk {
  using Float = typename V::Float;
  static constexpr int block_size = chunk, group = group_size, groups = chunk / group_size;
  static constexpr bool has_min = with_min, scales_in_memory = true;
  struct alignas(64) Block {
    uint32_t codes[chunk / 4][panel_rows];
    float scale[groups][panel_rows], min[has_min ? groups : 1][panel_rows];
  };
  struct Scales {
    const Block* block;
    Float scale(int g) const { return load<Float>(block->scale[g]); }
    Float min(int g) const { return has_min ? load<Float>(block->min[g]) : Float{}; }
  };
  template <class S>
  static Scales scales(const Block& block) {
    return {&block};
  }
  template <class S>
  static constexpr int zero() {  // multiply_block asks only whether there is one
    return with_zero;
  }
  template <class S>
  static typename V::Word codes(const Block& block, int i) {
    return load<typename V::Word>(block.codes[i]);
  }
};

template <class V, class F>
using Unpacked = UnpackedChunk<V, F::group, F::has_min, F::template zero<V>() != 0>;

// `count` blocks of a panel to `out`, for `fetch` see multiply_block. The groups left over in a chunk get scales of
// zero; their codes, which meet zeros of x, may be anything.
template <class V, class F>
void unpack(const Panel<V, F>* blocks, int count, bool fetch, typename Unpacked<V, F>::Block& out) {
  using Float = typename V::Float;
  constexpr int words = F::block_size / 4, groups_each = F::block_size / F::group;
  for (int b = 0; b < count; ++b) {
    const auto scales = F::template scales<V>(blocks[b]);
    QGEMV_UNROLL_BLOCK(16)
    for (int g = 0; g < groups_each; ++g) {
      if (fetch) fetch_behind(blocks[b], g, groups_each);
      store(out.scale[b * groups_each + g], scales.scale(g));
      if (F::has_min) store(out.min[b * groups_each + g], scales.min(g));
    }
    QGEMV_UNROLL_BLOCK(64)
    for (int i = 0; i < words; ++i) store(out.codes[b * words + i], F::template codes<V>(blocks[b], i));
  }
  for (int g = count * groups_each; g < Unpacked<V, F>::groups; ++g) {
    store(out.scale[g], Float{});
    if (F::has_min) store(out.min[g], Float{});
  }
}

}  // namespace qgemv::cpu
