#if defined(__x86_64__)
#include "target.h"
QGEMV_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#include "make_kernels.h"
#include "simd_avx512.h"

namespace qgemv::cpu {
const Kernels avx512_vnni = make_kernels<Avx512>("avx512_vnni", [] {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
});
}  // namespace qgemv::cpu
QGEMV_TARGET_END
#endif
