// The kernels dequantize_<format>_<type> and embedding_<format>_<type>, and those with _plain behind, of the format
// that the macro QGEMV_FORMAT names, for the type QGEMV_TYPE or for all. A thread makes 16 weights.
#pragma METAL fp contract(off)  // bit-equal to gguf: the product is rounded before the minimum is taken off
#include "storage.h"

namespace qgemv {

// Weights 16 * chunk .. 16 * chunk + 15 of a row.
template <typename F, typename S, typename T>
inline void decode_chunk(device const uchar* row, uint chunk, device T* out) {
  const uint chunks = F::block_size / chunk_size;
  float w[chunk_size];
  decode<F, S>(((device const Block<F, S>*)row)[chunk / chunks], int(chunk % chunks), w);
  device vec<T, 4>* to = (device vec<T, 4>*)(out + chunk * chunk_size);
  for (int i = 0; i < chunk_size / 4; ++i) {
    vec<T, 4> rounded;
    for (int j = 0; j < 4; ++j) rounded[j] = T(w[4 * i + j]);
    to[i] = rounded;
  }
}

// Grid: (K / 16, rows)
template <typename F, typename S, typename T>
kernel void dequantize(device const uchar* weight [[buffer(0)]], device T* out [[buffer(1)]],
                       constant DequantizeParams& p [[buffer(2)]], uint2 at [[thread_position_in_grid]]) {
  decode_chunk<F, S>(weight + ulong(at.y) * p.row_bytes, at.x, out + ulong(at.y) * p.K);
}

// Grid: (K / 16, indices). An index that is no row gives NaN: a kernel can't raise.
template <typename F, typename S, typename T>
kernel void embedding(device const uchar* weight [[buffer(0)]], device const uchar* indices [[buffer(1)]],
                      device T* out [[buffer(2)]], constant EmbeddingParams& p [[buffer(3)]],
                      uint2 at [[thread_position_in_grid]]) {
  const long index = index_at(indices, at.y, p.index_bytes);
  out += ulong(at.y) * p.K;
  if (index < 0 || index >= long(p.N)) {
    for (int i = 0; i < chunk_size; ++i) out[at.x * chunk_size + i] = T(NAN);
    return;
  }
  decode_chunk<F, S>(weight + ulong(index) * p.row_bytes, at.x, out);
}

#define INSTANTIATE(function, name, F, S, T) \
  template [[host_name(name)]] [[kernel]] decltype(function<F, S, T>) function<F, S, T>;
#define BOTH(function, F, T)                                    \
  INSTANTIATE(function, #function "_" #F "_" #T, F, Aligned, T) \
  INSTANTIATE(function, #function "_" #F "_" #T "_plain", F, Anywhere, T)
QGEMV_EACH_TYPE(BOTH, dequantize, QGEMV_FORMAT)
QGEMV_EACH_TYPE(BOTH, embedding, QGEMV_FORMAT)

}  // namespace qgemv
