#include <cstddef>
#include <cstring>

#define QGEMV_UNROLL_BLOCK(n)
#include "make_kernels.h"
#include "simd_portable.h"

namespace qgemv::cpu {

const Kernels portable = make_kernels<Portable>("portable", [] { return true; });

void to_float(const void* from, Dtype dtype, int64_t count, float* to) {
  if (dtype == Dtype::f32) {
    memcpy(to, from, sizeof(float) * count);
    return;
  }
  const auto* p = (const uint16_t*)from;
  for (int64_t i = 0; i < count; ++i) to[i] = dtype == Dtype::f16 ? half_to_float({p[i]}) : bf16_to_float(p[i]);
}

void from_float(const float* from, Dtype dtype, int64_t count, void* to) {
  if (dtype == Dtype::f32) {
    memcpy(to, from, sizeof(float) * count);
    return;
  }
  auto* out = (uint16_t*)to;
  for (int64_t i = 0; i < count; ++i) out[i] = dtype == Dtype::f16 ? float_to_half(from[i]) : float_to_bf16(from[i]);
}

void deinterleave_row(const Weight& w, int64_t n, uint8_t* out) {
  with_format<Portable>(w.quant_type, [&](auto format) {
    using F = decltype(format);
    for (int64_t b = 0; b < w.K / F::block_size; ++b) {
      typename F::Block copy;
      const typename F::Block& block = block_of<F>(w, n, b, copy);
      memcpy(out + b * sizeof block, &block, sizeof block);
    }
  });
}

void linear_exact(const Weight& w, const float* x, const float* bias, float* y, int64_t begin, int64_t end) {
  with_format<Portable>(w.quant_type, [&](auto format) {
    using F = decltype(format);
    for (int64_t n = begin; n < end; ++n) {
      double sum = 0;
      float values[chunk_size];
      for (int64_t b = 0; b < w.K / F::block_size; ++b) {
        typename F::Block copy;
        const typename F::Block& block = block_of<F>(w, n, b, copy);
        for (int k = 0; k < F::block_size; k += chunk_size) {
          decode<F>(block, k / chunk_size, values);
          for (int i = 0; i < chunk_size; ++i) sum += double(values[i]) * double(x[b * F::block_size + k + i]);
        }
      }
      y[n] = float(bias ? sum + double(bias[n]) : sum);
    }
  });
}

}  // namespace qgemv::cpu
