// A launcher for the simulator's own tests: one right operator, and the mistakes that the simulator is there to find.
// Manual reference counting, as in PyTorch (-fno-objc-arc).
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>
#import <Metal/Metal.h>
#include <torch/library.h>
#include <map>
#include <mutex>
#include <string>

@protocol NotSimulated
- (void)performNothing;
@end

namespace metal_sim_selftest {

static const char metal_source[] =
#include "selftest_source.inc"
    ;

struct Params {
  uint32_t count, step;
};

static const char* error_text(NSError* error) {
  return error ? error.localizedDescription.UTF8String : "no reason given";
}

static MTLCompileOptions* options(const std::string& fault) {
  MTLCompileOptions* options = [MTLCompileOptions new];
  if (fault != "leaked options") [options autorelease];
  options.languageVersion = fault == "old language" ? MTLLanguageVersion3_0 : MTLLanguageVersion3_1;
  options.preprocessorMacros = @{@"SCALE" : @3};
  if (fault == "no math mode") return options;
  if ([options respondsToSelector:@selector(setMathMode:)]) {
    options.mathMode = fault == "fast math" ? MTLMathModeFast : MTLMathModeSafe;
  } else {
    options.fastMathEnabled = NO;
  }
  return options;
}

static id<MTLComputePipelineState> build_pipeline(const std::string& fault) {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:[NSString stringWithUTF8String:metal_source]
                                                options:options(fault)
                                                  error:&error];
  TORCH_CHECK(library, "the source does not compile: ", error_text(error));
  [library autorelease];
  MTLFunctionConstantValues* constants = [[MTLFunctionConstantValues new] autorelease];
  const uint32_t bias = 7;
  if (fault != "missing constant") {
    [constants setConstantValue:&bias type:fault == "constant type" ? MTLDataTypeInt : MTLDataTypeUInt atIndex:0];
  }
  const BOOL negate = YES;
  if (fault == "negate") [constants setConstantValue:&negate type:MTLDataTypeBool withName:@"negate"];
  if (fault == "unspecialised") [[library newFunctionWithName:@"scale"] release];
  id<MTLFunction> function = [library newFunctionWithName:fault == "kernel name" ? @"scales" : @"scale"
                                           constantValues:constants
                                                    error:&error];
  TORCH_CHECK(function, "no kernel: ", error_text(error));
  id<MTLComputePipelineState> pipeline = [device newComputePipelineStateWithFunction:function error:&error];
  if (fault != "leaked function") [function release];
  if (fault == "over-released function") [function release];
  TORCH_CHECK(pipeline, "no pipeline: ", error_text(error));
  return pipeline;
}

// The right pipeline is kept; one with a fault is made for its call.
static id<MTLComputePipelineState> pipeline_for(const std::string& fault) {
  static std::mutex mutex;
  static std::map<std::string, id<MTLComputePipelineState>> kept;
  std::lock_guard<std::mutex> guard(mutex);
  @autoreleasepool {
    id<MTLComputePipelineState>& pipeline = kept[fault];
    if (!pipeline) pipeline = build_pipeline(fault);
    return pipeline;
  }
}

static void set_tensor(id<MTLComputeCommandEncoder> encoder, const at::Tensor& t, NSUInteger index, bool drop_offset) {
  [encoder setBuffer:(id<MTLBuffer>)t.storage().data()
              offset:drop_offset ? 0 : NSUInteger(t.storage_offset()) * t.element_size()
             atIndex:index];
}

static void encode(at::mps::MPSStream* stream, id<MTLComputePipelineState> pipeline, const at::Tensor& x,
                   const at::Tensor& y, const std::string& fault) {
  const Params params{uint32_t(y.numel()), uint32_t(x.stride(0))};
  id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
  [encoder setComputePipelineState:pipeline];
  if (fault != "unbound buffer") set_tensor(encoder, x, 0, fault == "dropped offset");
  set_tensor(encoder, y, 1, false);
  [encoder setBytes:&params length:fault == "short bytes" ? 4 : sizeof(params) atIndex:2];
  const MTLSize threads = MTLSizeMake(fault == "too many threads" ? 2048 : 64, 1, 1);
  if (fault == "end encoding") [encoder endEncoding];
  if (fault == "too much memory") [encoder setThreadgroupMemoryLength:32784 atIndex:0];
  if (fault == "no such selector") [(id<NotSimulated>)encoder performNothing];
  at::mps::Profiler::MPSProfiler& profiler = at::mps::getMPSProfiler();
  const bool profiled = profiler.isOperationProfilingEnabled();
  if (profiled || fault == "profiled") profiler.beginProfileKernel(pipeline, "scale", {x});
  if (fault == "groups") {
    [encoder dispatchThreadgroups:MTLSizeMake((y.numel() + 63) / 64, 1, 1) threadsPerThreadgroup:threads];
  } else {
    [encoder dispatchThreads:MTLSizeMake(y.numel(), 1, 1) threadsPerThreadgroup:threads];
  }
  if (profiled || fault == "profiled") profiler.endProfileKernel(pipeline);
  if (fault == "commit") stream->synchronize(at::mps::SyncType::COMMIT);
  if (fault == "commit of the buffer") [stream->commandBuffer() commit];
  if (fault == "used after commit") {
    stream->synchronize(at::mps::SyncType::COMMIT);
    [encoder setComputePipelineState:pipeline];
  }
  if (fault == "nested dispatch")
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^(){
                                        });
}

// On a command queue beside PyTorch's stream.
static void encode_on_own_queue(id<MTLComputePipelineState> pipeline, const at::Tensor& x, const at::Tensor& y,
                                const std::string& fault) {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  const Params params{uint32_t(y.numel()), uint32_t(x.stride(0))};
  id<MTLBuffer> buffer = [[device newBufferWithLength:sizeof params options:MTLResourceStorageModeShared] autorelease];
  memcpy(buffer.contents, &params, sizeof params);
  id<MTLCommandQueue> queue = [[device newCommandQueue] autorelease];
  id<MTLCommandBuffer> commands = [queue commandBuffer];
  id<MTLComputeCommandEncoder> encoder = [commands computeCommandEncoder];
  [encoder setComputePipelineState:pipeline];
  set_tensor(encoder, x, 0, false);
  set_tensor(encoder, y, 1, false);
  [encoder setBuffer:buffer offset:0 atIndex:2];
  [encoder dispatchThreads:MTLSizeMake(y.numel(), 1, 1) threadsPerThreadgroup:MTLSizeMake(64, 1, 1)];
  if (fault != "own queue, not ended") [encoder endEncoding];
  if (fault == "own queue, used after its end") [encoder setComputePipelineState:pipeline];
  if (fault == "own queue, not committed") return;
  if (fault != "own queue, waits uncommitted") [commands commit];
  if (fault == "own queue, committed twice") [commands commit];
  [commands waitUntilCompleted];
  TORCH_CHECK(!commands.error, "the kernel has not run");
}

// y = 3 x + 7 of a one-dimensional float tensor. `fault` names a mistake to make.
at::Tensor scale(const at::Tensor& x, std::string fault) {
  at::Tensor y = at::empty({x.size(0)}, x.options());
  id<MTLComputePipelineState> pipeline = pipeline_for(fault);
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  if (fault.starts_with("own queue")) {
    @autoreleasepool {
      encode_on_own_queue(pipeline, x, y, fault);
    }
  } else if (fault == "outside the queue") {
    encode(stream, pipeline, x, y, fault);
  } else if (fault == "encoder outside the queue") {
    __block id<MTLComputeCommandEncoder> encoder = nil;
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
      encoder = stream->commandEncoder();
    });
    [encoder setComputePipelineState:pipeline];
  } else if (fault == "no pool") {
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
      [NSString stringWithUTF8String:"x"];
    });
  } else {
    const std::string* mistake = &fault;
    at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
      @autoreleasepool {
        encode(stream, pipeline, x, y, *mistake);
      }
    });
  }
  return y;
}

TORCH_LIBRARY(metal_sim_selftest, m) { m.def("scale(Tensor x, str fault='') -> Tensor"); }
TORCH_LIBRARY_IMPL(metal_sim_selftest, MPS, m) { m.impl("scale", &scale); }

}  // namespace metal_sim_selftest
