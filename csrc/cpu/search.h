// The scales and minimums of a block: one search for each way in which formats scale their values.
#pragma once
#include "fit.h"

namespace qgemv::cpu {

// 16 blocks as the searches see them.
template <class V>
struct Values {
  const Lanes *x, *weight;
  Halves<V> half;
  Range<V> range;  // of all values of a block
  bool given;      // whether the weights are the caller's
  template <int n>
  Group<n> group(int g) const {
    return {x + g * n, weight + g * n};
  }
};

// value = d * scale[g] * level - dmin * min[g]
template <class V>
struct Choice {
  FloatOf<V> error, d, dmin;      // d and dmin as halfs hold them
  FloatOf<V> scale[16], min[16];  // whole numbers
};
constexpr float worst = 3e38f;
// Gains that differ by less are alike: the first try that has one is kept.
constexpr float tie = 1.000001f;
// By how many levels the ends of a range are moved.
constexpr float grid_step = 0.4f;

// Puts the choice in the place of the best so far in the lanes where it leaves less.
template <int groups, class V>
inline void keep(const Choice<V>& choice, Choice<V>& best) {
  const auto better = less(choice.error, best.error);
  best.error = select(better, choice.error, best.error);
  best.d = select(better, choice.d, best.d);
  best.dmin = select(better, choice.dmin, best.dmin);
  for (int g = 0; g < groups; ++g) {
    best.scale[g] = select(better, choice.scale[g], best.scale[g]);
    best.min[g] = select(better, choice.min[g], best.min[g]);
  }
}

// value = d * level
template <class L, int n, int quick, int thorough>
struct OneScale {
  using Levels = L;
  static constexpr int group = n, groups = 1;
  static constexpr float scale_zero = 0, floor = 0.12f;

  template <class V>
  static void search(const Values<V>& values, Choice<V>& best) {
    const auto zero = V::splat(0.0f);
    best = {V::splat(worst), zero, zero, {V::splat(1.0f)}, {zero}};
    const Group<n> all = values.template group<n>(0);
    const FloatOf<V> peak = values.range.peak();
    FloatOf<V> refined = zero;
    auto consider = [&](const FloatOf<V>& d) {
      const FloatOf<V> stored = values.half.nearest(d);
      const Trial<V> t = attempt<V, Levels>(all, stored, zero);
      const auto better = less(t.error, best.error);
      best.error = select(better, t.error, best.error);
      best.d = select(better, stored, best.d);
      refined = select(better, least_squares(t), refined);
      return t;
    };
    auto refine = [&](const Trial<V>& t) { return consider(least_squares(t)); };
    const int tries = values.given ? thorough : quick;
    for (int i = 0; i < tries; ++i) refine(consider(peak * (1.0f / Levels::start(i))));
    if (tries > 1) consider(refined);
  }
};

// value = d * level - min, where a half field holds -min
template <class L, int n, int quick, int thorough>
struct OneScaleAndMin {
  using Levels = L;
  static constexpr int group = n, groups = 1;
  static constexpr float scale_zero = 0, floor = 0.15f;

  template <class V>
  static void search(const Values<V>& values, Choice<V>& best) {
    const auto zero = V::splat(0.0f);
    best = {V::splat(worst), zero, zero, {V::splat(1.0f)}, {V::splat(1.0f)}};
    const Group<n> all = values.template group<n>(0);
    const Range<V>& range = values.range;
    Affine<V> refined = {zero, zero};
    auto consider = [&](const Affine<V>& a) {
      const Affine<V> stored = {values.half.nearest(a.scale), values.half.nearest(a.min)};
      const Trial<V> t = attempt<V, Levels>(all, stored.scale, stored.min);
      const auto better = less(t.error, best.error);
      const Affine<V> next = least_squares(t, range, stored.min);
      best.error = select(better, t.error, best.error);
      best.d = select(better, stored.scale, best.d);
      best.dmin = select(better, stored.min, best.dmin);
      refined = {select(better, next.scale, refined.scale), select(better, next.min, refined.min)};
      return next;
    };
    const int tries = values.given ? thorough : quick;
    for (int i = 0; i < tries * tries; ++i) {
      const float top = grid_step * float(zigzag(i % tries)), bottom = grid_step * float(zigzag(i / tries));
      const FloatOf<V> step = (range.largest - range.smallest) * (1.0f / (Levels::last + top - bottom));
      const FloatOf<V> min = values.half.nearest(step * bottom - range.smallest);  // what it lost goes to the scale
      consider(consider({(range.largest + min) * (1.0f / (Levels::last + top)), min}));
    }
    if (tries > 1) consider(refined);
  }
};

// value = d * scale[g] * level, with whole scales from first_scale to last_scale
template <class L, int n, int first_scale, int last_scale, int scale_code, int tries, int quick, int thorough,
          int neighbours>
struct SharedScales {
  using Levels = L;
  static constexpr int group = n, groups = 256 / n;
  static constexpr float scale_zero = scale_code, floor = 0.12f;

  template <class V>
  static void search(const Values<V>& values, Choice<V>& best) {
    const auto zero = V::splat(0.0f);
    FloatOf<V> real[groups], largest = zero;
    for (int g = 0; g < groups; ++g) {
      real[g] = best_scale<V>(values.template group<n>(g));
      largest = select(less(V::abs(largest), V::abs(real[g])), real[g], largest);
    }
    best.error = V::splat(worst), best.d = best.dmin = zero;
    FloatOf<V> d = zero;
    for (int round = 0; round < (values.given ? thorough : quick); ++round) {
      if (round % 2 == 0) d = largest * (1.0f / float(first_scale + round / 2));
      FloatOf<V> product = zero, square = zero;  // sums of weight * scale * level * {x, scale * level}
      Choice<V> choice;
      choice.d = values.half.nearest(d), choice.dmin = choice.error = zero;
      for (int g = 0; g < groups; ++g) {
        const Whole<V> whole =
            best_whole<V>(values.template group<n>(g), real[g], choice.d, values.given ? neighbours : 3);
        choice.scale[g] = whole.scale, choice.min[g] = zero;
        choice.error = choice.error + whole.error;
        product = product + whole.scale * whole.level_x;
        square = square + whole.scale * whole.scale * whole.level2;
      }
      keep<groups>(choice, best);
      d = product * inverse<V>(square);
    }
  }

 private:
  template <class V>
  struct Whole {
    FloatOf<V> error, scale, level_x, level2;
  };
  // Of one group: the best whole scale near the one that would be best alone.
  template <class V>
  static Whole<V> best_whole(const Group<n>& group, const FloatOf<V>& alone, const FloatOf<V>& d, int count) {
    const auto zero = V::splat(0.0f), first = V::splat(float(first_scale)), last = V::splat(float(last_scale));
    const FloatOf<V> near = cpu::round<V>(alone * inverse<V>(d));
    Whole<V> best = {V::splat(worst), zero, zero, zero};
    for (int i = 0; i < count; ++i) {
      const FloatOf<V> scale = V::min(V::max(near + float(zigzag(i)), first), last);
      const Trial<V> t = attempt<V, Levels>(group, d * scale, zero);
      const auto better = less(t.error, best.error);
      best = {select(better, t.error, best.error), select(better, scale, best.scale),
              select(better, t.level_x, best.level_x), select(better, t.level2, best.level2)};
    }
    return best;
  }

  // Of one group alone: whose levels, with their best scale, leave the least.
  template <class V>
  static FloatOf<V> best_scale(const Group<n>& group) {
    const auto zero = V::splat(0.0f);
    FloatOf<V> gain = zero, scale = zero;
    const FloatOf<V> peak = range_of<V>(group).peak();
    auto consider = [&](const FloatOf<V>& inv) {
      FloatOf<V> level_x = zero, level2 = zero;
      for (int i = 0; i < n; ++i) {
        const auto x = load<FloatOf<V>>(group.x[i]), w = load<FloatOf<V>>(group.weight[i]);
        const FloatOf<V> level = Levels::template nearest<V>(x * inv), w_level = w * level;
        level_x = level_x + w_level * x;
        level2 = level2 + w_level * level;
      }
      const FloatOf<V> best = level_x * inverse<V>(level2), gained = best * level_x;
      const auto better = less(gain * tie, gained);
      gain = select(better, gained, gain);
      scale = select(better, best, scale);
    };
    const FloatOf<V> inv_peak = inverse<V>(peak);
    for (int i = 0; i < tries; ++i) consider(inv_peak * Levels::start(i));
    consider(inverse<V>(scale));
    consider(inverse<V>(scale));
    return scale;
  }
};

// value = d * scale[g] * level - dmin * min[g], with whole scales and minimums from 0 to last_scale
template <class L, int n, int last_scale, int tries, int rounds>
struct SharedScalesAndMins {
  using Levels = L;
  static constexpr int group = n, groups = 256 / n;
  static constexpr float scale_zero = 0, floor = 0.15f;

  template <class V>
  static void search(const Values<V>& values, Choice<V>& best) {
    const auto zero = V::splat(0.0f);
    Range<V> range[groups];
    Affine<V> real[groups], largest = {zero, zero};
    for (int g = 0; g < groups; ++g) {
      const Group<n> group = values.template group<n>(g);
      range[g] = range_of<V>(group);
      real[g] = best_alone(group, range[g]);
      largest = {V::max(largest.scale, real[g].scale), V::max(largest.min, real[g].min)};
    }
    best.error = V::splat(worst), best.d = best.dmin = zero;
    Affine<V> next = {zero, zero};
    for (int round = 0; round < rounds; ++round) {
      if (round % 2 == 0) {
        const float top = 1.0f / float(last_scale - round / 2);
        next = {largest.scale * top, largest.min * top};
      }
      Choice<V> choice;
      choice.d = values.half.nearest(next.scale), choice.dmin = values.half.nearest(next.min), choice.error = zero;
      Trial<V> sum = {zero, zero, zero, zero};  // over the groups, as least_squares wants them for d and dmin
      FloatOf<V> mins2 = zero, mins_x = zero;
      for (int g = 0; g < groups; ++g) {
        const Whole<V> w = best_whole<V>(values.template group<n>(g), range[g], real[g], {choice.d, choice.dmin});
        choice.scale[g] = w.scale, choice.min[g] = w.min;
        choice.error = choice.error + w.error;
        sum.level2 = sum.level2 + w.scale * w.scale * w.level2;
        sum.level = sum.level + w.scale * w.min * w.level;
        sum.level_x = sum.level_x + w.scale * w.level_x;
        mins2 = mins2 + w.min * w.min * range[g].weight;
        mins_x = mins_x + w.min * range[g].x;
      }
      keep<groups>(choice, best);
      next = refit(sum, mins2, mins_x);
    }
  }

 private:
  template <class V>
  struct Whole {
    FloatOf<V> error, scale, min, level, level2, level_x;  // the sums are of levels and x alone, without the min
  };
  // Of one group: the best whole scale and min near those that would be best alone, as multiples of unit's.
  template <class V>
  static Whole<V> best_whole(const Group<n>& group, const Range<V>& range, const Affine<V>& alone,
                             const Affine<V>& unit) {
    const auto zero = V::splat(0.0f), last = V::splat(float(last_scale));
    auto whole = [&](const FloatOf<V>& v) { return V::min(V::max(cpu::round<V>(v), zero), last); };
    const FloatOf<V> inv_unit = inverse<V>(unit.min), inv_weight = inverse<V>(range.weight);
    const FloatOf<V> near = cpu::round<V>(alone.scale * inverse<V>(unit.scale)),
                     first_min = whole(alone.min * inv_unit);
    Whole<V> best = {V::splat(worst), zero, zero, zero, zero, zero};
    auto consider = [&](const FloatOf<V>& scale, const FloatOf<V>& min) {
      const FloatOf<V> offset = unit.min * min;
      const Trial<V> t = attempt<V, Levels>(group, unit.scale * scale, offset);
      const auto better = less(t.error, best.error);
      best = {select(better, t.error, best.error),   select(better, scale, best.scale),
              select(better, min, best.min),         select(better, t.level, best.level),
              select(better, t.level2, best.level2), select(better, t.level_x - offset * t.level, best.level_x)};
      // the min that goes best with these levels
      return whole((unit.scale * scale * t.level - range.x) * inv_weight * inv_unit);
    };
    for (int i = 0; i < 3; ++i) {
      const FloatOf<V> scale = whole(near + float(zigzag(i)));
      consider(scale, consider(scale, first_min));
    }
    return best;
  }

  // Least squares for d and dmin with all levels, scales and mins as they are.
  template <class V>
  static Affine<V> refit(const Trial<V>& sum, const FloatOf<V>& mins2, const FloatOf<V>& mins_x) {
    const FloatOf<V> determinant = mins2 * sum.level2 - sum.level * sum.level, inv = inverse<V>(determinant);
    const auto solvable = less(mins2 * sum.level2 * 1e-5f, determinant);
    return {select(solvable, (mins2 * sum.level_x - sum.level * mins_x) * inv, least_squares(sum)),
            select(solvable, (sum.level * sum.level_x - sum.level2 * mins_x) * inv, -mins_x * inverse<V>(mins2))};
  }

  // Of one group alone, with a min that is not negative.
  template <class V>
  static Affine<V> best_alone(const Group<n>& group, const Range<V>& range) {
    const auto zero = V::splat(0.0f);
    const FloatOf<V> low = V::max(-range.smallest, zero), span = inverse<V>(V::max(range.largest, zero) + low);
    Affine<V> best = {zero, low};
    FloatOf<V> least = V::splat(worst);
    auto consider = [&](const FloatOf<V>& inv, const FloatOf<V>& min) {
      Trial<V> t = {zero, zero, zero, zero};
      for (int i = 0; i < n; ++i) {
        const auto x = load<FloatOf<V>>(group.x[i]), w = load<FloatOf<V>>(group.weight[i]);
        const FloatOf<V> level = Levels::template nearest<V>((x + min) * inv), w_level = w * level;
        t.level = t.level + w_level;
        t.level2 = t.level2 + w_level * level;
        t.level_x = t.level_x + w_level * x;
      }
      Affine<V> a = least_squares(t, range, zero);
      const auto above = less(a.min, zero);
      a = {select(above, least_squares(t), a.scale), select(above, zero, a.min)};
      // the error but for the sum of weight * x^2
      const FloatOf<V> error = a.scale * (a.scale * t.level2 - (t.level_x + a.min * t.level) * 2.0f) +
                               a.min * (a.min * range.weight + range.x * 2.0f);
      const auto better = less(error + V::abs(error) * (tie - 1.0f), least);
      least = select(better, error, least);
      best = {select(better, a.scale, best.scale), select(better, a.min, best.min)};
    };
    for (int i = 0; i < tries * tries; ++i) {
      const float top = grid_step * float(zigzag(i % tries)), bottom = grid_step * float(zigzag(i / tries));
      const FloatOf<V> inv = span * (Levels::last + top - bottom);
      consider(inv, low + inverse<V>(inv) * bottom);
    }
    consider(inverse<V>(best.scale), best.min);
    consider(inverse<V>(best.scale), best.min);
    return best;
  }
};

}  // namespace qgemv::cpu
