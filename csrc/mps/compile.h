// Metal source to libraries and pipelines. What is returned belongs to the caller.
#pragma once
#import <Metal/Metal.h>

namespace qgemv::mps {

inline NSString* ns(const char* text) { return [NSString stringWithUTF8String:text]; }
inline const char* text_of(NSError* error) { return error ? error.localizedDescription.UTF8String : "no reason given"; }

// PyTorch's own. Throws where there is none.
id<MTLDevice> device_or_throw();

// In Metal 3.1 and safe math. `what` says what it is in an error, which has Metal's own text.
id<MTLLibrary> compile(id<MTLDevice> device, const char* source, NSDictionary* macros, const char* what);

id<MTLComputePipelineState> pipeline_of(id<MTLDevice> device, id<MTLLibrary> library, const char* kernel);

}  // namespace qgemv::mps
