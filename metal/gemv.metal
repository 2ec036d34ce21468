// The kernels gemv_<format>_<type>_r<rows>_s<simdgroups>_k<splits> and gemv_<format>_<type>_plain of the format that
// the macro QGEMV_FORMAT names, for the type QGEMV_TYPE or for all.
#include "gemv.h"

namespace qgemv {

#define GEMV(name, F, S, T, ...) \
  template [[host_name(name)]] [[kernel]] decltype(gemv<F, S, T, __VA_ARGS__>) gemv<F, S, T, __VA_ARGS__>;
#define GEMV_SHAPE(F, T, rows, simdgroups, splits) \
  GEMV("gemv_" #F "_" #T "_r" #rows "_s" #simdgroups "_k" #splits, F, Aligned, T, rows, simdgroups, splits)
#define GEMV_PLAIN(F, T, ...) GEMV("gemv_" #F "_" #T "_plain", F, Anywhere, T, __VA_ARGS__)
#define GEMV_TYPE(F, T) QGEMV_GEMV_SHAPES(GEMV_SHAPE, F, T) QGEMV_PLAIN_GEMV_SHAPE(GEMV_PLAIN, F, T)
QGEMV_EACH_TYPE(GEMV_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
