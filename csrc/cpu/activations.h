// Activations as integers: in each chunk of 256, x = scale * q with q cut into signed limbs, q = limb0 * 2^bits + ...
// 16 bits serve bf16 x, 24 bits fp16 and fp32 x. Sums of codes times limbs are then exact in 32-bit integers.
#pragma once
#include "simd.h"

namespace qgemv::cpu {

inline constexpr int activation_bits(Dtype dtype) { return dtype == Dtype::bf16 ? 16 : 24; }

template <class Isa>
constexpr int limb_count(int bits) {
  return (bits + Isa::limb_bits - 1) / Isa::limb_bits;
}

// One chunk of one row of x, for groups of 16 or 32 weights.
template <class Isa, int L>
struct alignas(64) Activations {
  static constexpr int most_groups = chunk / 16;
  typename Isa::Limb limbs[L][chunk];  // in the order that Isa::dot wants
  int32_t start[L][most_groups];       // per group: -zero * sum of the limbs
  float sum[most_groups];              // per group: sum of q
  float scale;

  // `count` values from x. False: see Kernels::pack.
  bool pack(const void* x, Dtype dtype, int count, int group, int zero);

 private:
  void sum_groups(int group, int zero);
};

template <class Isa, int L>
bool Activations<Isa, L>::pack(const void* x, Dtype dtype, int count, int group, int zero) {
  using Float = typename Isa::Float;
  using Int = typename Isa::Int;
  constexpr int lanes = Isa::lanes, limb_bits = Isa::limb_bits, bits = limb_bits * L < 24 ? limb_bits * L : 24;
  constexpr float top = float(127 << (bits - 8));  // every limb stays in its range
  const int item = dtype == Dtype::f32 ? 4 : 2;

  alignas(64) float values[chunk];
  Int peaks = {};  // the bits of |x|: as integers they are in the order of the numbers, infinities and NaNs at the end
  for (int k = 0; k < count; k += lanes) {
    const Float v = load_as<Isa>((const char*)x + k * item, dtype);
    const Int size = (Int)v & 0x7fffffff;
    peaks = size > peaks ? size : peaks;
    store(values + k, v);
  }
  if (count < chunk) memset(values + count, 0, (chunk - count) * sizeof(float));
  const int32_t peak_bits = Isa::reduce_max(peaks);
  const float peak = load<float>(&peak_bits);
  if (!(peak <= 3.4028235e38f) || (peak > 0 && peak < 1e-30f)) return false;

  scale = peak / top;
  const float inverse = peak > 0 ? top / peak : 0;
  // Moved up by half a unit of each limb but the first, q has its limbs as they are, those moved up as well.
  constexpr int half_limb = 1 << (limb_bits - 1), up = L == 1   ? 0
                                                       : L == 2 ? half_limb
                                                                : half_limb << limb_bits | half_limb;
  for (int k = 0; k < chunk; k += lanes) {
    const Int q = Isa::round(load<Float>(values + k) * inverse) + up;
    for (int l = 0; l < L; ++l) Isa::store_limbs(limbs[l] + k, (q >> (limb_bits * (L - 1 - l))) ^ (l ? half_limb : 0));
  }
  sum_groups(group, zero);
  return true;
}

template <class Isa, int L>
void Activations<Isa, L>::sum_groups(int group, int zero) {
  alignas(64) int32_t sums[most_groups], total[most_groups] = {};
  for (int l = 0; l < L; ++l) {
    Isa::sums_of_16(limbs[l], sums);
    if (group == 32)
      for (int g = 0; g < most_groups / 2; ++g) sums[g] = sums[2 * g] + sums[2 * g + 1];
    for (int g = 0; g < most_groups; ++g) {
      start[l][g] = -zero * sums[g];
      total[g] = (total[g] << Isa::limb_bits) + sums[g];
    }
  }
  for (int g = 0; g < most_groups; ++g) sum[g] = float(total[g]);
}

}  // namespace qgemv::cpu
