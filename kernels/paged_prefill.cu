// Prefill attention: the rows of a chunk over paged KV, causal, on mma tiles.
//
// One block for each tile of ROW_TILE query rows of one K/V head of one sequence, grid (tiles of the longest chunk, n_kv_heads, sequences);
// the tiles that see most keys come first. A query row is a head of a token: the heads that share a K/V head lie side by side, so that a
// tile of keys in shared memory serves all of them. A warp has 16 rows and all columns of the output, in registers; for head_dim 256 two
// warps share 16 rows, each with half of the columns. All warps of a block go through the keys together, tile by tile (copy16_async, the
// next STAGES - 1 under way), each skipping tiles of which its rows see nothing, and fold every SPLIT keys as paged_decode_fold does.
// Dynamic shared memory: STAGES * 2 * TILE * (D + 8) elements. Chunks shorter than the grid end at once.
//
// Compiled with ELEMENT (bf16, fp16), HEAD_DIM and STAGES.
#include "attention.cuh"

namespace {
constexpr int D = HEAD_DIM;
using T = ELEMENT;
constexpr int COLUMNS = D > 128 ? 128 : D, WARPS = 8, ROW_WARPS = WARPS * COLUMNS / D, ROW_TILE = ROW_WARPS * ROWS;
using Tile = RowTile<T, D, COLUMNS>;
constexpr int STAGE = 2 * TILE * Tile::STRIDE;
constexpr int PARTS = D > 128 ? 2 : 1;  // in which a tile is fetched: fewer addresses in registers at a time
}  // namespace

KERNEL void __launch_bounds__(256, 1)
    paged_prefill(const T* __restrict__ q, const T* __restrict__ keys, const T* __restrict__ values, const int* __restrict__ table,
                  const int* __restrict__ starts, const int* __restrict__ lengths, T* __restrict__ out, int n_kv_heads, int group,
                  int max_blocks, int page_shift, float scale, float cap, int window) {
  const int sequence = blockIdx.z, kv_head = blockIdx.y, start = starts[sequence], n_tokens = starts[sequence + 1] - start,
            n_rows = n_tokens * group;
  const int tile_row = (gridDim.x - 1 - blockIdx.x) * ROW_TILE;
  if (tile_row >= n_rows) return;
  const int history = lengths[sequence] - n_tokens, lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            first_column = warp / ROW_WARPS * COLUMNS;
  const int row0 = tile_row + warp % ROW_WARPS * ROWS;
  const ScoreRule rule{scale, cap, window};
  const int from = first_key(history + tile_row / group, window) / TILE * TILE,
            to = history + (min(tile_row + ROW_TILE, n_rows) - 1) / group + 1;
  const int warp_from = first_key(history + row0 / group, window),
            warp_to = row0 < n_rows ? history + (min(row0 + ROWS, n_rows) - 1) / group + 1 : 0;

  DYNAMIC_SHARED(memory);
  T* stages = reinterpret_cast<T*>(memory);
  table += (i64)sequence * max_blocks;
  const int n_tiles = (to - from + TILE - 1) / TILE;
  auto fetch = [&](int i) {
    if (i < n_tiles) {
#pragma unroll 1
      for (int part = 0; part < PARTS; part++)
        load_tile<T, D>(stages + (i % STAGES) * STAGE, keys, values, table, from + i * TILE, to, kv_head, n_kv_heads, page_shift,
                        part * WARPS * 32 + threadIdx.x, PARTS * WARPS * 32);
    }
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  auto offset = [&](int row) { return (((i64)start + row / group) * n_kv_heads * group + kv_head * group + row % group) * D; };
  int position[2];
  const T* from_row[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + lane / 4 + r * 8;
    position[r] = row < n_rows ? history + row / group : -1;
    from_row[r] = row < n_rows ? q + offset(row) : nullptr;
  }
  Tile tile;
  tile.load_queries(from_row);
  float o[COLUMNS / 8][4], m[2] = {LEAST, LEAST}, l[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) o[j][i] = 0.f;

  for (int i = 0; i < n_tiles; i++) {
    const int first = from + i * TILE;
    copy_wait<STAGES - 2>();
    __syncthreads();
    fetch(i + STAGES - 1);  // into the stage that all have done with
    if (i == 0 || first % SPLIT == 0) tile.begin_split();
    const T* stage = stages + (i % STAGES) * STAGE;
    if (first < warp_to && first + TILE > warp_from) tile.step(stage, stage + TILE * Tile::STRIDE, first_column, first, position, rule);
    if (i + 1 < n_tiles && (first + TILE) % SPLIT) continue;
    tile.end_split();
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x, y;
      if (!fold_scales(m[r], l[r], tile.m[r], tile.l[r], x, y)) continue;
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
        for (int k = 2 * r; k < 2 * r + 2; k++) o[j][k] = fmaf(tile.o[j][k], y, o[j][k] * x);
    }
  }
  copy_wait<0>();

#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = row0 + lane / 4 + r * 8;
    if (row >= n_rows) continue;
    T* to_row = out + offset(row) + first_column + (lane % 4) * 2;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
      *reinterpret_cast<u32*>(to_row + j * 8) = pack2<T>(folded(o[j][2 * r], l[r]), folded(o[j][2 * r + 1], l[r]));
  }
}
