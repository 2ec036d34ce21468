// What the lanes of a SIMD-group or a threadgroup do together, and atomics: declarations.
#pragma once

#define MSL_TOGETHER __attribute__((convergent, nothrow))

namespace metal {

#define MSL_LANES(name)                                                \
  template <typename T, typename = enable_if_t<!is_same_v<T, double>>> \
  MSL_TOGETHER T name(T value);
MSL_LANES(simd_sum)
MSL_LANES(simd_product)
MSL_LANES(simd_max)
MSL_LANES(simd_min)
MSL_LANES(simd_and)
MSL_LANES(simd_or)
MSL_LANES(simd_xor)
MSL_LANES(simd_broadcast_first)
MSL_LANES(simd_prefix_inclusive_sum)
MSL_LANES(simd_prefix_exclusive_sum)
MSL_LANES(quad_sum)
#undef MSL_LANES

#define MSL_LANES(name) \
  template <typename T> \
  MSL_TOGETHER T name(T value, ushort lane);
MSL_LANES(simd_shuffle)
MSL_LANES(simd_shuffle_xor)
MSL_LANES(simd_shuffle_up)
MSL_LANES(simd_shuffle_down)
MSL_LANES(simd_shuffle_rotate_up)
MSL_LANES(simd_shuffle_rotate_down)
MSL_LANES(simd_broadcast)
MSL_LANES(quad_shuffle)
MSL_LANES(quad_shuffle_xor)
MSL_LANES(quad_broadcast)
#undef MSL_LANES

MSL_TOGETHER bool simd_any(bool value);
MSL_TOGETHER bool simd_all(bool value);
bool simd_is_first();

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
MSL_TOGETHER void threadgroup_barrier(mem_flags flags);
MSL_TOGETHER void simdgroup_barrier(mem_flags flags);

template <typename T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "MSL has 8x8 matrices");
  static_assert(is_floating_point_v<T>, "of half, bfloat or float");
  typedef vec<T, 2> storage_type;
  storage_type elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  thread storage_type& thread_elements() { return *(thread storage_type*)&elements; }
};
template <typename T, int rows, int columns>
MSL_INLINE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> filled;
  filled.elements = vec<T, 2>(value);
  return filled;
}
template <typename T, int rows, int columns>
simdgroup_matrix<T, rows, columns> make_diagonal_simdgroup_matrix(T value);
// Matrices are passed by value, so that they need not lie in memory where the kernels are counted.
#define MSL_MATRIX_MEMORY(space)                                                                                       \
  template <typename T>                                                                                                \
  MSL_TOGETHER vec<T, 2> msl_matrix_load(const space T* from, ulong per_row, ulong2 origin, bool transposed);          \
  template <typename T>                                                                                                \
  MSL_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& to, const space T* from, ulong per_row = 8,         \
                                 ulong2 origin = 0, bool transposed = false) {                                         \
    to.elements = msl_matrix_load(from, per_row, origin, transposed);                                                  \
  }                                                                                                                    \
  template <typename T>                                                                                                \
  MSL_TOGETHER void simdgroup_store(simdgroup_matrix<T, 8, 8> from, space T* to, ulong per_row = 8, ulong2 origin = 0, \
                                    bool transposed = false);
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY
template <typename D, typename A, typename B, typename C>
MSL_TOGETHER __attribute__((const)) vec<D, 2> msl_matrix_product(vec<A, 2> a, vec<B, 2> b, vec<C, 2> c);
template <typename D, typename A, typename B, typename C>
MSL_INLINE void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                              simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
  d.elements = msl_matrix_product<D>(a.elements, b.elements, c.elements);
}
template <typename D, typename A, typename B>
MSL_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<B, 8, 8> b) {
  d.elements = msl_matrix_product<D>(a.elements, b.elements, vec<D, 2>(0));
}
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T value;
};
// Macros, for OpenCL has types of these names.
#define atomic_int ::metal::atomic<int>
#define atomic_uint ::metal::atomic<uint>
#define atomic_float ::metal::atomic<float>
#define MSL_ATOMIC(name, space) \
  template <typename T>         \
  T name(volatile space atomic<T>* object, T operand, memory_order order);
#define MSL_ATOMICS(space)                                                            \
  template <typename T>                                                               \
  T atomic_load_explicit(const volatile space atomic<T>* object, memory_order order); \
  MSL_ATOMIC(atomic_store_explicit, space)                                            \
  MSL_ATOMIC(atomic_exchange_explicit, space)                                         \
  MSL_ATOMIC(atomic_fetch_add_explicit, space)                                        \
  MSL_ATOMIC(atomic_fetch_sub_explicit, space)                                        \
  MSL_ATOMIC(atomic_fetch_min_explicit, space)                                        \
  MSL_ATOMIC(atomic_fetch_max_explicit, space)
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_ATOMIC

}  // namespace metal
