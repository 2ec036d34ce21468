#pragma once
#include "params.h"

namespace qgemv {

inline float bias_at(device const uchar* bias, uint type, uint n) {
  if (type == float_bias) return ((device const float*)bias)[n];
  if (type == half_bias) return float(((device const half*)bias)[n]);
  if (type == bfloat_bias) return float(((device const bfloat*)bias)[n]);
  return 0.0f;
}

}  // namespace qgemv
