// Manual reference counting, as in PyTorch (-fno-objc-arc).
#include "compile.h"

#include <ATen/mps/MPSDevice.h>
#include <c10/util/Exception.h>

// macOS 15's setter, declared here because the SDK of macOS 14 does not have it.
@protocol QGEMVMathMode
- (void)setMathMode:(NSInteger)mode;
@end

namespace qgemv::mps {
namespace {

// Safe math: fast math may take subnormal halfs, of which the kernels are full, for 0.
void set_safe_math(MTLCompileOptions* options) {
  constexpr NSInteger safe = 0;  // MTLMathModeSafe
  if ([options respondsToSelector:@selector(setMathMode:)]) {
    [(id<QGEMVMathMode>)options setMathMode:safe];
  } else {
    options.fastMathEnabled = NO;
  }
}

}  // namespace

id<MTLDevice> device_or_throw() {
  id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
  TORCH_CHECK(device, "torch_qgemv: there is no Metal device");
  return device;
}

id<MTLLibrary> compile(id<MTLDevice> device, const char* source, NSDictionary* macros, const char* what) {
  MTLCompileOptions* options = [[MTLCompileOptions new] autorelease];
  options.languageVersion = MTLLanguageVersion3_1;  // the first with bfloat
  options.preprocessorMacros = macros;
  set_safe_math(options);
  NSError* error = nil;
  id<MTLLibrary> library = [device newLibraryWithSource:ns(source) options:options error:&error];
  TORCH_CHECK(library, "torch_qgemv: the Metal source of ", what, " does not compile: ", text_of(error));
  return library;
}

id<MTLComputePipelineState> pipeline_of(id<MTLDevice> device, id<MTLLibrary> library, const char* kernel) {
  id<MTLFunction> function = [library newFunctionWithName:ns(kernel)];
  TORCH_CHECK(function, "torch_qgemv: there is no Metal kernel ", kernel);
  NSError* error = nil;
  id<MTLComputePipelineState> state = [device newComputePipelineStateWithFunction:function error:&error];
  [function release];
  TORCH_CHECK(state, "torch_qgemv: no pipeline for ", kernel, ": ", text_of(error));
  return state;
}

}  // namespace qgemv::mps
