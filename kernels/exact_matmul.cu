// y = x W^T on mma tiles, for any number of rows, each output by one chain over k: the same bits whichever of the three shapes computes it.
//
// A block computes ROWS x COLUMNS of y: warps side by side, each WARP_ROWS x WARP_COLUMNS in registers as mma tiles of 16 x 8. Slices of
// DEPTH inputs of both operands are copied into shared memory (copy16_async, STAGES - 1 under way), rows padded by 8 elements so that
// load_matrices meets no bank twice. An accumulator starts at 0 and takes k in steps of 16 in ascending order, all of K: nothing is split.
// Past the end of rows, columns or K there are zeros. Grid: one dimension, groups of 8 row tiles going through all column tiles together,
// which keeps W in the second-level cache.
//
// exact_matmul_16    16 x 32, four warps of 16 x 8: bound by reading W, for up to 16 rows
// exact_matmul_64    64 x 64, four warps of 32 x 32
// exact_matmul_128   128 x 128, eight warps of 64 x 32
//
// Compiled with ELEMENT (bf16, fp16).
#include "device.cuh"

namespace {
using T = ELEMENT;
constexpr int GROUP = 8;

template <int ROWS_, int COLUMNS_, int WARP_ROWS, int WARP_COLUMNS, int DEPTH, int STAGES>
struct Shape {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, THREADS = ROWS / WARP_ROWS * (COLUMNS / WARP_COLUMNS) * 32;
  static constexpr int STRIDE = DEPTH + 8, STAGE = (ROWS + COLUMNS) * STRIDE, M = WARP_ROWS / 16, N = WARP_COLUMNS / 8;

  // `n` rows of an operand from `first` on, columns `k` to k + DEPTH.
  template <int n>
  __device__ static __forceinline__ void load(T* to, const T* from, int first, int n_rows, int k, int n_in) {
    constexpr int CHUNKS = DEPTH / 8;
#pragma unroll
    for (int i = threadIdx.x; i < n * CHUNKS; i += THREADS) {
      const int row = i / CHUNKS, column = (i % CHUNKS) * 8;
      const bool there = first + row < n_rows && k + column < n_in;
      copy16_async(to + row * STRIDE + column, from + (there ? (i64)(first + row) * n_in + k + column : 0), there);
    }
  }

  __device__ static __forceinline__ void run(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
                                             void* __restrict__ out, int n_rows, int n_out, int n_in, int as_float) {
    const int row_tiles = (n_rows + ROWS - 1) / ROWS, column_tiles = (n_out + COLUMNS - 1) / COLUMNS;
    const int group = blockIdx.x / (GROUP * column_tiles), in_group = blockIdx.x % (GROUP * column_tiles);
    const int height = min(GROUP, row_tiles - group * GROUP);
    const int row0 = (group * GROUP + in_group % height) * ROWS, column0 = in_group / height * COLUMNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / (COLUMNS / WARP_COLUMNS) * WARP_ROWS, warp_column = warp % (COLUMNS / WARP_COLUMNS) * WARP_COLUMNS;

    DYNAMIC_SHARED(memory);
    T* stages = reinterpret_cast<T*>(memory);
    const int n_slices = (n_in + DEPTH - 1) / DEPTH;
    auto fetch = [&](int i) {
      if (i < n_slices) {
        T* stage = stages + (i % STAGES) * STAGE;
        load<ROWS>(stage, x, row0, n_rows, i * DEPTH, n_in);
        load<COLUMNS>(stage + ROWS * STRIDE, w, column0, n_out, i * DEPTH, n_in);
      }
      copy_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch(i);

    float c[M][N][4];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[m][n][i] = 0.f;

    for (int i = 0; i < n_slices; i++) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      fetch(i + STAGES - 1);  // into the stage that all have done with
      const T* stage = stages + (i % STAGES) * STAGE;
      const T* a_at = stage + (warp_row + lane % 16) * STRIDE + lane / 16 * 8;
      // two column tiles and 16 of k, or the only one and 32 of k
      const T* b_at = stage + (ROWS + warp_column) * STRIDE +
                      (N > 1 ? (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8 : lane % 8 * STRIDE + lane / 8 * 8);
      u32 b[(N + 1) / 2][4];
#pragma unroll
      for (int k = 0; k < DEPTH; k += 16) {
        if (N > 1 || k % 32 == 0) {
#pragma unroll
          for (int n = 0; n < N; n += 2) load_matrices(b[n / 2], b_at + n * 8 * STRIDE + k);
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
          u32 a[4];
          load_matrices(a, a_at + m * 16 * STRIDE + k);
#pragma unroll
          for (int n = 0; n < N; n++) {
            const int at = N > 1 ? n % 2 * 2 : k % 32 / 16 * 2;
            mma<T>(c[m][n], a, b[n / 2][at], b[n / 2][at + 1]);
          }
        }
      }
    }
    copy_wait<0>();

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = row0 + warp_row + m * 16 + r * 8 + lane / 4;
        if (row >= n_rows) continue;
#pragma unroll
        for (int n = 0; n < N; n++) {
          const int column = column0 + warp_column + n * 8 + (lane % 4) * 2;
          if (column >= n_out) continue;
          float2 y = make_float2(c[m][n][2 * r], c[m][n][2 * r + 1]);
          if (bias) {
            const float2 b = unpack2<T>(*reinterpret_cast<const u32*>(bias + column));
            y.x += b.x;
            y.y += b.y;
          }
          const i64 at = (i64)row * n_out + column;
          if (as_float)
            *reinterpret_cast<float2*>(static_cast<float*>(out) + at) = y;
          else
            *reinterpret_cast<u32*>(static_cast<T*>(out) + at) = pack2<T>(y.x, y.y);
        }
      }
  }
};
using Shape16 = Shape<16, 32, 16, 8, 128, 4>;
using Shape64 = Shape<64, 64, 32, 32, 64, 4>;
using Shape128 = Shape<128, 128, 64, 32, 64, 3>;
}  // namespace

KERNEL void __launch_bounds__(128) exact_matmul_16(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
                                                   void* __restrict__ out, int n_rows, int n_out, int n_in, int as_float) {
  Shape16::run(x, w, bias, out, n_rows, n_out, n_in, as_float);
}
KERNEL void __launch_bounds__(128) exact_matmul_64(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
                                                   void* __restrict__ out, int n_rows, int n_out, int n_in, int as_float) {
  Shape64::run(x, w, bias, out, n_rows, n_out, n_in, as_float);
}
KERNEL void __launch_bounds__(256) exact_matmul_128(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ bias,
                                                    void* __restrict__ out, int n_rows, int n_out, int n_in, int as_float) {
  Shape128::run(x, w, bias, out, n_rows, n_out, n_in, as_float);
}
