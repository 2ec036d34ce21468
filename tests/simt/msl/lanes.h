// What the lanes of a SIMD-group or a threadgroup do together, by NVIDIA's shuffles and barriers. A SIMD-group is a
// warp, a threadgroup a block.
#pragma once

namespace metal {

MSL_INLINE uint msl_thread() {  // index in the threadgroup
  return __nvvm_read_ptx_sreg_tid_x() +
         __nvvm_read_ptx_sreg_ntid_x() *
             (__nvvm_read_ptx_sreg_tid_y() + __nvvm_read_ptx_sreg_ntid_y() * __nvvm_read_ptx_sreg_tid_z());
}
MSL_INLINE uint msl_lane() { return __nvvm_read_ptx_sreg_laneid(); }
constexpr uint msl_all_lanes = 0xffffffffu;

// The value that lane `source` hands over, 32 bits at a time.
template <typename T>
MSL_INLINE T msl_from_lane(T v, uint source) {
  uint words[(sizeof(T) + 3) / 4] = {};
  __builtin_memcpy(words, &v, sizeof(T));
  for (uint& word : words) word = (uint)__nvvm_shfl_sync_idx_i32(msl_all_lanes, (int)word, (int)source, 31);
  __builtin_memcpy(&v, words, sizeof(T));
  return v;
}

// `from` is the lane whose value this one gets; past the last lane, MSL leaves a lane its own value.
#define MSL_SHUFFLE(name, from)                           \
  template <typename T>                                   \
  MSL_INLINE T name(T v, ushort n) {                      \
    const uint lane = msl_lane(), source = (from);        \
    return msl_from_lane(v, source < 32 ? source : lane); \
  }
MSL_SHUFFLE(simd_shuffle, n)
MSL_SHUFFLE(simd_shuffle_xor, lane ^ n)
MSL_SHUFFLE(simd_shuffle_down, lane + n)
MSL_SHUFFLE(simd_shuffle_up, lane - n)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + n) % 32)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane + 32 - n % 32) % 32)
MSL_SHUFFLE(simd_broadcast, n)
MSL_SHUFFLE(quad_shuffle, lane / 4 * 4 + n % 4)
MSL_SHUFFLE(quad_shuffle_xor, lane ^ (n & 3))
MSL_SHUFFLE(quad_broadcast, lane / 4 * 4 + n % 4)
#undef MSL_SHUFFLE
template <typename T>
MSL_INLINE T simd_broadcast_first(T v) {
  return msl_from_lane(v, 0);
}

// Pairwise, halving each time: every lane gets the same result.
#define MSL_REDUCTION(name, lanes, expression)         \
  template <typename T>                                \
  MSL_INLINE T name(T a) {                             \
    for (uint step = lanes / 2; step > 0; step /= 2) { \
      const T b = msl_from_lane(a, msl_lane() ^ step); \
      a = T(expression);                               \
    }                                                  \
    return a;                                          \
  }
MSL_REDUCTION(simd_sum, 32, a + b)
MSL_REDUCTION(simd_product, 32, a* b)
MSL_REDUCTION(simd_max, 32, max(a, b))
MSL_REDUCTION(simd_min, 32, min(a, b))
MSL_REDUCTION(simd_and, 32, a& b)
MSL_REDUCTION(simd_or, 32, a | b)
MSL_REDUCTION(simd_xor, 32, a ^ b)
MSL_REDUCTION(quad_sum, 4, a + b)
#undef MSL_REDUCTION

MSL_INLINE bool simd_any(bool v) { return simd_or((uint)v); }
MSL_INLINE bool simd_all(bool v) { return simd_and((uint)v); }
MSL_INLINE bool simd_is_first() { return msl_lane() == 0; }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
MSL_INLINE void threadgroup_barrier(mem_flags) { __syncthreads(); }
MSL_INLINE void simdgroup_barrier(mem_flags) { __nvvm_bar_warp_sync(msl_all_lanes); }

}  // namespace metal
