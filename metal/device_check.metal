// Kernels that find out, once a process, whether the GPU is as the others assume. One SIMD-group each.
#include "place.h"
#include "storage.h"

namespace qgemv {

// Whether codes arrive whole, by the way on which the kernels take them: 1, 2, 4 and 8 times the bytes of each word.
kernel void weigh_bytes(device const uint* codes [[buffer(0)]], device float* sums [[buffer(1)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  const float x[4] = {1.0f, 2.0f, 4.0f, 8.0f};
  sums[lane] = dot_bytes(codes[lane], x, 0.0f) * tiny_unit;
}

// Whether each lane's elements of an 8x8 matrix of 0..63 are those that Place says: 1 or 0.
kernel void lane_order(device const uint* numbers [[buffer(0)]], device float* known [[buffer(1)]],
                       uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float elements[64];
  elements[lane] = float(numbers[lane]);
  elements[lane + 32] = float(numbers[lane + 32]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> matrix;
  simdgroup_load(matrix, elements, 8);
  const Place place(lane);
  const float first = float(8 * place.row + place.column);
  known[lane] = matrix.thread_elements()[0] == first && matrix.thread_elements()[1] == first + 1.0f ? 1.0f : 0.0f;
}

}  // namespace qgemv
