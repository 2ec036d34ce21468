// Manual reference counting, as in PyTorch (-fno-objc-arc).
#include "device_check.h"

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "compile.h"
#include "pipelines.h"

namespace qgemv::mps {
namespace {

id<MTLBuffer> new_buffer(id<MTLDevice> device, size_t words) {
  id<MTLBuffer> buffer = [device newBufferWithLength:words * 4 options:MTLResourceStorageModeShared];
  TORCH_CHECK(buffer, "torch_qgemv: the Metal device has no memory left");
  return [buffer autorelease];
}

// What a kernel makes of the words given, one float a lane of one SIMD-group.
std::vector<float> found_by(const char* kernel, const std::vector<uint32_t>& given) {
  @autoreleasepool {
    id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
    id<MTLComputePipelineState> state = [device_check_pipeline(kernel) autorelease];
    id<MTLBuffer> in = new_buffer(device, given.size()), out = new_buffer(device, simd_width);
    std::memcpy(in.contents, given.data(), given.size() * sizeof(uint32_t));
    id<MTLCommandQueue> queue = [[device newCommandQueue] autorelease];
    id<MTLCommandBuffer> commands = [queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
    TORCH_CHECK(encoder, "torch_qgemv: the Metal device gives no command encoder");
    [encoder setComputePipelineState:state];
    [encoder setBuffer:in offset:0 atIndex:0];
    [encoder setBuffer:out offset:0 atIndex:1];
    [encoder dispatchThreads:MTLSizeMake(simd_width, 1, 1) threadsPerThreadgroup:MTLSizeMake(simd_width, 1, 1)];
    [encoder endEncoding];
    [commands commit];
    [commands waitUntilCompleted];
    NSError* error = commands.error;
    TORCH_CHECK(!error, "torch_qgemv: the Metal device does not run ", kernel, ": ", text_of(error));
    const auto* found = static_cast<const float*>(out.contents);
    return std::vector<float>(found, found + simd_width);
  }
}

// Every bit of a byte alone, and sums of them; and 1, 2, 4 and 8 times the bytes of a word.
uint32_t word(uint32_t i) { return i < 8 ? 0x01010101u << i : 0x9e3779b9u * i; }
float weighed(uint32_t bytes) {
  uint32_t sum = 0;
  for (int byte = 0; byte < 4; ++byte) sum += ((bytes >> (8 * byte)) & 255u) << byte;
  return float(sum);
}

bool look_for_half_subnormals() {
  std::vector<uint32_t> codes(simd_width);
  std::vector<float> expected(simd_width);
  for (uint32_t i = 0; i < simd_width; ++i) expected[i] = weighed(codes[i] = word(i));
  return found_by("weigh_bytes", codes) == expected;
}

bool look_for_lane_order() {
  std::vector<uint32_t> numbers(64);
  for (uint32_t i = 0; i < 64; ++i) numbers[i] = i;
  const std::vector<float> known = found_by("lane_order", numbers);
  return std::all_of(known.begin(), known.end(), [](float lane) { return lane == 1.0f; });
}

}  // namespace

bool half_subnormals_are_kept() {
  static const bool kept = look_for_half_subnormals();
  return kept;
}

bool lane_order_is_known() {
  static const bool known = look_for_lane_order();
  return known;
}

}  // namespace qgemv::mps
