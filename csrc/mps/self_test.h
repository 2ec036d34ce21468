// What the kernels assume of the GPU and Metal does not promise, found out on first use and kept for the process.
#pragma once

namespace qgemv::mps {

// Whether a lane's two elements of an 8x8 matrix are those that metal/place.h says. Thread-safe; throws as pipeline().
bool lane_order_is_known();

}  // namespace qgemv::mps
