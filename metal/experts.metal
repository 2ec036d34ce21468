// Products by experts for many rows: `routes` sorts the rows by their experts and cuts them into tiles; the kernels
// expert_tiles, expert_matmul and expert_transposed, each _<format>_<type>, and with _plain behind, make the tiles:
// those of tiles.metal, matmul.metal and transposed.metal, with a weight for each threadgroup.
#include "matmul.h"
#include "routes.h"
#include "tiles.h"

namespace qgemv {

// A thread an expert, and one for ids that name none. The rows before those of an expert are counted in the same pass
// as its own, so threads need nothing of one another. Tiles follow from that too: an expert whose rows begin at `first`
// has those from tile first / tile_rows + min(expert, first) on. There the last expert's tiles have ended: each expert
// that has rows moves both min(expert, first) and, in whole tiles, first. Tiles that are left over have no rows.
template <typename F, typename T>
kernel void routes(device const uchar* ids [[buffer(0)]], device uint* order [[buffer(1)]],
                   device RouteTile* tiles [[buffer(2)]], constant RouteParams& p [[buffer(3)]],
                   uint expert [[thread_position_in_grid]]) {
  uint first = 0, count = 0;
  for (uint row = 0; row < p.rows; ++row) {
    const uint of_row = expert_of(ids, row, p.index_bytes, p.experts);
    first += of_row < expert ? 1 : 0;
    count += of_row == expert ? 1 : 0;
  }
  uint place = first;
  for (uint row = 0; row < p.rows && place < first + count; ++row) {
    if (expert_of(ids, row, p.index_bytes, p.experts) == expert) order[place++] = row;
  }
  const uint end = first + count, last = expert == p.experts ? p.tiles : end / p.tile_rows + min(expert + 1, end);
  for (uint tile = first / p.tile_rows + min(expert, first); tile < last; ++tile) {
    const uint rows = min(end - first, p.tile_rows);
    tiles[tile].expert = expert;
    tiles[tile].first = first;
    tiles[tile].count = rows;
    first += rows;
  }
}

// The grid's second dimension is tiles.
template <typename F, typename S, typename T>
kernel void expert_tiles(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                         device const uint* order [[buffer(2)]], device const RouteTile* tiles [[buffer(3)]],
                         device T* y [[buffer(4)]], constant ExpertParams& p [[buffer(5)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint table[Piece<F, S>::table_size];
  const RouteTile tile = tiles[group.y];
  if (tile.count == 0) return;
  const RoutedRows rows = {order + tile.first, tile.count, p.rows_per_x, term_of(tile.expert, p)};
  tiles_outputs_of<F, S>(weight_of(weight, tile.expert, p), x, rows, y, p.product, group.x, simdgroup, lane, table);
}

// The grid's first dimension is tiles: neighbours that have the same expert read the same weights.
template <typename Side, typename T>
kernel void expert_matmul(device const uchar* weight [[buffer(0)]], device const T* x [[buffer(1)]],
                          device const uint* order [[buffer(2)]], device const RouteTile* tiles [[buffer(3)]],
                          device T* y [[buffer(4)]], constant ExpertParams& p [[buffer(5)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint table[Side::P::table_size];
  threadgroup vec<float, 4> memory[TileMemory<T, expert_tile_rows>::vectors];
  const RouteTile tile = tiles[group.x];
  if (tile.count == 0) return;
  const RoutedRows rows = {order + tile.first, tile.count, p.rows_per_x, term_of(tile.expert, p)};
  make_tile<Side, T, expert_tile_rows>(weight_of(weight, tile.expert, p), x, rows, y, p.product, group.y, simdgroup,
                                       lane, table, memory);
}

#define ROUTES(F, T) template [[host_name("routes_" #F "_" #T)]] [[kernel]] decltype(routes<F, T>) routes<F, T>;
#define TILES(name, F, S, T) \
  template [[host_name(name)]] [[kernel]] decltype(expert_tiles<F, S, T>) expert_tiles<F, S, T>;
#define MATMUL(name, Side, F, S, T) \
  template [[host_name(name)]] [[kernel]] decltype(expert_matmul<Side<F, S>, T>) expert_matmul<Side<F, S>, T>;
#define STORAGE(F, S, T, plain)                              \
  TILES("expert_tiles_" #F "_" #T plain, F, S, T)            \
  MATMUL("expert_matmul_" #F "_" #T plain, Forward, F, S, T) \
  MATMUL("expert_transposed_" #F "_" #T plain, Transposed, F, S, T)
#define EXPERTS_TYPE(F, T) ROUTES(F, T) STORAGE(F, Aligned, T, "") STORAGE(F, Anywhere, T, "_plain")
QGEMV_EACH_TYPE(EXPERTS_TYPE, QGEMV_FORMAT)

}  // namespace qgemv
