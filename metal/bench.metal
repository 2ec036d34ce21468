// Kernels that the benchmark measures with, and one that it measures against. No operator uses them.
#include "bench.h"
#include "storage.h"

namespace qgemv {

// Reads every byte once, 16 at a time where they fill 16. Each SIMD-group writes the sum of what it read.
kernel void read(device const uchar* bytes [[buffer(0)]], device uint* sums [[buffer(1)]],
                 constant ReadParams& p [[buffer(2)]], uint at [[thread_position_in_grid]],
                 uint threads [[threads_per_grid]], uint lane [[thread_index_in_simdgroup]]) {
  device const uint4* vectors = (device const uint4*)bytes;
  const ulong count = p.bytes / 16;
  uint4 sum = uint4(0u);
  ulong i = at;
  for (; i + 3 * ulong(threads) < count; i += 4 * ulong(threads)) {  // four loads in flight
    const uint4 a = vectors[i], b = vectors[i + threads], c = vectors[i + 2 * ulong(threads)],
                d = vectors[i + 3 * ulong(threads)];
    sum += (a + b) + (c + d);
  }
  for (; i < count; i += threads) sum += vectors[i];
  uint total = (sum.x + sum.y) + (sum.z + sum.w);
  if (at < p.bytes % 16) total += bytes[16 * count + at];
  total = simd_sum(total);
  if (lane == 0) sums[at / simd_width] = total;
}

// As many multiply-adds as the parameters say, with nothing else to wait for.
kernel void fma_rate(device float* sums [[buffer(0)]], constant FmaParams& p [[buffer(1)]],
                     uint at [[thread_position_in_grid]]) {
  float chains[fma_chains];
#pragma unroll
  for (uint c = 0; c < fma_chains; ++c) chains[c] = float(at % 64) + float(c);
  for (uint pass = 0; pass < p.passes; ++pass) {
#pragma unroll
    for (uint i = 0; i < fma_per_pass; ++i) chains[i % fma_chains] = fma(chains[i % fma_chains], p.factor, p.term);
  }
  float sum = 0.0f;
#pragma unroll
  for (uint c = 0; c < fma_chains; ++c) sum += chains[c];
  sums[at] = sum;
}

// ---- The published mapping for Q4_K, as a baseline: y = x W^T for one row of x.
// Written from its description. llama.cpp, mlx-kquant and others share it: 2 SIMD-groups of 2 rows each; eight lanes a
// block, the lanes' blocks 4 apart; of these lanes four take groups 0, 1, 4, 5 and four groups 2, 3, 6, 7; a lane has 8
// weights of each of its four groups. Nibbles are masked where they lie and converted, powers of two undone once a
// group.
struct PublishedX {
  float low[2][8], high[2][8];  // of groups 2t, 4 + 2t in low nibbles; 2t + 1, 5 + 2t in high ones
  float4 sums;                  // of groups 2t, 2t + 1, 4 + 2t, 5 + 2t

  template <typename T>
  void load(device const T* x) {
    sums = float4(0.0f);
#pragma unroll
    for (uint half_block = 0; half_block < 2; ++half_block) {
#pragma unroll
      for (uint i = 0; i < 8; ++i) {
        low[half_block][i] = float(x[128 * half_block + i]);
        high[half_block][i] = float(x[128 * half_block + 32 + i]);
        sums[2 * half_block] += low[half_block][i];
        sums[2 * half_block + 1] += high[half_block][i];
      }
    }
  }
};

// The lane's part of the dot product with one block of one row.
inline float published_dot(thread const PublishedX& x, device const uchar* block, uint team, uint place) {
  device const ushort* scales = (device const ushort*)(block + 4) + team;
  const uint a = scales[0], b = scales[2], c = scales[4];  // two neighbouring groups' bytes each
  const uint scale01 = a & 0x3f3fu, scale45 = (c & 0x0f0fu) | ((a & 0xc0c0u) >> 2);
  const uint min01 = b & 0x3f3fu, min45 = ((c >> 4) & 0x0f0fu) | ((b & 0xc0c0u) >> 2);

  float4 products;
#pragma unroll
  for (uint half_block = 0; half_block < 2; ++half_block) {
    device const ushort* qs = (device const ushort*)(block + 16 + 64 * half_block + 32 * team) + 4 * place;
    float4 sums = float4(0.0f);  // even and odd bytes, low nibbles; the same, high nibbles
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
      const uint q = qs[i];
      sums.x = fma(x.low[half_block][2 * i], float(q & 0x000fu), sums.x);
      sums.y = fma(x.low[half_block][2 * i + 1], float(q & 0x0f00u), sums.y);
      sums.z = fma(x.high[half_block][2 * i], float(q & 0x00f0u), sums.z);
      sums.w = fma(x.high[half_block][2 * i + 1], float(q & 0xf000u), sums.w);
    }
    products[2 * half_block] = sums.x + sums.y * (1.0f / 256);
    products[2 * half_block + 1] = (sums.z + sums.w * (1.0f / 256)) * (1.0f / 16);
  }
  const half2 d = *(device const half2*)block;
  const float4 scale = float4(float(scale01 & 255u), float(scale01 >> 8), float(scale45 & 255u), float(scale45 >> 8));
  const float4 min = float4(float(min01 & 255u), float(min01 >> 8), float(min45 & 255u), float(min45 >> 8));
  return float(d.x) * dot(products, scale) - float(d.y) * dot(x.sums, min);
}

template <typename T>
kernel void published(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                      device T* y [[buffer(2)]], constant LinearParams& p [[buffer(3)]],
                      uint group [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
  const uint first = (group * published_simdgroups + simdgroup) * published_rows;
  if (first >= p.N) return;  // the whole SIMD-group leaves together
  const uint cohort = lane / 8, team = lane / 4 % 2, place = lane % 4, blocks = p.K / Q4_K::block_size;
  float total[published_rows] = {};
  for (uint b = cohort; b < blocks; b += 4) {
    PublishedX lane_x;
    lane_x.load(x + b * Q4_K::block_size + 64 * team + 8 * place);
#pragma unroll
    for (uint r = 0; r < published_rows; ++r) {
      const ulong row = min(first + r, p.N - 1);  // past the last row: that one
      total[r] += published_dot(lane_x, weight + row * p.row_bytes + b * sizeof(Q4_K::Block), team, place);
    }
  }
#pragma unroll
  for (uint r = 0; r < published_rows; ++r) {
    const float sum = simd_sum(total[r]);
    if (lane == 0 && first + r < p.N) y[first + r] = T(sum);
  }
}
template [[host_name("published_Q4_K_float")]] [[kernel]] decltype(published<float>) published<float>;
template [[host_name("published_Q4_K_half")]] [[kernel]] decltype(published<half>) published<half>;
template [[host_name("published_Q4_K_bfloat")]] [[kernel]] decltype(published<bfloat>) published<bfloat>;

}  // namespace qgemv
