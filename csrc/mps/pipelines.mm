// Compiles the embedded Metal sources. Manual reference counting, as in PyTorch (-fno-objc-arc).
#include "pipelines.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <mutex>

#include "compile.h"
#include "device_check.h"
#include "metal_sources.inc"  // written by metal/embed.py

namespace qgemv::mps {
namespace {

const char* const sources[source_count] = {gemv_metal,   dequantize_metal, rows_metal,        tiles_metal,
                                           matmul_metal, transposed_metal, expert_gemv_metal, experts_metal};

NSMutableDictionary* macros_for(Dtype dtype) {
  NSMutableDictionary* macros = [NSMutableDictionary dictionary];
  [macros setObject:ns(metal_types[dtype]) forKey:@"QGEMV_TYPE"];
  if (!half_subnormals_are_kept()) [macros setObject:@1 forKey:@"QGEMV_CONVERT_HALFS"];
  return macros;
}

id<MTLLibrary> compile_for(id<MTLDevice> device, const Kernel& kernel) {
  const char* format = formats[kernel.format].name;
  NSMutableDictionary* macros = macros_for(kernel.dtype);
  [macros setObject:ns(format) forKey:@"QGEMV_FORMAT"];
  return compile(device, sources[source_of(kernel.family)], macros, format);
}

// One small library per source, format and type, so that the first token waits for the few kernels it needs. Called
// with the lock held.
id<MTLLibrary> library(id<MTLDevice> device, const Kernel& kernel) {
  static id<MTLLibrary> libraries[source_count][format_count][dtype_count];
  id<MTLLibrary>& kept = libraries[source_of(kernel.family)][kernel.format][kernel.dtype];
  if (!kept) kept = compile_for(device, kernel);
  return kept;
}

id<MTLLibrary> library(id<MTLDevice> device, const FusedKernel& kernel) {
  const std::string source = kernel.definitions() + fused_metal;
  return [compile(device, source.c_str(), macros_for(kernel.dtype), "fused products") autorelease];
}

template <typename AnyKernel>
id<MTLComputePipelineState> make_pipeline(const AnyKernel& kernel) {
  @autoreleasepool {
    id<MTLDevice> device = device_or_throw();
    id<MTLComputePipelineState> state = pipeline_of(device, library(device, kernel), kernel.name());
    TORCH_CHECK(state.threadExecutionWidth == simd_width && state.maxTotalThreadsPerThreadgroup >= kernel.threads(),
                "torch_qgemv: this GPU has SIMD-groups of ", state.threadExecutionWidth, " lanes and threadgroups of ",
                state.maxTotalThreadsPerThreadgroup, "; kernel ", kernel.name(), " needs ", uint32_t(simd_width),
                " and ", kernel.threads());
    return state;
  }
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
      state = make_pipeline(kernel);
      kept.store(state, std::memory_order_release);
    }
  }
  return (id<MTLComputePipelineState>)state;
}

id<MTLComputePipelineState> pipeline(const FusedKernel& kernel) {
  static std::map<FusedKernel, id<MTLComputePipelineState>> pipelines;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = pipelines.find(kernel);
  if (found != pipelines.end()) return found->second;
  return pipelines.emplace(kernel, make_pipeline(kernel)).first->second;
}

id<MTLComputePipelineState> device_check_pipeline(const char* kernel) {
  id<MTLDevice> device = device_or_throw();
  id<MTLLibrary> compiled = [compile(device, device_check_metal, nil, "the device check") autorelease];
  return pipeline_of(device, compiled, kernel);
}

}  // namespace qgemv::mps
