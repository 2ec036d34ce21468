// Kernels that find out, once a process, whether the GPU is as the others assume. One SIMD-group each.
#include "place.h"

namespace qgemv {

// Whether each lane's elements of an 8x8 matrix are those that Place says: 1 or 0.
kernel void lane_order(device float* known [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float numbers[64];
  numbers[lane] = float(lane);
  numbers[lane + 32] = float(lane + 32);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> matrix;
  simdgroup_load(matrix, numbers, 8);
  const Place place(lane);
  const float first = float(8 * place.row + place.column);
  known[lane] = matrix.thread_elements()[0] == first && matrix.thread_elements()[1] == first + 1.0f ? 1.0f : 0.0f;
}

}  // namespace qgemv
