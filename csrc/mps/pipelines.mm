// Compiles the embedded Metal sources. Manual reference counting, as in PyTorch (-fno-objc-arc).
#include "pipelines.h"

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>

#include "metal_sources.inc"  // written by metal/embed.py

// macOS 15's setter, declared here because the SDK of macOS 14 does not have it.
@protocol QGEMVMathMode
- (void)setMathMode:(NSInteger)mode;
@end

namespace qgemv::mps {
namespace {

const char* const sources[source_count] = {gemv_metal, dequantize_metal};

NSString* ns(const char* text) { return [NSString stringWithUTF8String:text]; }
const char* text_of(NSError* error) { return error ? error.localizedDescription.UTF8String : "no reason given"; }

// Safe math: fast math may take subnormal halfs, of which the kernels are full, for 0.
void set_safe_math(MTLCompileOptions* options) {
  constexpr NSInteger safe = 0;  // MTLMathModeSafe
  if ([options respondsToSelector:@selector(setMathMode:)]) {
    [(id<QGEMVMathMode>)options setMathMode:safe];
  } else {
    options.fastMathEnabled = NO;
  }
}

id<MTLLibrary> compile(id<MTLDevice> device, Source source, int format) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;  // the first with bfloat
  options.preprocessorMacros = @{@"QGEMV_FORMAT" : ns(formats[format].name)};
  set_safe_math(options);
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:ns(sources[source]) options:options error:&error];
  TORCH_CHECK(library, "torch_qgemv: the Metal source of ", formats[format].name,
              " does not compile: ", text_of(error));
  return library;
}

// One small library per source and format, so that the first token waits for the few kernels it needs. Called with
// the lock held.
id<MTLLibrary> library(id<MTLDevice> device, Source source, int format) {
  static id<MTLLibrary> libraries[source_count][format_count];
  id<MTLLibrary>& kept = libraries[source][format];
  if (!kept) kept = compile(device, source, format);
  return kept;
}

id<MTLComputePipelineState> make_pipeline(const Kernel& kernel) {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  TORCH_CHECK(device, "torch_qgemv: there is no Metal device");
  id<MTLLibrary> compiled = library(device, source_of(kernel.family), kernel.format);
  id<MTLFunction> function = [compiled newFunctionWithName:ns(kernel.name())];
  TORCH_CHECK(function, "torch_qgemv: there is no Metal kernel ", kernel.name());
  NSError* error = nil;
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
  [function release];
  TORCH_CHECK(state, "torch_qgemv: no pipeline for ", kernel.name(), ": ", text_of(error));
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
