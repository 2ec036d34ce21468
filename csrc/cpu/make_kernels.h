// The entries of Kernels for one instruction set.
#pragma once
#include "encode.h"
#include "fma_rate.h"
#include "linear.h"
#include "rows.h"
#include "transposed.h"

namespace qgemv::cpu {

template <int L>
struct Limbs {
  constexpr int operator()() const { return L; }
};

// fn(F{}) for the format F of this id; the operators have checked that there is one.
template <class V, class Fn>
inline void with_format(int64_t quant_type, Fn fn) {
  switch (quant_type) {
#define QGEMV_CASE(F) \
  case F::id:         \
    return fn(F{});
    QGEMV_FORMATS(QGEMV_CASE)
#undef QGEMV_CASE
  }
}

// fn(number of limbs, as a constant)
template <class V, class Fn>
inline auto with_limbs(Dtype dtype, Fn fn) {
  if (activation_bits(dtype) == 16) return fn(Limbs<limb_count<typename V::Isa>(16)>());
  return fn(Limbs<limb_count<typename V::Isa>(24)>());
}

template <class V>
size_t activation_bytes(Dtype dtype) {
  return with_limbs<V>(dtype, [](auto limbs) { return sizeof(Activations<typename V::Isa, limbs()>); });
}

template <class V>
bool pack(const Weight& w, const void* x, Dtype dtype, int64_t token, int64_t tokens, void* activations) {
  int group = 0, zero = 0;
  with_format<V>(w.quant_type, [&](auto format) {
    using F = decltype(format);
    group = F::group, zero = F::template zero<V>();
  });
  return with_limbs<V>(dtype, [&](auto limbs) {
    auto* out = (Activations<typename V::Isa, limbs()>*)activations + token;
    const int item = dtype == Dtype::f32 ? 4 : 2;
    bool regular = true;
    for (int64_t k = 0; k < w.K; k += chunk, out += tokens) {
      const int count = w.K - k < chunk ? int(w.K - k) : chunk;
      regular &= out->pack((const char*)x + k * item, dtype, count, group, zero);
    }
    return regular;
  });
}

template <class V>
void linear(const LinearArgs& args, int64_t begin, int64_t end) {
  with_format<V>(args.weight.quant_type, [&](auto format) {
    using F = decltype(format);
    with_limbs<V>(args.dtype, [&](auto limbs) { linear_panels<V, F, limbs()>(args, begin, end); });
  });
}

template <class V>
void dequantize(const Weight& w, int64_t n, int64_t first, int64_t count, Dtype dtype, void* out) {
  with_format<V>(w.quant_type,
                 [&](auto format) { dequantize_row<V, decltype(format)>(w, n, first, count, dtype, out); });
}

template <class V>
void interleave(const Weight& w, int64_t begin, int64_t end, uint8_t* out) {
  with_format<V>(w.quant_type, [&](auto format) { interleave_panels<V, decltype(format)>(w, begin, end, out); });
}

template <class V>
int64_t quantize(const QuantizeArgs& args, int64_t begin, int64_t end) {
  int64_t refused = -1;
  with_format<V>(args.quant_type, [&](auto format) { refused = encode<V, decltype(format)>(args, begin, end); });
  return refused;
}

template <class V>
uint32_t read(const uint8_t* data, int64_t bytes) {
  using Word = typename V::Isa::Word;
  constexpr int64_t size = sizeof(Word), streams = 8;
  Word sum[streams] = {};
  for (int64_t i = 0; i + streams * size <= bytes; i += streams * size) {
    for (int64_t line = 0; line < streams * size; line += 64) __builtin_prefetch(data + i + 4096 + line, 0, 3);
#pragma GCC unroll 8
    for (int s = 0; s < streams; ++s) sum[s] ^= load<Word>(data + i + s * size);
  }
  uint32_t all = 0;
  for (int s = 0; s < streams; ++s)
    for (int lane = 0; lane < V::lanes; ++lane) all ^= sum[s][lane];
  for (int64_t i = bytes - bytes % (streams * size); i < bytes; ++i) all ^= uint32_t(data[i]) << (i % 4 * 8);
  return all;
}

template <class Isa>
constexpr Kernels make_kernels(const char* name, bool (*supported)()) {
  using V = Vectors<Isa>;
  return {name,         supported,      &activation_bytes<V>, &pack<V>,
          &linear<V>,   &dequantize<V>, &add_products<Isa>,   &interleave<V>,
          &quantize<V>, &read<V>,       &fma_rate<Isa>};
}

}  // namespace qgemv::cpu
