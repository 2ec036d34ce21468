// Values to GGUF blocks, 16 blocks at a time, one a vector lane.
#pragma once
#include "encoders.h"
#include "panels.h"

namespace qgemv::cpu {

template <int block_size>
struct Batch {
  alignas(64) Lanes x[block_size];
  alignas(64) Lanes weight[block_size];
};

template <class V, int n>
inline void to_lanes(const float* const (&blocks)[panel_rows], Lanes* out) {
  const uint8_t* rows[panel_rows];
  for (int r = 0; r < panel_rows; ++r) rows[r] = (const uint8_t*)blocks[r];
  for (int i = 0; i < n; i += 4) V::Isa::interleave_words(rows, 4 * i, (uint32_t (*)[panel_rows])(out + i));
}

// A power of two near the largest value, so that in units of it no square overflows or vanishes. Beyond the bounds no
// half can be a scale.
template <class V>
inline Halves<V> unit_of(const FloatOf<V>& largest) {
  const FloatOf<V> unit = V::power_of_two(V::min(V::max(largest, V::splat(0x1p-40f)), V::splat(0x1p+40f)));
  return {unit, V::splat(1.0f) / unit};
}

// Puts x in units and sets the weights, by which errors count. Without importance that is |x| and a part of its mean,
// for no error is free. Importance has a mean of 1; added to it is `floor`, a quarter of it in the measure of |x|, so
// that what counts little is not clipped. The result has no bits in the lanes of blocks that hold an infinity or a NaN.
template <class V, int n>
typename V::Int prepare(Batch<n>& batch, float floor, Values<V>& values) {
  const FloatOf<V> zero = V::splat(0.0f);
  FloatOf<V> smallest = zero, largest = zero, sum = zero, wrong = zero;
  for (int i = 0; i < n; ++i) {
    const auto x = load<FloatOf<V>>(batch.x[i]);
    smallest = i ? V::min(smallest, x) : x;
    largest = i ? V::max(largest, x) : x;
    sum = sum + V::abs(x);
    wrong = wrong + x * 0.0f;
  }
  values.half = unit_of<V>(V::max(largest, -smallest));
  const FloatOf<V> inv_unit = values.half.inv_unit, mean = sum * inv_unit * (1.0f / n);
  const FloatOf<V> slope = inverse<V>(mean) * (0.25f * floor);
  values.range = {zero, zero, smallest * inv_unit, largest * inv_unit};
  for (int i = 0; i < n; ++i) {
    const FloatOf<V> x = load<FloatOf<V>>(batch.x[i]) * inv_unit;
    const FloatOf<V> w =
        values.given ? load<FloatOf<V>>(batch.weight[i]) + V::abs(x) * slope + 0.75f * floor : V::abs(x) + mean * 1.3f;
    store(batch.x[i], x);
    store(batch.weight[i], w);
    values.range.add(x, w);
  }
  return less(wrong - 1.0f, zero);
}

// The blocks of a choice, with the nearest codes.
template <class V, class F>
void fill(Panel<V, F>& panel, const Values<V>& values, const Choice<V>& choice) {
  using E = Encoder<F>;
  constexpr int n = E::group;
  Fields<V> fields = {};
  for (int g = 0; g < E::groups; ++g) {
    const FloatOf<V> min = choice.dmin * choice.min[g], inv = inverse<V>(choice.d * choice.scale[g]);
    for (int i = g * n; i < (g + 1) * n; ++i) {
      const FloatOf<V> x = load<FloatOf<V>>(values.x[i]) + min;
      fields.codes[i / 4] = fields.codes[i / 4] | (E::Levels::template code<V>(x * inv) << (8 * (i % 4)));
    }
    auto add = [&](typename V::Word& bytes, const FloatOf<V>& v) {
      bytes = bytes | ((V::to_word(v) & 255u) << (8 * (g % 4)));
    };
    add(fields.scales[g / 4], choice.scale[g] + E::scale_zero);
    add(fields.mins[g / 4], choice.min[g]);
  }
  memset(&panel, 0, sizeof panel);
  values.half.store(choice.d, panel.d);
  if constexpr (requires { panel.dmin; }) values.half.store(choice.dmin, panel.dmin);
  if constexpr (requires { panel.m; }) values.half.store(-choice.dmin, panel.m);
  E::template pack<V>(panel, fields);
}

// Blocks [16 * begin, 16 * end); see Kernels::quantize. Flattened: in a file of many kernels GCC would call the
// smallest functions.
template <class V, class F>
[[gnu::flatten]] int64_t encode(const QuantizeArgs& args, int64_t begin, int64_t end) {
  constexpr int n = F::block_size, bytes = sizeof(typename F::Block);
  const int64_t blocks_in_row = args.K / n, blocks = args.N * blocks_in_row;
  const int item = args.dtype == Dtype::f32 ? 4 : 2;
  Batch<n> batch;
  float converted[panel_rows][n];
  Panel<V, F> panel;
  for (int64_t first = begin * panel_rows; first < end * panel_rows && first < blocks; first += panel_rows) {
    const int count = blocks - first < panel_rows ? int(blocks - first) : panel_rows;
    const float *x[panel_rows], *importance[panel_rows];
    for (int r = 0; r < panel_rows; ++r) {
      const int64_t block = first + (r < count ? r : 0);  // lanes left over repeat the first block
      const auto* from = (const char*)args.x + block * n * item;
      x[r] = (const float*)from;
      if (args.dtype != Dtype::f32) {
        for (int i = 0; i < n; i += V::lanes)
          store(converted[r] + i, load_as<typename V::Isa>(from + i * item, args.dtype));
        x[r] = converted[r];
      }
      if (args.importance) importance[r] = args.importance + block % blocks_in_row * n;
    }
    to_lanes<V, n>(x, batch.x);
    if (args.importance) to_lanes<V, n>(importance, batch.weight);

    Values<V> values{batch.x, batch.weight, {}, {}, args.importance != nullptr};
    Choice<V> choice;
    const typename V::Int finite = prepare<V, n>(batch, Encoder<F>::floor, values);
    Encoder<F>::search(values, choice);
    int32_t encoded[panel_rows];
    store(encoded, finite & less(choice.error, V::splat(worst)));
    for (int r = 0; r < count; ++r)
      if (!encoded[r]) return first + r;

    fill<V, F>(panel, values, choice);
    const Weight as_panel{F::id, (const uint8_t*)&panel, bytes, panel_rows, n, true};
    auto* blocks_out = (typename F::Block*)args.out + first;
    for (int r = 0; r < count; ++r) block_of<F>(as_panel, r, 0, blocks_out[r]);
  }
  return -1;
}

}  // namespace qgemv::cpu
