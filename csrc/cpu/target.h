// Code between BEGIN and END is compiled for the named instruction sets, whatever the compiler's own flags are. All
// system headers must be included before, here, so that what they define keeps the flags of the rest of the library.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define QGEMV_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define QGEMV_TARGET_BEGIN(isa) QGEMV_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define QGEMV_TARGET_END QGEMV_PRAGMA(clang attribute pop)
#else
// GCC's own AVX-512 intrinsics start from undefined vectors, which it then warns about (its bug 105593).
#define QGEMV_TARGET_BEGIN(isa)                                                            \
  _Pragma("GCC push_options") QGEMV_PRAGMA(GCC target(isa)) _Pragma("GCC diagnostic push") \
      _Pragma("GCC diagnostic ignored \"-Wmaybe-uninitialized\"")                          \
          _Pragma("GCC diagnostic ignored \"-Wuninitialized\"")
// Nothing is popped: GCC compiles lambdas of templates at the end of the file, with the options of that place.
#define QGEMV_TARGET_END
#endif
