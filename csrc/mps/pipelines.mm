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

const char* const sources[source_count] = {gemv_metal, dequantize_metal};

// One small library per source and format, so that the first token waits for the few kernels it needs. Called with
// the lock held.
id<MTLLibrary> library(id<MTLDevice> device, Source source, int format) {
  static id<MTLLibrary> libraries[source_count][format_count];
  id<MTLLibrary>& kept = libraries[source][format];
  const char* name = formats[format].name;
  if (!kept) kept = compile(device, sources[source], @{@"QGEMV_FORMAT" : ns(name)}, name);
  return kept;
}

id<MTLComputePipelineState> make_pipeline(const Kernel& kernel) {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  TORCH_CHECK(device, "torch_qgemv: there is no Metal device");
  id<MTLLibrary> compiled = library(device, source_of(kernel.family), kernel.format);
  id<MTLComputePipelineState> state = pipeline_of(device, compiled, kernel.name());
  TORCH_CHECK(state.threadExecutionWidth == simd_width && state.maxTotalThreadsPerThreadgroup >= max_threads_per_group,
              "torch_qgemv: this GPU has SIMD-groups of ", state.threadExecutionWidth, " lanes and threadgroups of ",
              state.maxTotalThreadsPerThreadgroup, "; kernel ", kernel.name(), " needs ", uint32_t(simd_width), " and ",
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
        state = make_pipeline(kernel);
      }
      kept.store(state, std::memory_order_release);
    }
  }
  return (id<MTLComputePipelineState>)state;
}

}  // namespace qgemv::mps
