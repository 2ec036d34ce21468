// The kernels gemv_<format>_<type> and gemv_<format>_<type>_plain of the format that the macro QGEMV_FORMAT names.
#include "gemv.h"

namespace qgemv {

#define GEMV(name, F, S, T) \
  template [[host_name(name)]] [[kernel]] decltype(gemv<F, Lane<F, S>, T>) gemv<F, Lane<F, S>, T>;
#define GEMV_TYPE(F, T) GEMV("gemv_" #F "_" #T, F, Aligned, T) GEMV("gemv_" #F "_" #T "_plain", F, Anywhere, T)
#define GEMV_FORMAT(F) GEMV_TYPE(F, float) GEMV_TYPE(F, half) GEMV_TYPE(F, bfloat)
GEMV_FORMAT(QGEMV_FORMAT)

}  // namespace qgemv
