// clang-format off
// What msl_check has to accept and to refuse. "// ---- accept NAME" or "// ---- refuse NAME: PART OF THE MESSAGE" starts a
// case; each is checked by itself, behind these lines.
#include <metal_stdlib>
using namespace metal;
#define KERNEL kernel void k(device float* d [[buffer(0)]], constant float& c [[buffer(1)]], ushort lane [[thread_index_in_simdgroup]])

// ---- accept thread pointer
KERNEL { float x = d[lane]; thread float* p = &x; d[lane] = *p + c; }
// ---- accept threadgroup memory
KERNEL {
  threadgroup float s[32];
  s[lane] = d[lane];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* q = s;
  d[lane] = q[31 - lane];
}
// ---- accept threadgroup memory in a template
template <typename T> kernel void k(device T* d [[buffer(0)]], ushort lane [[thread_index_in_simdgroup]]) {
  threadgroup T s[32];
  s[lane] = d[lane];
  d[lane] = T(simd_sum(float(s[lane])));
}
template [[host_name("k_half")]] [[kernel]] decltype(k<half>) k<half>;
template [[host_name("k_bfloat")]] [[kernel]] decltype(k<bfloat>) k<bfloat>;
// ---- accept pointers of two spaces
static float f(device const float* p, threadgroup float* t) { return p[0] + t[0]; }
KERNEL { threadgroup float s[32]; s[lane] = 0; d[lane] = f(d, s); }
// ---- accept a struct copied from device memory
struct B { half d; uchar q[16]; };
KERNEL { device const B* b = (device const B*)d; B t = b[lane]; d[lane] = float(b[lane].d) + t.q[0]; }
// ---- accept vectors
KERNEL {
  device const float4* v = (device const float4*)d;
  float4 a = v[lane];
  half4 h = half4(a);
  d[lane] = dot(a, float4(h)) + a.x + a.xy.y + float2(as_type<half2>(uint(lane))).y;
}
// ---- accept a method of a local
struct A { float x[4]; float first() const { return x[0]; } void set(thread const float* p) { x[0] = *p; } };
KERNEL { A a; float v = c; a.set(&v); d[lane] = a.first(); }
// ---- accept a method that passes its members on
static float sum(thread const float* p) { return p[0] + p[1]; }
struct A { float x[2]; template <typename T> float all(device const T* from) { x[0] = x[1] = from[0]; return sum(x); } };
KERNEL { A a; d[lane] = a.all(d); }
// ---- accept constants
static constant constexpr int table[2] = {1, 2};
struct A { static constant constexpr int n = 2; };
KERNEL { d[lane] = table[lane & 1] * A::n * 1.0; }
// ---- accept a lambda
KERNEL { auto twice = [](float x) { return 2 * x; }; d[lane] = twice(c); }
// ---- accept matrices
KERNEL {
  simdgroup_float8x8 a, b = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(a, d, 8);
  simdgroup_multiply_accumulate(b, a, a, b);
  simdgroup_store(b, d, 8);
}
// ---- accept atomics
kernel void k(device atomic_uint* n [[buffer(0)]]) { atomic_fetch_add_explicit(n, 1u, memory_order_relaxed); }

// ---- refuse thread pointer to device: cannot initialize
KERNEL { thread float* p = d; *p = 1; }
// ---- refuse local pointer to device: no address space
KERNEL { float* p = d; *p = 1; }
// ---- refuse parameter pointer: no address space
static float f(float* p) { return *p; }
KERNEL { float x = 1; d[0] = f(&x); }
// ---- refuse parameter pointer in a template: no address space
template <typename T> static T f(T* p) { return *p; }
KERNEL { float x = 1; d[0] = f(&x); }
// ---- refuse local pointer: no address space
KERNEL { float x = 1; float* p = &x; d[0] = *p; }
// ---- refuse parameter reference: no address space
static void f(float& p) { p = 1; }
KERNEL { float x = 1; f(x); d[0] = x; }
// ---- refuse local reference: no address space
KERNEL { float x = 1; const float& p = x; d[0] = p; }
// ---- refuse member pointer: no address space
struct A { float* p; };
KERNEL { d[0] = sizeof(A); }
// ---- refuse device to threadgroup: cannot initialize
KERNEL { threadgroup float* t = d; d[0] = t[0]; }
// ---- refuse cast between spaces: address space
KERNEL { thread float* t = (thread float*)d; d[0] = t[0]; }
// ---- refuse cast without a space: no address space
KERNEL { d[1] = *(float*)d; }
// ---- refuse reinterpret_cast between spaces: reinterpret_cast
KERNEL { thread uchar* t = reinterpret_cast<thread uchar*>(d); d[0] = t[0]; }
// ---- refuse device argument for a thread parameter in a template: no matching function
template <typename T> static T f(thread const T* p) { return *p; }
template <typename T> static T g(device const T* p) { return f(p); }
KERNEL { d[0] = g(d); }
// ---- refuse a method of a struct in device memory: 'this'
struct A { float x; float get() const { return x; } };
KERNEL { device const A* a = (device const A*)d; d[1] = a->get(); }
// ---- refuse a method of a struct in device memory, in a template: 'this'
struct A { float x; float get() const { return x; } };
template <typename T> static float f(device const T* a) { return a->get(); }
KERNEL { d[1] = f((device const A*)d); }
// ---- refuse a reference parameter bound to device memory: no matching function
static void f(thread float& p) { p = 1; }
KERNEL { f(d[0]); }
// ---- refuse write to constant: read-only
kernel void k(constant float* c [[buffer(0)]]) { c[0] = 1; }
// ---- refuse constant to device: cannot initialize
static float f(device const float* p) { return *p; }
kernel void k(constant float* c [[buffer(0)]], device float* d [[buffer(1)]]) { device const float* p = c; d[0] = f(p); }
// ---- refuse threadgroup memory in a helper: local address space
static float f(float x) { threadgroup float s[4]; s[0] = x; return s[0]; }
KERNEL { d[0] = f(c); }
// ---- refuse double: no double
KERNEL { double x = d[0]; d[1] = x; }
// ---- refuse long double literal: no long double
KERNEL { d[0] = d[1] * 1.0L; }
// ---- refuse recursion: recursion: f
static int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
KERNEL { d[0] = f(lane); }
// ---- refuse recursion by two: recursion: f
static int g(int n);
static int f(int n) { return n < 2 ? n : g(n - 1); }
static int g(int n) { return f(n); }
KERNEL { d[0] = f(lane); }
// ---- refuse virtual: no virtual
struct A { virtual float f() const { return 1; } };
KERNEL { A a; d[0] = a.f(); }
// ---- refuse function pointer: function
static float g(float x) { return x; }
KERNEL { float (*f)(float) = g; d[0] = f(c); }
// ---- refuse new: new
KERNEL { d[0] = *new float(1); }
// ---- refuse goto: no goto
KERNEL { again: d[0] += 1; if (d[0] < 3) goto again; }
// ---- refuse throw: exceptions
KERNEL { if (lane > 99) throw 1; d[0] = 1; }
// ---- refuse thread_local: thread_local
KERNEL { static thread_local int x; d[0] = x; }
// ---- refuse mutable global: constant address space
static float g = 1;
KERNEL { g += 1; d[0] = g; }
// ---- refuse constant global without its space: constant address space
static const float g = 1;
KERNEL { d[0] = g; }
// ---- refuse class constant without its space: constant address space
struct A { static constexpr int n = 1; };
KERNEL { d[0] = A::n; }
// ---- refuse address of a vector's element: address of vector element
KERNEL { float4 v = 0.0f; thread float* p = &v[1]; *p = 1; d[0] = v.y; }
// ---- refuse too few components: wrong number of components
KERNEL { float4 v = float4(1, 2, 3); d[0] = v.x; }
// ---- refuse unknown function: undeclared identifier
KERNEL { d[0] = simd_sumx(c); }
// ---- refuse kernel with a result: returns void
kernel float k(device float* d [[buffer(0)]]) { return d[0]; }
// ---- refuse parameter without attribute: without an attribute
kernel void k(device float* d [[buffer(0)]], ushort lane) { d[lane] = 1; }
// ---- refuse buffer twice: two kernel parameters are
kernel void k(device float* d [[buffer(0)]], device float* e [[buffer(0)]]) { d[0] = e[0]; }
// ---- refuse unknown attribute: not simulated
kernel void k(device float* d [[buffer(0)]], ushort lane [[thread_index_in_simd]]) { d[lane] = 1; }
// ---- refuse C cast of vectors: write T(v)
KERNEL { float4 v = 1.5f; int4 i = (int4)v; d[0] = i.x; }
// ---- refuse printf: undeclared identifier
KERNEL { printf("x"); d[0] = 1; }
// ---- refuse C++ header: file not found
#include <cmath>
KERNEL { d[0] = 1; }
// ---- refuse if constexpr: C++17
template <int n> static float f() { if constexpr (n > 1) return 1; return 0; }
KERNEL { d[0] = f<2>(); }
// ---- refuse fold expression: C++17
template <typename... T> static float f(T... x) { return (x + ...); }
KERNEL { d[0] = f(1, 2); }
// ---- refuse structured binding: C++17
struct A { float x, y; };
KERNEL { A a = {c, c}; auto [x, y] = a; d[0] = x + y; }
