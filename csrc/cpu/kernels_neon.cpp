#if defined(__aarch64__)
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#include "target.h"
#if defined(__clang__)
QGEMV_TARGET_BEGIN("dotprod")
#else
QGEMV_TARGET_BEGIN("arch=armv8.2-a+dotprod")
// GCC would move the unpacking of whole groups before their products, and spill registers even for one row of x.
#pragma GCC optimize("no-schedule-insns")
#endif
#include "make_kernels.h"
#include "simd_neon.h"

namespace qgemv::cpu {
const Kernels neon_dotprod = make_kernels<NeonDotprod>("neon_dotprod", [] {
#if defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
});
}  // namespace qgemv::cpu
QGEMV_TARGET_END
#endif
