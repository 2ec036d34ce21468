// The kernels matmul<R>_<format>_<type>, and those with _plain behind, of the format that the macro QGEMV_FORMAT names:
// tiles of R = 32 or 64 rows.
#include "matmul.h"

namespace qgemv {

#define TILE(name, F, S, T, R) \
  template [[host_name(name)]] [[kernel]] decltype(matmul<Forward<F, S>, T, R>) matmul<Forward<F, S>, T, R>;
#define TILE_BOTH(F, T, R)                          \
  TILE("matmul" #R "_" #F "_" #T, F, Aligned, T, R) \
  TILE("matmul" #R "_" #F "_" #T "_plain", F, Anywhere, T, R)
#define TILE_TYPE(F, T) TILE_BOTH(F, T, 32) TILE_BOTH(F, T, 64)
QGEMV_EACH_TYPE(TILE_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
