// Decode attention over paged KV, split along the keys: one query token per sequence, its heads in groups that share a K/V head.
//
// paged_decode: one block is one warp (two for head_dim 256, each with half of the output's columns), grid (splits, n_kv_heads *
// ceil(group / 16), sequences). A block computes up to 16 heads of one group over one split (SPLIT keys, attention.cuh), whatever the batch
// and the context: with one tile of 16 query rows in registers it goes through the tiles of the split, of which the next STAGES - 1 are on
// their way into shared memory (copy16_async, 16 bytes a lane, a row of D elements by D / 8 neighbouring lanes). Scores and output by mma.
// Dynamic shared memory: STAGES * 2 * TILE * (D + 8) elements. Writes m, l and the unnormalized output of its rows. Splits that the row
// does not see, and sequences shorter than the grid, end at once.
//
// paged_decode_fold: one block of D threads for each (sequence, head), a thread for each element: folds the splits left to right.
//
// Compiled with ELEMENT (bf16, fp16), HEAD_DIM and STAGES.
#include "attention.cuh"

namespace {
constexpr int D = HEAD_DIM;
using T = ELEMENT;
constexpr int COLUMNS = D > 128 ? 128 : D, THREADS = D / COLUMNS * 32;
using Tile = RowTile<T, D, COLUMNS>;
constexpr int STAGE = 2 * TILE * Tile::STRIDE;
}  // namespace

KERNEL void __launch_bounds__(THREADS, 4)
    paged_decode(const T* __restrict__ q, const T* __restrict__ keys, const T* __restrict__ values, const int* __restrict__ table,
                 const int* __restrict__ lengths, float* __restrict__ part_o, float2* __restrict__ part_ml, int n_kv_heads, int group,
                 int max_blocks, int page_shift, float scale, float cap, int window) {
  const int split = blockIdx.x, n_splits = gridDim.x, n_row_tiles = (group + ROWS - 1) / ROWS, sequence = blockIdx.z;
  const int lane = threadIdx.x % 32, first_column = threadIdx.x / 32 * COLUMNS;
  const int kv_head = blockIdx.y / n_row_tiles, row0 = (blockIdx.y % n_row_tiles) * ROWS;
  const int length = lengths[sequence], last = length - 1;
  const ScoreRule rule{scale, cap, window};
  const int from = max(split * SPLIT, first_key(last, window) / TILE * TILE), to = min(length, (split + 1) * SPLIT);
  if (from >= to || length > n_splits * SPLIT) return;

  DYNAMIC_SHARED(memory);
  T* stages = reinterpret_cast<T*>(memory);
  table += (i64)sequence * max_blocks;
  const i64 head0 = (i64)sequence * n_kv_heads * group + kv_head * group;
  const int n_tiles = (to - from + TILE - 1) / TILE;
  auto fetch = [&](int i) {
    if (i < n_tiles)
      load_tile<T, D>(stages + (i % STAGES) * STAGE, keys, values, table, from + i * TILE, length, kv_head, n_kv_heads, page_shift,
                      threadIdx.x, THREADS);
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(i);

  int row[2], position[2];
  const T* from_row[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    row[r] = row0 + lane / 4 + r * 8;
    position[r] = row[r] < group ? last : -1;
    from_row[r] = row[r] < group ? q + (head0 + row[r]) * D : nullptr;
  }
  Tile tile;
  tile.load_queries(from_row);
  tile.begin_split();
  for (int i = 0; i < n_tiles; i++) {
    copy_wait<STAGES - 2>();
    __syncthreads();
    fetch(i + STAGES - 1);  // into the stage that all have done with
    const T* stage = stages + (i % STAGES) * STAGE;
    tile.step(stage, stage + TILE * Tile::STRIDE, first_column, from + i * TILE, position, rule);
  }
  copy_wait<0>();
  tile.end_split();

#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (row[r] >= group) continue;
    const i64 part = (head0 + row[r]) * n_splits + split;
    if (lane % 4 == 0 && first_column == 0) part_ml[part] = make_float2(tile.m[r], tile.l[r]);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++)
      *reinterpret_cast<float2*>(part_o + part * D + first_column + j * 8 + (lane % 4) * 2) =
          make_float2(tile.o[j][2 * r], tile.o[j][2 * r + 1]);
  }
}

KERNEL void __launch_bounds__(HEAD_DIM)
    paged_decode_fold(const float* __restrict__ part_o, const float2* __restrict__ part_ml, const int* __restrict__ lengths,
                      T* __restrict__ out, int n_heads, int n_splits, int window) {
  const int sequence = blockIdx.x / n_heads, column = threadIdx.x;
  const int length = lengths[sequence], end = (length + SPLIT - 1) / SPLIT;
  const i64 part = (i64)blockIdx.x * n_splits;
  float m = LEAST, l = 0.f, o = 0.f;
  if (end <= n_splits) {
#pragma unroll 4
    for (int s = first_key(length - 1, window) / SPLIT; s < end; s++) {
      const float2 ml = part_ml[part + s];
      const float partial = part_o[(part + s) * D + column];
      float x, y;
      if (fold_scales(m, l, ml.x, ml.y, x, y)) o = fmaf(partial, y, o * x);
    }
  }
  // a sequence longer than the launch was made for gets NaN: it is the caller's mistake, and must not look like an answer
  out[(i64)blockIdx.x * D + column] = from_float<T>(end <= n_splits ? folded(o, l) : not_a_number());
}
