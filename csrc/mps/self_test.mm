// Runs kernels of metal/self_test.metal, each once, on a queue and in a buffer of their own: nothing of PyTorch's
// stream is waited for or committed.
#include "self_test.h"

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "pipelines.h"

namespace qgemv::mps {
namespace {

// What a kernel writes to its only argument, a buffer of `count` floats, with one SIMD-group.
std::vector<float> found_by(const char* kernel, size_t count) {
  @autoreleasepool {
    id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
    id<MTLComputePipelineState> state = [self_test_pipeline(kernel) autorelease];
    id<MTLBuffer> buffer = [[device newBufferWithLength:count * sizeof(float)
                                                options:MTLResourceStorageModeShared] autorelease];
    id<MTLCommandQueue> queue = [[device newCommandQueue] autorelease];
    TORCH_CHECK(buffer && queue, "torch_qgemv: Metal has no buffer or queue for the self-test ", kernel);
    id<MTLCommandBuffer> commands = [queue commandBuffer];
    id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
    [encoder setComputePipelineState:state];
    [encoder setBuffer:buffer offset:0 atIndex:0];
    [encoder dispatchThreads:MTLSizeMake(simd_width, 1, 1) threadsPerThreadgroup:MTLSizeMake(simd_width, 1, 1)];
    [encoder endEncoding];
    [commands commit];
    [commands waitUntilCompleted];
    TORCH_CHECK(!commands.error, "torch_qgemv: the self-test ", kernel,
                " failed: ", commands.error.localizedDescription.UTF8String);
    const float* found = static_cast<const float*>(buffer.contents);
    return std::vector<float>(found, found + count);
  }
}

bool find_lane_order() {
  const std::vector<float> known = found_by("lane_order", simd_width);
  return std::all_of(known.begin(), known.end(), [](float lane) { return lane == 1.0f; });
}

}  // namespace

bool lane_order_is_known() {
  static const bool known = find_lane_order();
  return known;
}

}  // namespace qgemv::mps
