#if defined(__x86_64__)
#include "target.h"
QGEMV_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#include "make_kernels.h"
#include "simd_avxvnni.h"

namespace qgemv::cpu {
// GCC 12's __builtin_cpu_supports doesn't know AVX-VNNI: CPUID leaf 7.1, bit 4 of EAX. What AVX2 needs from the system
// is all that it needs.
const Kernels avx_vnni = make_kernels<AvxVnni>("avx_vnni", [] {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
});
}  // namespace qgemv::cpu
QGEMV_TARGET_END
#endif
