#pragma once
#include "params.h"

namespace qgemv {

inline float bias_at(device const uchar* bias, uint type, uint n) {
  if (type == float_bias) return ((device const float*)bias)[n];
  if (type == half_bias) return float(((device const half*)bias)[n]);
  if (type == bfloat_bias) return float(((device const bfloat*)bias)[n]);
  return 0.0f;
}

// The rows of x and y that a threadgroup has: `count` of them from row `first` on, and the bias they take.
struct PlainRows {
  uint first, count;
  device const uchar* bias;
  uint bias_type;
  ulong x_row(uint m) const { return first + min(m, count - 1); }  // past the last row: that one
  ulong y_row(uint m) const { return first + m; }
  float term(uint n) const { return bias_at(bias, bias_type, n); }  // added to output n of each row
};

}  // namespace qgemv
