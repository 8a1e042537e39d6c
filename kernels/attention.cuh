// What decode and prefill attention share: one warp, 16 query rows, and a fixed order of everything that is added up.
//
//   tile   TILE consecutive keys, from a multiple of TILE: one step of the online softmax
//   split  SPLIT consecutive keys, from a multiple of SPLIT: begins with m = LEAST, l = 0, o = 0 and goes through its tiles in order
//   fold   the splits of a row, left to right (`fold_scales`)
//
// A row's bits follow from its q, its position and the keys and values it sees. They do not depend on which kernel computes it: a tile or a
// split of which a row sees nothing leaves that row's m, l and o as they are, so it does not matter whether it is skipped. In shared memory
// a key or value takes STRIDE = D + 8 elements, which keeps load_matrices free of bank conflicts. Source: online softmax, arXiv 1805.02867;
// FlashDecoding, pytorch.org/blog/flash-decoding.
#pragma once
#include "device.cuh"

constexpr int TILE = 32;
constexpr int SPLIT = 256;
constexpr int ROWS = 16;
constexpr float LEAST = -1e30f;

// What the layer does to a score before the softmax, and how far back a row sees.
struct ScoreRule {
  float scale;  // no cap: attention scale * log2(e); with one: 2 * attention scale * log2(e) / cap
  float cap;    // 0, or cap * log2(e)
  int window;   // keys a row sees, itself included; INT_MAX where all

  // cap * tanh(x / cap), as cap * (1 - 2 / (e^(2x / cap) + 1))
  __device__ __forceinline__ float operator()(float dot) const {
    const float x = dot * scale;
    return cap == 0.f ? x : cap * (1.f - __fdiv_rn(2.f, exp2_fast(x) + 1.f));
  }
};

// The first split and tile in which a row at `position` sees a key.
__device__ __forceinline__ int first_key(int position, int window) {
  return position - window + 1 > 0 ? position - window + 1 : 0;
}

// COLS columns of the output from the `first_column`th on; the scores are those of all D.
template <class T, int D, int COLS>
struct RowTile {
  static constexpr int STRIDE = D + 8;
  u32 q[D / 16][4];
  float o[COLS / 8][4], m[2], l[2];

  __device__ __forceinline__ void begin_split() {
#pragma unroll
    for (int j = 0; j < COLS / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) o[j][i] = 0.f;
    m[0] = m[1] = LEAST;
    l[0] = l[1] = 0.f;
  }

  // row: this lane's two query rows, lane / 4 and lane / 4 + 8 of the warp's; null where there is none.
  __device__ __forceinline__ void load_queries(const T* const (&row)[2]) {
    const int column = (threadIdx.x % 4) * 2;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const T* from = row[i & 1];
        q[k][i] = from ? *reinterpret_cast<const u32*>(from + k * 16 + (i >> 1) * 8 + column) : 0u;
      }
  }

  // One tile of keys, `first` on; `position` of this lane's two rows (-1: sees nothing).
  __device__ __forceinline__ void step(const T* keys, const T* values, int first_column, int first, const int (&position)[2],
                                       const ScoreRule& rule) {
    const int lane = threadIdx.x % 32;
    float s[TILE / 8][4];
#pragma unroll
    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] = 0.f;
    const T* at = keys + ((lane % 8) + (lane / 16) * 8) * STRIDE + ((lane / 8) % 2) * 8;
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int j = 0; j < TILE / 16; j++) {
        u32 b[4];
        load_matrices(b, at + j * 16 * STRIDE + k * 16);
        mma<T>(s[2 * j], q[k], b[0], b[1]);
        mma<T>(s[2 * j + 1], q[k], b[2], b[3]);
      }
    u32 p[TILE / 16][4];
    float fade[2];
    weigh(s, p, fade, first, position, rule);
    if (__any_sync(ALL_LANES, fade[0] != 1.f || fade[1] != 1.f)) {
#pragma unroll
      for (int j = 0; j < COLS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[j][i] *= fade[i >> 1];
    }
    at = values + (lane % 16) * STRIDE + first_column + (lane / 16) * 8;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
#pragma unroll
      for (int j = 0; j < COLS / 16; j++) {
        u32 b[4];
        load_matrices_transposed(b, at + k * 16 * STRIDE + j * 16);
        mma<T>(o[2 * j], p[k], b[0], b[1]);
        mma<T>(o[2 * j + 1], p[k], b[2], b[3]);
      }
  }

  // Scores into weights, rounded as the product takes them; l adds up what was rounded. l is this lane's share until `end_split`.
  __device__ __forceinline__ void weigh(float (&s)[TILE / 8][4], u32 (&p)[TILE / 16][4], float (&fade)[2], int first,
                                        const int (&position)[2], const ScoreRule& rule) {
    const int column = (threadIdx.x % 4) * 2;
    float most[2] = {m[0], m[1]};
#pragma unroll
    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = first + j * 8 + column + (i & 1), at = position[i >> 1];
        s[j][i] = key <= at && key >= first_key(at, rule.window) ? rule(s[j][i]) : minus_infinity();
        most[i >> 1] = fmaxf(most[i >> 1], s[j][i]);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(ALL_LANES, most[r], 2));
      fade[r] = exp2_fast(m[r] - most[r]);
      m[r] = most[r];
      l[r] *= fade[r];
    }
#pragma unroll
    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const u32 pair = pack2<T>(exp2_fast(s[j][2 * r] - most[r]), exp2_fast(s[j][2 * r + 1] - most[r]));
        const float2 rounded = unpack2<T>(pair);
        l[r] += rounded.x + rounded.y;
        p[j / 2][(j % 2) * 2 + r] = pair;
      }
  }

  // l becomes the row's, in all four lanes that share it.
  __device__ __forceinline__ void end_split() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      l[r] += __shfl_xor_sync(ALL_LANES, l[r], 1);
      l[r] += __shfl_xor_sync(ALL_LANES, l[r], 2);
    }
  }
};

// What has been folded so far of one row is faded by x and a split's part by y; a part of which the row saw nothing changes nothing. One
// whose scores are all NaN has m == LEAST too, but its l is NaN, and so is all that it is added to.
__device__ __forceinline__ bool fold_scales(float& m, float& l, float part_m, float part_l, float& x, float& y) {
  if (part_m == LEAST && part_l == 0.f) return false;
  const float most = fmaxf(m, part_m);
  x = exp2_fast(m - most);
  y = exp2_fast(part_m - most);
  m = most;
  l = fmaf(part_l, y, l * x);
  return true;
}

// A row that saw nothing is 0, one that saw a NaN is NaN. The sum makes -0 into 0, which a skipped tile would have left.
__device__ __forceinline__ float folded(float o, float l) {
  return l == 0.f ? 0.f : __fdiv_rn(o, l) + 0.f;
}

// Copy a tile of keys and values into shared memory with `n_threads` threads: keys at, then values after, TILE * STRIDE elements each.
// Keys at or past `end` become zeros. Pages: [n_blocks, n_kv_heads, 1 << page_shift, D]; `table`: the sequence's blocks.
template <class T, int D>
__device__ __forceinline__ void load_tile(T* to, const T* keys, const T* values, const int* table, int first, int end, int head,
                                          int n_kv_heads, int page_shift, int thread, int n_threads) {
  constexpr int STRIDE = D + 8, CHUNKS = D / 8;
  const int in_page = (1 << page_shift) - 1;
#pragma unroll
  for (int i = thread; i < TILE * CHUNKS; i += n_threads) {
    const int row = i / CHUNKS, column = (i % CHUNKS) * 8, key = first + row;
    const bool there = key < end;
    const i64 block = there ? __ldg(table + (key >> page_shift)) : 0;
    const i64 from = (((block * n_kv_heads + head) << page_shift) + (key & in_page)) * D + column;
    T* dst = to + row * STRIDE + column;
    copy16_async(dst, keys + from, there);
    copy16_async(dst + TILE * STRIDE, values + from, there);
  }
}
