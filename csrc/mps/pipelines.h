// Metal pipelines, made on first use and kept for the process.
#pragma once
#import <Metal/Metal.h>

#include "fused_plan.h"

namespace qgemv::mps {

// The pipeline of kernel_names[kernel]. Thread-safe. Throws with Metal's own text.
id<MTLComputePipelineState> pipeline(const Kernel& kernel);

// The same of a fused kernel, compiled for its cases.
id<MTLComputePipelineState> pipeline(const FusedKernel& kernel);

// A new pipeline, which the caller owns, of a kernel of metal/device_check.metal.
id<MTLComputePipelineState> device_check_pipeline(const char* kernel);

}  // namespace qgemv::mps
