// 8x8 matrices that the lanes of a SIMD-group hold together, two elements each, placed as on the simulated device.
// Multiplied by shuffles: right, but slow, so that kernels with matrices are checked here and not timed.
#pragma once

namespace metal {

MSL_INLINE uint msl_row(uint lane) { return lane / 16 * 4 + lane / 2 % 4; }
MSL_INLINE uint msl_column(uint lane) { return lane / 8 % 2 * 4 + lane % 2 * 2; }  // of its first element
// The lane that has element (row, column), as its element column % 2.
MSL_INLINE uint msl_holder(uint row, uint column) {
  return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column % 4 / 2;
}

template <typename T, int rows = 8, int columns = 8>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "MSL has 8x8 matrices");
  static_assert(is_floating_point_v<T>, "of half, bfloat or float");
  using storage_type = vec<T, 2>;
  storage_type elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint row = msl_row(msl_lane()), column = msl_column(msl_lane());
    for (uint i = 0; i < 2; ++i) elements[i] = row == column + i ? diagonal : T(0);
  }
  storage_type& thread_elements() { return elements; }
  const storage_type& thread_elements() const { return elements; }
};

template <typename T, int rows = 8, int columns = 8>
MSL_INLINE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> m;
  m.elements = value;
  return m;
}
template <typename T, int rows = 8, int columns = 8>
MSL_INLINE simdgroup_matrix<T, rows, columns> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, rows, columns>(value);
}

// Pointer to this lane's element i.
template <typename T>
MSL_INLINE T* msl_element(T* pointer, ulong stride, ulong2 origin, bool transposed, uint i) {
  const uint row = msl_row(msl_lane()), column = msl_column(msl_lane()) + i;
  return pointer + (origin.y + (transposed ? column : row)) * stride + origin.x + (transposed ? row : column);
}
template <typename T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T>& m, const T* from, ulong elements_per_row = 8,
                               ulong2 origin = ulong2{0, 0}, bool transposed = false) {
  for (uint i = 0; i < 2; ++i) m.elements[i] = *msl_element(from, elements_per_row, origin, transposed, i);
}
template <typename T>
MSL_INLINE void simdgroup_store(simdgroup_matrix<T> m, T* to, ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0},
                                bool transposed = false) {
  for (uint i = 0; i < 2; ++i) *msl_element(to, elements_per_row, origin, transposed, i) = m.elements[i];
}

// d = a b + c, summed in float in the order of k.
template <typename D, typename A, typename B, typename C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                              simdgroup_matrix<C> c) {
  const uint row = msl_row(msl_lane()), column = msl_column(msl_lane());
  float sum[2] = {(float)c.elements[0], (float)c.elements[1]};
  for (uint k = 0; k < 8; ++k) {
    const float left = (float)msl_from_lane(a.elements, msl_holder(row, k))[k % 2];
    const vec<B, 2> right = msl_from_lane(b.elements, msl_holder(k, column));
    for (uint i = 0; i < 2; ++i) sum[i] = __builtin_fmaf(left, (float)right[i], sum[i]);
  }
  for (uint i = 0; i < 2; ++i) d.elements[i] = (D)sum[i];
}
template <typename D, typename A, typename B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D>(D(0)));
}

typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float> simdgroup_float8x8;

}  // namespace metal
