// How a kernel is entered: translate.py writes one msl_add<&kernel>(...) per kernel, saying what each parameter is.
#pragma once

// Makes one argument from what the simulator hands over. A kernel may ask for fewer components of a position.
template <typename P>
MSL_INLINE P msl_argument(MslParameter p, const MslLane* lane) {
  if constexpr (__is_pointer(P)) {
    return (P)(p.kind == MslParameter::buffer_argument ? lane->buffers[p.index] : lane->threadgroup_memory[p.index]);
  } else if constexpr (__is_lvalue_reference(P)) {
    return *(__remove_reference_t(P)*)lane->buffers[p.index];
  } else {
    const uint* n = lane->ids[p.index];
    using E = metal::element_t<P>;
    if constexpr (metal::vector_traits<P>::size == 3)
      return P{(E)n[0], (E)n[1], (E)n[2]};
    else if constexpr (metal::vector_traits<P>::size == 2)
      return P{(E)n[0], (E)n[1]};
    else
      return (P)n[0];
  }
}

template <typename T, T... I>
struct msl_sequence {};

template <auto fn>
struct MslEntry;
template <typename... P, void (*fn)(P...)>
struct MslEntry<fn> {
  static constexpr int parameter_count = sizeof...(P);
  template <int... I>
  static void call(const MslLane* lane, msl_sequence<int, I...>) {
    fn(msl_argument<P>(lane->parameters[I], lane)...);
  }
  // The lane's arguments are not the kernel's memory, hence no checks here.
  static __attribute__((no_sanitize("kernel-address", "undefined"))) void run(const MslLane* lane) {
    call(lane, __make_integer_seq<msl_sequence, int, sizeof...(P)>{});
  }
};

template <auto fn, int count>
bool msl_add(const char* name, unsigned max_threads, const MslParameter (&parameters)[count]) {
  static_assert(MslEntry<fn>::parameter_count == count, "translate.py misread the kernel's parameters");
  msl_register({name, &MslEntry<fn>::run, parameters, count, max_threads});
  return true;
}
template <auto fn>
bool msl_add(const char* name, unsigned max_threads) {  // a kernel without parameters
  msl_register({name, &MslEntry<fn>::run, nullptr, 0, max_threads});
  return true;
}

// A variable in threadgroup memory. The tag's address is its key.
template <typename T, int id>
__attribute__((noinline)) T& msl_shared(const char* name) {
  static const char tag = 0;
  return *(T*)msl_threadgroup_variable(&tag, name, sizeof(T), alignof(T), __builtin_return_address(0));
}

#ifdef MSL_FLUSH_HALF_SUBNORMALS
// half to float on a device that takes subnormal halfs for 0. clang calls it without -mf16c.
extern "C" __attribute__((used, weak, visibility("hidden"), no_sanitize("undefined"))) float __extendhfsf2(half h) {
  const uint bits = __builtin_bit_cast(ushort, h), magnitude = bits & 0x7fff, sign = (bits & 0x8000) << 16;
  if (magnitude < 0x400) return __builtin_bit_cast(float, sign);
  const uint exponent = magnitude < 0x7c00 ? 0x38000000 : 0x70000000;  // infinity and NaN keep theirs full
  return __builtin_bit_cast(float, sign | ((magnitude << 13) + exponent));
}
#endif

// float to bfloat, rounded to nearest, ties to even. clang calls it where the processor has no such instruction; GCC's
// runtime has it only since version 13.
extern "C" __attribute__((used, weak, visibility("hidden"), no_sanitize("undefined"))) bfloat __truncsfbf2(float f) {
  uint bits = __builtin_bit_cast(uint, f);
  bits = f != f ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
  return __builtin_bit_cast(bfloat, (ushort)(bits >> 16));
}
