// The kernels tiles_<format>_<type>, and those with _plain behind, of the format that the macro QGEMV_FORMAT names.
#include "tiles.h"

namespace qgemv {

#define TILES(name, F, S, T) template [[host_name(name)]] [[kernel]] decltype(tiles<F, S, T>) tiles<F, S, T>;
#define TILES_TYPE(F, T) TILES("tiles_" #F "_" #T, F, Aligned, T) TILES("tiles_" #F "_" #T "_plain", F, Anywhere, T)
QGEMV_EACH_TYPE(TILES_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
