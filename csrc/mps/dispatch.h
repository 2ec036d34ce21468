// A planned launch on the stream that PyTorch itself uses.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSProfiler.h>
#include <ATen/mps/MPSStream.h>
#import <Metal/Metal.h>

#include <array>

#include "launch_plan.h"

namespace qgemv::mps {

struct Binding {
  id<MTLBuffer> buffer;
  NSUInteger offset;
};

// On MPS a storage's data pointer is its buffer, in which the tensor starts at its storage offset.
inline id<MTLBuffer> buffer_of(const at::Tensor& t) { return (id<MTLBuffer>)const_cast<void*>(t.storage().data()); }
inline uint64_t offset_of(const at::Tensor& t) { return uint64_t(t.storage_offset()) * t.element_size(); }
inline Binding bind(const at::Tensor& t) { return {buffer_of(t), offset_of(t)}; }

inline Dtype dtype_of(at::ScalarType type) {
  return type == at::kFloat ? float32 : type == at::kHalf ? float16 : bfloat16;
}

inline MTLSize metal_size(const Size& size) { return MTLSizeMake(size.x, size.y, 1); }

// torch.mps.profiler's signposts, where profiling is on.
struct Signpost {
  Signpost(id<MTLComputePipelineState> s, const char* name, const at::Tensor& in, const at::Tensor& out) {
    auto& profiler = at::mps::getMPSProfiler();
    if (!profiler.isOperationProfilingEnabled()) return;
    state = s;
    profiler.beginProfileKernel(state, name, at::TensorList({in, out}));
  }
  ~Signpost() {
    if (state) at::mps::getMPSProfiler().endProfileKernel(state);
  }
  id<MTLComputePipelineState> state = nil;
};

// The buffers are the kernel's arguments 0, 1, ..., the parameters the next one. AnyKernel has a name() and a
// pipeline().
template <typename Params, size_t count, typename AnyKernel>
void dispatch(const Plan<Params, AnyKernel>& plan, const std::array<Binding, count>& buffers, const at::Tensor& in,
              const at::Tensor& out) {
  id<MTLComputePipelineState> state = pipeline(plan.kernel);
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  // Blocks copy what they name: pointers only.
  const Plan<Params, AnyKernel>* const p = &plan;
  const Binding* const bindings = buffers.data();
  const at::Tensor *const from = &in, *const to = &out;
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^() {
    @autoreleasepool {
      const Signpost signpost(state, p->kernel.name(), *from, *to);
      id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();  // PyTorch's own, which goes on using it
      [encoder setComputePipelineState:state];
      for (size_t i = 0; i < count; ++i) [encoder setBuffer:bindings[i].buffer offset:bindings[i].offset atIndex:i];
      [encoder setBytes:&p->params length:sizeof(Params) atIndex:count];
      [encoder dispatchThreads:metal_size(p->grid) threadsPerThreadgroup:metal_size(p->threadgroup)];
    }
  });
}

}  // namespace qgemv::mps
