#pragma once
#include "q4_k.h"

namespace qgemv {

// Q5_K: as Q4_K, and each lane reads the 16 bytes of fifth bits of its weights' places in their groups, of which it
// needs two bits each. Turned by a lane's own number of places, these lie in places 4 and 5 of each byte.
//
//   block   | d dmin | scales |  fifth bits   | groups 0, 1 | groups 2, 3 | groups 4, 5 | groups 6, 7 |
//   byte     0        4        16      32      48     64     80     96     112    128    144    160   176
//   lane      all      all     | even  |  odd  |  0   |  1   |  2   |  3   |  4   |  5   |  6   |  7   |
//   its x, low nibbles                          0..    16..   64..   80..   128..  144..  192..  208..    (16 each)
//   its x, high nibbles                         32..   48..   96..   112..  160..  176..  224..  240..
template <typename T, bool wide>
struct Lane<Q5_K, Aligned, T, wide> : PairOfGroups<T, pair_weights(wide)> {
  using Base = PairOfGroups<T, pair_weights(wide)>;
  struct Data {
    PairScales::Data scales;
    uint4 q[Base::words4], fifth[Base::words4];
  };
  uint turn;

  Lane(int s, threadgroup const uint*) : Base(s), turn((36 - 2 * (s / Base::parts)) % 32) {}

  Data fetch(device const uchar* block) const {
    device const uint4* qh = (device const uint4*)(block + 16) + Base::words4 * Base::part;
    device const uint4* qs = (device const uint4*)(block + 48) + Base::words4 * Base::slot;
    Data data;
    data.scales = Base::scales.fetch(block);
#pragma unroll
    for (int i = 0; i < Base::words4; ++i) data.q[i] = qs[i], data.fifth[i] = qh[i];
    return data;
  }
  float2 dot(Data data) const {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * Base::words4; ++i) {
      const uint q = data.q[i / 4][i % 4], bits = rotate(data.fifth[i / 4][i % 4], turn);
      low = dot_bytes((q & 0x0f0f0f0fu) | (bits & 0x10101010u), Base::low + 4 * i, low);
      // Twice the code, so that the bit stays where it is.
      high = dot_bytes(((q >> 3) & 0x1e1e1e1eu) | (bits & 0x20202020u), Base::high + 4 * i, high);
    }
    return float2(low, high);
  }
  float add(Data data, float2 codes, float total) const {
    return Base::scales.add(data.scales, float2(codes.x * tiny_unit, codes.y * (tiny_unit / 2)), Base::x_sum, total);
  }
};

}  // namespace qgemv
