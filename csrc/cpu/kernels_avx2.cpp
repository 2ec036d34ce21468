#if defined(__x86_64__)
#include "target.h"
QGEMV_TARGET_BEGIN("avx2,fma,f16c")
#include "make_kernels.h"
#include "simd_avx2.h"

namespace qgemv::cpu {
const Kernels avx2 = make_kernels<Avx2>("avx2", [] {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
});
}  // namespace qgemv::cpu
QGEMV_TARGET_END
#endif
