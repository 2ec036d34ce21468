// A stand-in for Apple's <metal_stdlib>, with which clang compiles kernels for an NVIDIA GPU: another machine whose 32
// lanes go together. Types and mathematics are the simulated device's (tests/metal_sim/msl); what lanes do together is
// in lanes.h.
#pragma once

// Pointers are generic. Where they come from is told (entry.h, nvptx.py), so that LLVM finds their address spaces.
#define device
#define thread
#define constant const
#define threadgroup
#define MSL_GLOBAL __attribute__((address_space(1)))
#define MSL_SHARED __attribute__((address_space(3)))

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

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""h(unsigned long long x) { return (half)x; }
constexpr bfloat operator"" bf(long double x) { return (bfloat)(float)x; }

#include "type_traits.h"
#include "vectors.h"
#include "math.h"
// Behind what it needs.
#include "lanes.h"
#include "simdgroup_matrix.h"
#include "entry.h"
// Last, for its macros float4(...) and the like hide the types' names where a bracket follows.
#include "constructors.h"

using metal::as_type;

#define kernel static  // what is launched is made by MSL_ENTRY
