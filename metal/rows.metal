// The kernels rows<M>_<format>_<type>, and those with _plain behind, of the format that the macro QGEMV_FORMAT names.
#include "rows.h"

namespace qgemv {

#define ROWS(name, F, S, T, M) template [[host_name(name)]] [[kernel]] decltype(rows<F, S, T, M>) rows<F, S, T, M>;
#define ROWS_BOTH(F, T, M)                        \
  ROWS("rows" #M "_" #F "_" #T, F, Aligned, T, M) \
  ROWS("rows" #M "_" #F "_" #T "_plain", F, Anywhere, T, M)
#define ROWS_TYPE(F, T) ROWS_BOTH(F, T, 2) ROWS_BOTH(F, T, 3) ROWS_BOTH(F, T, 4)
QGEMV_EACH_TYPE(ROWS_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
