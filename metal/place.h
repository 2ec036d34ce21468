#pragma once
#include <metal_stdlib>
using namespace metal;

namespace qgemv {

// The two elements of an 8x8 matrix that a lane holds: (row, column) and (row, column + 1). So it is on Apple's GPUs as
// far as known, but not documented: the launcher asks the kernel lane_order (device_check.metal) first.
struct Place {
  uint row, column;
  Place(uint lane) : row(lane / 16 * 4 + lane / 2 % 4), column(lane / 8 % 2 * 4 + lane % 2 * 2) {}
};

}  // namespace qgemv
