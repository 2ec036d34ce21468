// Compiles the embedded Metal sources. Manual reference counting, as in PyTorch (-fno-objc-arc).
#include "pipelines.h"

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>

#include "compile.h"
#include "metal_sources.inc"  // written by metal/embed.py

namespace qgemv::mps {
namespace {

const char* const sources[source_count] = {gemv_metal,  dequantize_metal, rows_metal,
                                           tiles_metal, matmul_metal,     transposed_metal};

// One small library per source and format, so that the first token waits for the few kernels it needs. Called with
// the lock held.
id<MTLLibrary> library(id<MTLDevice> device, Source source, int format) {
  static id<MTLLibrary> libraries[source_count][format_count];
  id<MTLLibrary>& kept = libraries[source][format];
  const char* name = formats[format].name;
  if (!kept) kept = compile(device, sources[source], @{@"QGEMV_FORMAT" : ns(name)}, name);
  return kept;
}

id<MTLDevice> device_or_throw() {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  TORCH_CHECK(device, "torch_qgemv: there is no Metal device");
  return device;
}

id<MTLComputePipelineState> make_pipeline(id<MTLDevice> device, id<MTLLibrary> compiled, const char* kernel) {
  id<MTLComputePipelineState> state = pipeline_of(device, compiled, kernel);
  TORCH_CHECK(state.threadExecutionWidth == simd_width && state.maxTotalThreadsPerThreadgroup >= max_threads_per_group,
              "torch_qgemv: this GPU has SIMD-groups of ", state.threadExecutionWidth, " lanes and threadgroups of ",
              state.maxTotalThreadsPerThreadgroup, "; kernel ", kernel, " needs ", uint32_t(simd_width), " and ",
              max_threads_per_group);
  return state;
}

}  // namespace

id<MTLComputePipelineState> pipeline(const Kernel& kernel) {
  static std::atomic<void*> pipelines[kernel_count];
  static std::mutex mutex;
  std::atomic<void*>& kept = pipelines[kernel.index()];
  void* state = kept.load(std::memory_order_acquire);
  if (!state) {
    const std::lock_guard<std::mutex> lock(mutex);
    state = kept.load(std::memory_order_relaxed);
    if (!state) {
      @autoreleasepool {
        id<MTLDevice> device = device_or_throw();
        state = make_pipeline(device, library(device, source_of(kernel.family), kernel.format), kernel.name());
      }
      kept.store(state, std::memory_order_release);
    }
  }
  return (id<MTLComputePipelineState>)state;
}

id<MTLComputePipelineState> self_test_pipeline(const char* kernel) {
  id<MTLDevice> device = device_or_throw();
  id<MTLLibrary> compiled = [compile(device, self_test_metal, nil, "the self-test") autorelease];
  return make_pipeline(device, compiled, kernel);
}

}  // namespace qgemv::mps
