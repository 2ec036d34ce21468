#define QGEMV_UNROLL_BLOCK(n)
#include "linear.h"
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

void dequantize_row(const Weight& w, int64_t n, Dtype dtype, void* out) {
  with_format<Portable>(w.quant_type, [&](auto format) {
    using F = decltype(format);
    const auto* blocks = (const typename F::Block*)(w.data + n * w.row_stride);
    const int item = dtype == Dtype::f32 ? 4 : 2;
    float values[F::block_size];
    for (int64_t b = 0; b < w.K / F::block_size; ++b) {
      for (int c = 0; c < F::block_size / chunk_size; ++c) decode<F>(blocks[b], c, values + c * chunk_size);
      from_float(values, dtype, F::block_size, (char*)out + b * F::block_size * item);
    }
  });
}

void linear_exact(const Weight& w, const float* x, const float* bias, float* y, int64_t begin, int64_t end) {
  with_format<Portable>(w.quant_type, [&](auto format) {
    using F = decltype(format);
    for (int64_t n = begin; n < end; ++n) {
      const auto* blocks = (const typename F::Block*)(w.data + n * w.row_stride);
      double sum = 0;
      float values[chunk_size];
      for (int64_t k = 0; k < w.K; k += chunk_size) {
        decode<F>(blocks[k / F::block_size], int(k % F::block_size / chunk_size), values);
        for (int i = 0; i < chunk_size; ++i) sum += double(values[i]) * double(x[k + i]);
      }
      y[n] = float(bias ? sum + double(bias[n]) : sum);
    }
  });
}

}  // namespace qgemv::cpu
