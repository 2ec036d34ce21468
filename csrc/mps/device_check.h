// What the kernels take for granted and Metal does not promise, found out on first use and kept for the process: small
// kernels (metal/device_check.metal) run once each and are waited for, on a command queue of their own. PyTorch's
// stream takes no part. Thread-safe; they throw as pipeline() does.
#pragma once

namespace qgemv::mps {

// Whether a subnormal half is read as the number it is, not as 0. Where it isn't, codes are converted.
bool half_subnormals_are_kept();

// Whether a lane's two elements of an 8x8 matrix are those that metal/place.h says. Where they aren't, the matrix
// kernel does what `tiles` would.
bool lane_order_is_known();

}  // namespace qgemv::mps
