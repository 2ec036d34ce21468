// Barriers and SIMD-group operations. Each lane is a fiber of the simulator; msl_gather suspends it until the others
// have arrived and then shows it all 32 values. Vectors of up to 16 bytes pass as a whole.
#pragma once
#include "../runtime/kernel_abi.h"

namespace metal {

template <typename T>
MSL_INLINE MslSlot to_slot(T v) {
  static_assert(sizeof(T) <= sizeof(MslSlot), "too large for a SIMD-group operation");
  MslSlot slot = {};
  __builtin_memcpy(&slot, &v, sizeof(T));
  return slot;
}
template <typename T>
MSL_UNCHECKED T from_slot(const MslSlot& slot) {
  T v;
  __builtin_memcpy(&v, &slot, sizeof(T));
  return v;
}

#define MSL_PLACE __builtin_return_address(0)

// Combines the lanes' values pairwise, halving each time: every lane gets the same, deterministic result.
// (Apple does not document its order of summation.)
template <typename T, typename Fn>
MSL_UNCHECKED T reduce(T v, const char* name, int line, void* place, Fn fn) {
  const MslSlot* slots = msl_gather(to_slot(v), name, line, place);
  const uint active = msl_active_lanes();
  T all[32];
  for (uint i = 0; i < active; ++i) all[i] = from_slot<T>(slots[i]);
  for (uint step = 16; step > 0; step /= 2)
    for (uint i = 0; i < step; ++i)
      if (i + step < active) all[i] = fn(all[i], all[i + step]);
  return all[0];
}

#define MSL_REDUCTION(name, expression)                                               \
  template <typename T>                                                               \
  MSL_UNCHECKED T name(T v, int line = __builtin_LINE()) {                            \
    return reduce(v, #name, line, MSL_PLACE, [](T a, T b) { return T(expression); }); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION

// `from` is the lane whose value this one gets; past the last lane, MSL leaves a lane its own value.
#define MSL_SHUFFLE(name, from)                                            \
  template <typename T>                                                    \
  MSL_UNCHECKED T name(T v, ushort n, int line = __builtin_LINE()) {       \
    const MslSlot* slots = msl_gather(to_slot(v), #name, line, MSL_PLACE); \
    const uint lane = msl_lane(), source = (from);                         \
    return from_slot<T>(slots[source < 32 ? source : lane]);               \
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
MSL_UNCHECKED T simd_broadcast_first(T v, int line = __builtin_LINE()) {
  return from_slot<T>(msl_gather(to_slot(v), "simd_broadcast_first", line, MSL_PLACE)[0]);
}

template <typename T, bool inclusive>
MSL_UNCHECKED T prefix_sum(T v, const char* name, int line, void* place) {
  const MslSlot* slots = msl_gather(to_slot(v), name, line, place);
  T sum = T(0);
  for (uint i = 0; i < msl_lane() + inclusive; ++i) sum = T(sum + from_slot<T>(slots[i]));
  return sum;
}
template <typename T>
MSL_UNCHECKED T simd_prefix_inclusive_sum(T v, int line = __builtin_LINE()) {
  return prefix_sum<T, true>(v, "simd_prefix_inclusive_sum", line, MSL_PLACE);
}
template <typename T>
MSL_UNCHECKED T simd_prefix_exclusive_sum(T v, int line = __builtin_LINE()) {
  return prefix_sum<T, false>(v, "simd_prefix_exclusive_sum", line, MSL_PLACE);
}

MSL_UNCHECKED bool simd_any(bool v, int line = __builtin_LINE()) {
  return reduce(v, "simd_any", line, MSL_PLACE, [](bool a, bool b) { return a || b; });
}
MSL_UNCHECKED bool simd_all(bool v, int line = __builtin_LINE()) {
  return reduce(v, "simd_all", line, MSL_PLACE, [](bool a, bool b) { return a && b; });
}
MSL_INLINE bool simd_is_first() { return msl_lane() == 0; }

enum class mem_flags {
  mem_none = 0,
  mem_device = msl_device_flag,
  mem_threadgroup = msl_threadgroup_flag,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }

MSL_UNCHECKED void threadgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  msl_threadgroup_barrier((int)flags, line, MSL_PLACE);
}
MSL_UNCHECKED void simdgroup_barrier(mem_flags flags, int line = __builtin_LINE()) {
  msl_simdgroup_barrier((int)flags, line, MSL_PLACE);
}

}  // namespace metal
