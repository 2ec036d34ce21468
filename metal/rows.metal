// The kernels rows<M>_<format>_<type>_s<simdgroups> and rows<M>_<format>_<type>_plain of the format that the macro
// QGEMV_FORMAT names.
#include "rows.h"

namespace qgemv {

#define ROWS(name, ...) template [[host_name(name)]] [[kernel]] decltype(rows<__VA_ARGS__>) rows<__VA_ARGS__>;
#define ROWS_SHAPE(F, T, M, simdgroups) ROWS("rows" #M "_" #F "_" #T "_s" #simdgroups, F, Aligned, T, M, simdgroups)
#define ROWS_PLAIN(F, T, M, simdgroups) ROWS("rows" #M "_" #F "_" #T "_plain", F, Anywhere, T, M, simdgroups)
#define ROWS_ALL(F, T, M) QGEMV_ROWS_SHAPES(ROWS_SHAPE, F, T, M) QGEMV_PLAIN_ROWS_SHAPE(ROWS_PLAIN, F, T, M)
#define ROWS_TYPE(F, T) ROWS_ALL(F, T, 2) ROWS_ALL(F, T, 3) ROWS_ALL(F, T, 4)
QGEMV_EACH_TYPE(ROWS_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
