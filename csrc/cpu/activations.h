// Activations as integers: in each chunk of 256, x = scale * q with q cut into signed limbs, q = limb0 * 2^bits + ...
// 16 bits serve bf16 x, 24 bits fp16 and fp32 x. Sums of codes times limbs are then exact in 32-bit integers.
#pragma once
#include "simd.h"

namespace qgemv::cpu {

inline constexpr int activation_bits(Dtype dtype) { return dtype == Dtype::bf16 ? 16 : 24; }

template <class V>
constexpr int limb_count(int bits) {
  return (bits + V::limb_bits - 1) / V::limb_bits;
}

template <int bits>
struct LimbType {
  using type = int8_t;
};
template <>
struct LimbType<16> {
  using type = int16_t;
};

// One chunk of one row of x, for `groups` of 16 or 32 weights.
template <class V, int L>
struct alignas(64) Activations {
  using Limb = typename LimbType<V::limb_bits>::type;
  Limb limbs[L][chunk];          // 16-bit limbs: weights 0, 2, 1, 3 of each four
  int32_t start[chunk / 16][L];  // per group: -zero * sum of the limbs
  float sum[chunk / 16];         // per group: sum of q
  float scale;

  // `count` values from x. False: see Kernels::pack.
  bool pack(const void* x, Dtype dtype, int count, int group, int zero);
};

template <class V, int L>
bool Activations<V, L>::pack(const void* x, Dtype dtype, int count, int group, int zero) {
  constexpr int bits = V::limb_bits * L < 24 ? V::limb_bits * L : 24, lanes = V::lanes;
  constexpr float top = float(127 << (bits - 8));  // every limb stays in its range
  using Float = typename V::Float;
  using Int = typename V::Int;
  const int item = dtype == Dtype::f32 ? 4 : 2;

  alignas(64) float values[chunk] = {};
  alignas(64) int32_t q[chunk];
  Float peaks = {}, rest = {};
  for (int k = 0; k < count; k += lanes) {
    const Float v = V::load_as((const char*)x + int64_t(k) * item, dtype), size = v < 0 ? -v : v;
    peaks = size > peaks ? size : peaks;
    rest += v * 0;  // NaN for infinities and NaNs
    V::store(values + k, v);
  }
  float peak = 0, finite = 0;
  for (int i = 0; i < lanes; ++i) peak = peaks[i] > peak ? peaks[i] : peak, finite += rest[i];
  if (finite != 0 || (peak > 0 && peak < 1e-30f)) return false;
  scale = peak / top;
  const float inverse = peak > 0 ? top / peak : 0;
  for (int k = 0; k < chunk; k += lanes) {
    Int v = V::round(V::load(values + k) * inverse);
    memcpy(q + k, &v, sizeof v);
  }

  for (int g = 0; g < chunk / group; ++g) {
    int32_t total = 0;
    for (int k = g * group; k < (g + 1) * group; ++k) total += q[k];
    sum[g] = float(total);
  }
  for (int l = L - 1; l >= 0; --l) {
    for (int k = 0; k < chunk; ++k) {
      limbs[l][k] = Limb(q[k]);
      q[k] = (q[k] - limbs[l][k]) >> V::limb_bits;
    }
    for (int g = 0; g < chunk / group; ++g) {
      int32_t total = 0;
      for (int k = g * group; k < (g + 1) * group; ++k) total += limbs[l][k];
      start[g][l] = -zero * total;
    }
    if (V::limb_bits == 16)
      for (int k = 0; k < chunk; k += 4) {
        const Limb second = limbs[l][k + 1];
        limbs[l][k + 1] = limbs[l][k + 2];
        limbs[l][k + 2] = second;
      }
  }
  return true;
}

}  // namespace qgemv::cpu
