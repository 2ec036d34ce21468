// How a kernel is entered. All kernels have the same two arguments here: the device pointers that Metal binds as
// buffers, and the bytes that it binds as parameters. msl_enter hands them, and what the lane is, to the kernel.
#pragma once
#include "../../metal_sim/runtime/kernel_abi.h"  // MslId

struct MslBuffers {
  MSL_GLOBAL uchar* at[13];
};
struct alignas(16) MslBytes {
  uchar bytes[160];
};

#define MSL_ENTRY extern "C" __attribute__((nvptx_kernel))

MSL_INLINE uint3 msl_id(MslId id) {
#define MSL_REGISTER(name)                                                             \
  uint3 {                                                                              \
    (uint) __nvvm_read_ptx_sreg_##name##_x(), (uint)__nvvm_read_ptx_sreg_##name##_y(), \
        (uint)__nvvm_read_ptx_sreg_##name##_z()                                        \
  }
  const uint3 size = MSL_REGISTER(ntid);
  const uint simdgroups = (size.x * size.y * size.z + 31) / 32;
  switch (id) {
    case thread_index_in_simdgroup:
      return uint3{metal::msl_lane()};
    case simdgroup_index_in_threadgroup:
      return uint3{metal::msl_thread() / 32};
    case thread_index_in_threadgroup:
      return uint3{metal::msl_thread()};
    case simdgroups_per_threadgroup:
    case dispatch_simdgroups_per_threadgroup:
      return uint3{simdgroups};
    case threads_per_simdgroup:
    case thread_execution_width:
      return uint3{32};
    case threadgroup_position_in_grid:
      return MSL_REGISTER(ctaid);
    case thread_position_in_threadgroup:
      return MSL_REGISTER(tid);
    case thread_position_in_grid:
      return MSL_REGISTER(ctaid) * size + MSL_REGISTER(tid);
    case threads_per_threadgroup:
    case dispatch_threads_per_threadgroup:
      return size;
    case threadgroups_per_grid:
      return MSL_REGISTER(nctaid);
    case threads_per_grid:
      return MSL_REGISTER(nctaid) * size;
    default:
      __builtin_unreachable();
  }
#undef MSL_REGISTER
}

// One argument of a kernel; index: of the buffer, or an MslId. A kernel may ask for fewer components of a position.
template <typename P>
MSL_INLINE P msl_argument(const MslBuffers& buffers, const MslBytes& bytes, int index) {
  if constexpr (__is_pointer(P)) {
    return (P)buffers.at[index];
  } else if constexpr (__is_lvalue_reference(P)) {
    static_assert(sizeof(__remove_reference_t(P)) <= sizeof bytes.bytes, "parameters of 160 bytes at most");
    return *(__remove_reference_t(P)*)bytes.bytes;
  } else {
    const uint3 id = msl_id((MslId)index);
    using E = metal::element_t<P>;
    if constexpr (metal::vector_traits<P>::size == 3)
      return P{(E)id.x, (E)id.y, (E)id.z};
    else if constexpr (metal::vector_traits<P>::size == 2)
      return P{(E)id.x, (E)id.y};
    else
      return (P)id.x;
  }
}

template <auto fn>
struct MslCall;
template <typename... P, void (*fn)(P...)>
struct MslCall<fn> {
  template <int... index>
  static inline __attribute__((always_inline)) void enter(const MslBuffers& buffers, const MslBytes& bytes) {
    static_assert(sizeof...(P) == sizeof...(index), "translate.py misread the kernel's parameters");
    fn(msl_argument<P>(buffers, bytes, index)...);
  }
};
