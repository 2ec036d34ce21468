// 8x8 matrices that the lanes of a SIMD-group hold together, two elements each.
#pragma once

namespace metal {

// Which two elements a lane holds is opaque in MSL. This is the placement that was observed on Apple's GPUs and that
// public kernels (MLX's steel) rely on: elements (row, column) and (row, column + 1).
// (msl_matrix_lane is the lane itself, unless a test asks for another placement.)
struct msl_matrix_place {
  uint row, column;
  explicit msl_matrix_place(uint lane) {
    lane = msl_matrix_lane(lane);
    row = lane / 16 * 4 + lane / 2 % 4;
    column = lane / 8 % 2 * 4 + lane % 2 * 2;
  }
};
// The lane that holds an element.
MSL_UNCHECKED uint msl_matrix_holder(uint row, uint column) {
  return msl_matrix_lane(row / 4 * 16 + row % 4 * 2 + column / 4 * 8 + column % 4 / 2);
}

template <typename T, int rows = 8, int columns = 8>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "MSL has 8x8 matrices");
  static_assert(is_floating_point_v<T>, "of half, bfloat or float");
  using storage_type = vec<T, 2>;
  storage_type elements;
  simdgroup_matrix() { __builtin_memset(&elements, 0xff, sizeof elements); }  // not filled: NaNs
  explicit simdgroup_matrix(T diagonal) {
    const msl_matrix_place at(msl_lane());
    for (uint i = 0; i < 2; ++i) elements[i] = at.row == at.column + i ? diagonal : T(0);
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

// All lanes of a SIMD-group must name the same memory.
MSL_UNCHECKED void msl_need_same(ulong a, ulong b, const char* name, int line, void* place) {
  const MslSlot mine = {{a, b}};
  const MslSlot* slots = msl_gather(mine, name, line, place);
  if (msl_active_lanes() < 32) msl_fault("a matrix operation in a SIMD-group of fewer than 32 threads", place);
  for (int i = 0; i < 32; ++i)
    if (slots[i].word[0] != a || slots[i].word[1] != b)
      msl_fault("a matrix operation whose arguments differ between the SIMD-group's threads", place);
}
MSL_UNCHECKED void msl_matrix_memory(const void* pointer, ulong stride, const char* name, int line) {
  msl_need_same((ulong)pointer, stride, name, line, MSL_PLACE);
}

// Pointer to this lane's element i.
template <typename T>
MSL_INLINE T* msl_matrix_element(T* pointer, ulong stride, ulong2 origin, bool transposed, uint i) {
  const msl_matrix_place at(msl_lane());
  const ulong row = transposed ? at.column + i : at.row, column = transposed ? at.row : at.column + i;
  return pointer + (origin.y + row) * stride + origin.x + column;
}

template <typename T, typename M>
MSL_INLINE void simdgroup_load(simdgroup_matrix<M>& m, const T* from, ulong elements_per_row = 8,
                               ulong2 origin = ulong2{0, 0}, bool transposed = false, int line = __builtin_LINE()) {
  static_assert(is_same_v<T, M>, "simdgroup_load does not convert");
  msl_matrix_memory(from, elements_per_row, "simdgroup_load", line);
  for (uint i = 0; i < 2; ++i) m.elements[i] = *msl_matrix_element(from, elements_per_row, origin, transposed, i);
}
template <typename T, typename M>
MSL_INLINE void simdgroup_store(simdgroup_matrix<M> m, T* to, ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0},
                                bool transposed = false, int line = __builtin_LINE()) {
  static_assert(is_same_v<T, M>, "simdgroup_store does not convert");
  msl_matrix_memory(to, elements_per_row, "simdgroup_store", line);
  for (uint i = 0; i < 2; ++i) *msl_matrix_element(to, elements_per_row, origin, transposed, i) = m.elements[i];
}

// An element of the matrix that the lanes have put into a word of their slots.
template <typename T>
MSL_UNCHECKED float msl_matrix_value(const MslSlot* slots, int word, uint row, uint column) {
  vec<T, 2> two;
  __builtin_memcpy(&two, &slots[msl_matrix_holder(row, column)].word[word], sizeof two);
  return (float)two[column % 2];
}

// d = a b + c, summed in float in the order of k. (Apple does not document its order.)
template <typename D, typename A, typename B, typename C>
MSL_UNCHECKED void msl_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                simdgroup_matrix<C> c, const char* name, int line, void* place) {
  MslSlot mine = {};
  __builtin_memcpy(&mine.word[0], &a.elements, sizeof a.elements);
  __builtin_memcpy(&mine.word[1], &b.elements, sizeof b.elements);
  const MslSlot* slots = msl_gather(mine, name, line, place);
  if (msl_active_lanes() < 32) msl_fault("a matrix operation in a SIMD-group of fewer than 32 threads", place);
  const msl_matrix_place at(msl_lane());
  for (uint i = 0; i < 2; ++i) {
    float sum = (float)c.elements[i];
    for (uint k = 0; k < 8; ++k) {
      const float left = msl_matrix_value<A>(slots, 0, at.row, k);
      sum = __builtin_fmaf(left, msl_matrix_value<B>(slots, 1, k, at.column + i), sum);
    }
    d.elements[i] = (D)sum;
  }
}
template <typename D, typename A, typename B, typename C>
MSL_UNCHECKED void simdgroup_multiply_accumulate(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                                 simdgroup_matrix<C> c, int line = __builtin_LINE()) {
  msl_multiply(d, a, b, c, "simdgroup_multiply_accumulate", line, MSL_PLACE);
}
template <typename D, typename A, typename B>
MSL_UNCHECKED void simdgroup_multiply(simdgroup_matrix<D>& d, simdgroup_matrix<A> a, simdgroup_matrix<B> b,
                                      int line = __builtin_LINE()) {
  msl_multiply(d, a, b, make_filled_simdgroup_matrix<D>(D(0)), "simdgroup_multiply", line, MSL_PLACE);
}

typedef simdgroup_matrix<half> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float> simdgroup_float8x8;

}  // namespace metal
