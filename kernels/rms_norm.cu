// RMS norm of rows, fused with the residual sum before it.
//
// One block of 256 threads for each row, whatever the number of rows. A thread takes 8 neighbouring elements (16 bytes) at a time,
// neighbouring threads neighbouring bytes. First pass: the residual gets x added, is rounded to the element's type and written back; each
// thread adds up the squares of what was written, in float32, in order; the sum goes through a fixed tree of shuffles and then over the
// warps in order. Second pass: what was written, times the row's factor, times the weight. Without a residual x itself is normed.
//
// Compiled with ELEMENT (bf16, fp16).
#include "device.cuh"

namespace {
using T = ELEMENT;
constexpr int THREADS = 256;

struct Eight {
  u32 pairs[4];
};
__device__ __forceinline__ Eight load8(const T* p) {
  const uint4 v = *reinterpret_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void store8(T* p, const Eight& e) {
  *reinterpret_cast<uint4*>(p) = make_uint4(e.pairs[0], e.pairs[1], e.pairs[2], e.pairs[3]);
}

// The sum over all threads of the block, in all of them.
__device__ __forceinline__ float block_sum(float x) {
  SHARED(float, sums, [THREADS / 32]);
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(ALL_LANES, x, o);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) total += sums[w];
  return total;
}
}  // namespace

KERNEL void __launch_bounds__(256)
    rms_norm(const T* __restrict__ x, T* residual, const T* __restrict__ weight, T* __restrict__ out, int width, float eps) {
  const i64 row = (i64)blockIdx.x * width;
  x += row;
  out += row;
  T* summed = residual ? residual + row : nullptr;
  float squares = 0.f;
  for (int i = threadIdx.x * 8; i < width; i += THREADS * 8) {
    Eight v = load8(x + i);
    if (summed) {
      const Eight before = load8(summed + i);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float2 a = unpack2<T>(before.pairs[k]), b = unpack2<T>(v.pairs[k]);
        v.pairs[k] = pack2<T>(a.x + b.x, a.y + b.y);
      }
      store8(summed + i, v);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float2 f = unpack2<T>(v.pairs[k]);
      squares = fmaf(f.y, f.y, fmaf(f.x, f.x, squares));
    }
  }
  const float factor = rsqrtf(__fdiv_rn(block_sum(squares), (float)width) + eps);
  const T* from = summed ? summed : x;
  for (int i = threadIdx.x * 8; i < width; i += THREADS * 8) {
    const Eight v = load8(from + i), w = load8(weight + i);
    Eight y;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float2 f = unpack2<T>(v.pairs[k]), g = unpack2<T>(w.pairs[k]);
      y.pairs[k] = pack2<T>(f.x * factor * g.x, f.y * factor * g.y);
    }
    store8(out + i, y);
  }
}
