// Relaxed atomics. The simulator runs one fiber at a time, so plain operations do; what matters is that the race check
// lets them pass.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed };

template <typename T>
struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;

template <typename T>
MSL_UNCHECKED T atomic_load_explicit(const volatile atomic<T>* a, memory_order) {
  msl_atomic_access((void*)a, sizeof(T), MSL_PLACE);
  return a->value;
}
template <typename T, typename V>
MSL_UNCHECKED void atomic_store_explicit(volatile atomic<T>* a, V v, memory_order) {
  msl_atomic_access((void*)a, sizeof(T), MSL_PLACE);
  a->value = (T)v;
}
#define MSL_ATOMIC(name, expression)                               \
  template <typename T, typename V>                                \
  MSL_UNCHECKED T name(volatile atomic<T>* a, V v, memory_order) { \
    msl_atomic_access((void*)a, sizeof(T), MSL_PLACE);             \
    const T old = a->value, operand = (T)v;                        \
    a->value = expression;                                         \
    return old;                                                    \
  }
MSL_ATOMIC(atomic_exchange_explicit, operand)
MSL_ATOMIC(atomic_fetch_add_explicit, old + operand)
MSL_ATOMIC(atomic_fetch_sub_explicit, old - operand)
MSL_ATOMIC(atomic_fetch_min_explicit, min(old, operand))
MSL_ATOMIC(atomic_fetch_max_explicit, max(old, operand))
MSL_ATOMIC(atomic_fetch_and_explicit, old& operand)
MSL_ATOMIC(atomic_fetch_or_explicit, old | operand)
MSL_ATOMIC(atomic_fetch_xor_explicit, old ^ operand)
#undef MSL_ATOMIC

}  // namespace metal
