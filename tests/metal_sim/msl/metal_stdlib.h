// A stand-in for Apple's <metal_stdlib>, enough to compile kernels with clang and run them on the CPU. An unknown name
// is a compile error, and the place to add it is one of the headers included at the end.
#pragma once

// Address spaces: the host has one. (That `device` and `thread` are not mixed up has to be checked elsewhere, by type.)
#define device
#define thread
#define constant const
#define threadgroup
#define kernel

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define INFINITY __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX ((half)65504.0f)
#define INT_MAX __INT_MAX__
#define UINT_MAX (2u * __INT_MAX__ + 1u)
#define M_PI_F 3.14159274101257324219f

#define MSL_INLINE static inline __attribute__((always_inline))
// For functions of the stand-in that read memory which is no kernel's business. Never inlined: the attribute belongs
// to a whole function, and __builtin_return_address(0) is then the kernel's line.
#define MSL_UNCHECKED static __attribute__((noinline, no_sanitize("kernel-address", "undefined")))

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)(float)x; }

// In the order of their needs; constructors.h is last, for its macros float4(...) and the like hide
// the types' names where a bracket follows.
#include "type_traits.h"
#include "vectors.h"
#include "math.h"
#include "simdgroup.h"
#include "simdgroup_matrix.h"
#include "atomics.h"
#include "constructors.h"

using metal::as_type;
