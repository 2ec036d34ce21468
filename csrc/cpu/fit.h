// Which scale, minimum and levels stand best for given values: the search behind `quantize`, for 16 blocks at once, one
// in each vector lane.
//
// Every format writes a value as  scale * level - min , with a level out of a small set. For levels once chosen the
// best scale and min are those of weighted least squares; for a scale and min the best level is the nearest. The
// searches start where ggml's quantizers (MIT) start, at the largest value or the range; they take these two steps in
// turn and judge each choice by the error that is left with the scale and min as the format stores them.
#pragma once
#include "simd.h"

namespace qgemv::cpu {

using Lanes = float[panel_rows];  // one value of each of the 16 blocks

template <class V>
using FloatOf = typename V::Float;

// 1 / v, and 0 where that would overflow: a scale of 0 has only zeros.
template <class V>
inline FloatOf<V> inverse(const FloatOf<V>& v) {
  const auto one = V::splat(1.0f), limit = V::splat(1e-30f);
  const auto usable = less(limit, V::abs(v));
  return select(usable, one / select(usable, v, one), V::splat(0.0f));
}
template <class V>
inline FloatOf<V> round(const FloatOf<V>& v) {  // to nearest even where |v| < 2^22; larger ones stay about as large
  constexpr float magic = 12582912.0f;
  return (v + magic) - magic;
}

// ---- Levels
// start(i): on which level the largest value is tried.
constexpr int zigzag(int i) { return i % 2 ? (i + 1) / 2 : -i / 2; }  // 0, 1, -1, 2, -2 ...

template <int low, int high, int zero_code>
struct Integers {
  static constexpr float first = low, last = high;
  static constexpr float start(int i) {
    return i % 2 ? last + step * float(zigzag(i / 2)) : (low == -128 ? -127.0f : first) - step * float(zigzag(i / 2));
  }
  static constexpr float step = low < -100 ? 1.0f : 0.1f;
  template <class V>
  static FloatOf<V> nearest(const FloatOf<V>& v) {
    return V::min(V::max(round<V>(v), V::splat(first)), V::splat(last));
  }
  template <class V>
  static typename V::Word code(const FloatOf<V>& v) {
    return V::to_word(nearest<V>(v) + float(zero_code)) & 255u;
  }
};

// The 16 levels of IQ4_NL and IQ4_XS; the next one begins half way.
struct Iq4Levels {
  static constexpr float first = -127, last = 113;
  static constexpr float start(int i) { return i % 2 ? last + float(zigzag(i / 2)) : first - float(zigzag(i / 2)); }
  template <class V>
  static FloatOf<V> nearest(const FloatOf<V>& v) {
    return choose<V>(v, [](int i) { return float(kvalues_iq4nl[i]); });
  }
  template <class V>
  static typename V::Word code(const FloatOf<V>& v) {
    return V::to_word(choose<V>(v, [](int i) { return float(i); }));
  }

 private:
  template <class V, class Fn>
  static FloatOf<V> choose(const FloatOf<V>& v, Fn value) {
    FloatOf<V> chosen = V::splat(value(0));
    for (int i = 1; i < 16; ++i) {
      const float begin = 0.5f * float(kvalues_iq4nl[i - 1] + kvalues_iq4nl[i]);
      chosen = select(less(V::splat(begin), v), V::splat(value(i)), chosen);
    }
    return chosen;
  }
};

// ---- One group of values
template <int n>
struct Group {
  const Lanes *x, *weight;
};

// What is left of x + min after scale * level, and what the best scale and min follow from.
template <class V>
struct Trial {
  FloatOf<V> error, level, level2, level_x;  // sums of weight times left^2, level, level^2, level * (x + min)
};
template <class V, class Levels, int n>
inline Trial<V> attempt(const Group<n>& group, const FloatOf<V>& scale, const FloatOf<V>& min) {
  const FloatOf<V> zero = V::splat(0.0f), inv = inverse<V>(scale);
  Trial<V> t = {zero, zero, zero, zero};
  for (int i = 0; i < n; ++i) {
    const FloatOf<V> x = load<FloatOf<V>>(group.x[i]) + min, w = load<FloatOf<V>>(group.weight[i]);
    const FloatOf<V> level = Levels::template nearest<V>(x * inv), w_level = w * level, left = x - scale * level;
    t.error = t.error + w * left * left;
    t.level = t.level + w_level;
    t.level2 = t.level2 + w_level * level;
    t.level_x = t.level_x + w_level * x;
  }
  return t;
}

template <class V>
struct Range {
  FloatOf<V> weight, x;  // sums of weight and of weight * x
  FloatOf<V> smallest, largest;
  FloatOf<V> peak() const {  // the signed value of the largest magnitude
    return select(less(-smallest, largest), largest, smallest);
  }
  void add(const FloatOf<V>& value, const FloatOf<V>& w) {
    weight = weight + w;
    x = x + w * value;
  }
};
template <class V, int n>
inline Range<V> range_of(const Group<n>& group) {
  const auto zero = V::splat(0.0f), first = load<FloatOf<V>>(group.x[0]);
  Range<V> r = {zero, zero, first, first};
  for (int i = 0; i < n; ++i) {
    const auto x = load<FloatOf<V>>(group.x[i]);
    r.add(x, load<FloatOf<V>>(group.weight[i]));
    r.smallest = V::min(r.smallest, x);
    r.largest = V::max(r.largest, x);
  }
  return r;
}

template <class V>
struct Affine {
  FloatOf<V> scale, min;
};
// The best scale and min for the levels of a trial that was made with `min`.
template <class V>
inline Affine<V> least_squares(const Trial<V>& t, const Range<V>& range, const FloatOf<V>& min) {
  const FloatOf<V> level_x = t.level_x - min * t.level, determinant = range.weight * t.level2 - t.level * t.level;
  // All levels alike: any scale goes with some min. Then the mean is the min, as far as rounding lets one tell.
  const auto alike = less(determinant, range.weight * t.level2 * 1e-5f);
  const FloatOf<V> scale =
      select(alike, V::splat(0.0f), (range.weight * level_x - range.x * t.level) * inverse<V>(determinant));
  return {scale, (scale * t.level - range.x) * inverse<V>(range.weight)};
}
template <class V>
inline FloatOf<V> least_squares(const Trial<V>& t) {
  return t.level_x * inverse<V>(t.level2);
}

// Values of a half field: x is `unit` times too small, so that no square of it overflows or vanishes.
template <class V>
struct Halves {
  FloatOf<V> unit, inv_unit;
  void store(const FloatOf<V>& v, uint16_t* half) const {
    const FloatOf<V> value = v * unit;
    for (int p = 0; p < FloatOf<V>::count; ++p) V::Isa::store_half(half + p * V::lanes, value.part[p]);
  }
  FloatOf<V> nearest(const FloatOf<V>& v) const {
    uint16_t half[panel_rows];
    store(v, half);
    return V::real(half) * inv_unit;
  }
};

}  // namespace qgemv::cpu
