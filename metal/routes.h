// Which expert makes which rows, found out on the GPU: the processor never waits for ids.
//
// An id outside [0, experts) names no expert. Its rows count as those of one more, number `experts`; they are made with
// the last expert's weight, in bounds, and get NaN.
#pragma once
#include "storage.h"

namespace qgemv {

inline uint expert_of(device const uchar* ids, uint row, uint index_bytes, uint experts) {
  const long id = index_at(ids, row, index_bytes);
  return id < 0 || id >= long(experts) ? experts : uint(id);
}

// The weight of an expert, and what is added to its outputs.
inline device const uchar* weight_of(device const uchar* weight, uint expert, constant ExpertParams& p) {
  return weight + min(expert, p.experts - 1) * p.expert_bytes;
}
inline float term_of(uint expert, constant ExpertParams& p) { return expert < p.experts ? 0.0f : NAN; }

// As PlainRows (bias.h): row `row` of y.
struct OneRow {
  uint row, rows_per_x;
  float nan_or_0;
  ulong x_row(uint) const { return row / rows_per_x; }
  ulong y_row(uint) const { return row; }
  float term(uint) const { return nan_or_0; }
};

// The rows of a RouteTile, wherever they are in x and y.
struct RoutedRows {
  device const uint* order;
  uint count, rows_per_x;
  float nan_or_0;
  ulong x_row(uint m) const { return order[min(m, count - 1)] / rows_per_x; }  // past the last row: that one
  ulong y_row(uint m) const { return order[m]; }
  float term(uint) const { return nan_or_0; }
};

}  // namespace qgemv
