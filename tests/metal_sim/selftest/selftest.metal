// Small kernels for the simulator's own tests, launched by selftest.mm.
#include <metal_stdlib>
using namespace metal;
#line 5 "metal/selftest.metal"
#ifndef SCALE
#define SCALE 1
#endif
constant uint bias [[function_constant(0)]];
constant bool negate [[function_constant(1)]];

struct Params {
  uint count;
  uint step;
};

// y[i] = SCALE * x[i * step] + bias, negated if asked for
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant Params& p [[buffer(2)]],
                  uint i [[thread_position_in_grid]]) {
  if (i >= p.count) return;
  const float v = SCALE * x[i * p.step] + bias;
  y[i] = is_function_constant_defined(negate) && negate ? -v : v;
}
