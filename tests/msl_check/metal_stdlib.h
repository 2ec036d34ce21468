// A stand-in for Apple's <metal_stdlib> in C++ for OpenCL, which has MSL's address spaces. Kernels are type-checked and
// counted with it, not run: what lanes do together is declared only. Scalar and vector functions are the simulated
// device's (../metal_sim/msl).
#pragma once

#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION cl_khr_fp64 : enable  // for the stand-in; kernels that say "double" are refused

#define device __global
#define thread __private
#define threadgroup __local
#define constant __constant

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

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)(float)x; }

#include "type_traits.h"
#include "vectors.h"
// decltype of a variable names its address space.
template <typename T>
struct metal::vector_traits<thread T> : metal::vector_traits<T> {};
#include "math.h"
// Behind what it needs.
#include "lanes.h"
// Last, for its macros float4(...) and the like hide the types' names where a bracket follows.
#include "constructors.h"

using metal::as_type;
