// Nothing but multiply-adds, for any instruction set: the ceiling of arithmetic in the benchmark's roofline.
#pragma once
#include <cstdint>

namespace qgemv::cpu {

// Returns how many floating-point operations it made.
template <class Isa>
double fma_rate(int64_t passes, float* out) {
  using Float = typename Isa::Float;
  constexpr int chains = 10, each = 8;  // chains that don't wait for each other: as many as there are in flight
  const Float factor = 0.999f - Float{}, term = 0.001f - Float{};
  Float sum[chains];
#pragma GCC unroll 10
  for (int c = 0; c < chains; ++c) sum[c] = float(c) - Float{};
  for (int64_t pass = 0; pass < passes; ++pass) {
#pragma GCC unroll 8
    for (int i = 0; i < each; ++i) {
#pragma GCC unroll 10
      for (int c = 0; c < chains; ++c) sum[c] = Isa::fma(sum[c], factor, term);
    }
  }
  Float all{};
#pragma GCC unroll 10
  for (int c = 0; c < chains; ++c) all += sum[c];
  *out = all[0];
  return 2.0 * chains * each * Isa::lanes * double(passes);
}

}  // namespace qgemv::cpu
