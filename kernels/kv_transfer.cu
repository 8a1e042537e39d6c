// Copy whole blocks of some layers from one KV pool into another, a peer's perhaps, and fold each block's checksum in the same pass.
//
// An item is one block in one layer: its page of K and its page of V. A grid of any size takes the items in turn, 256 threads to an item; a
// thread reads and writes 16 bytes at a time, neighbouring threads neighbouring bytes, several loads under way before the first store. The
// checksum is sum of word[i] * (splitmix64(i) | 1) mod 2^64 over the 64-bit words of K and then V (relay/kv/checksum.py): exact whatever
// the order of the sum, so shuffles and shared memory add up what the threads have. Without a target it is only the checksum. An item whose
// source block is negative is skipped and its checksum 0.
#include "device.cuh"

namespace {
constexpr int THREADS = 256, UNROLL = 4;

__device__ __forceinline__ u64 coefficient(u64 i) {
  u64 z = (i + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) | 1;
}

__device__ __forceinline__ u64 joined(u32 low, u32 high) {
  return low | (u64)high << 32;
}

// One page of `chunks` times 16 bytes; `first`: number of its first word in the block.
__device__ __forceinline__ u64 copy_page(const uint4* __restrict__ from, uint4* __restrict__ to, int chunks, int first) {
  u64 sum = 0;
  for (int i = threadIdx.x; i < chunks; i += THREADS * UNROLL) {
    uint4 v[UNROLL];
#pragma unroll
    for (int k = 0; k < UNROLL; k++)
      if (i + k * THREADS < chunks) v[k] = load_stream(from + i + k * THREADS);
#pragma unroll
    for (int k = 0; k < UNROLL; k++) {
      const int at = i + k * THREADS;
      if (at >= chunks) break;
      if (to) to[at] = v[k];
      sum += joined(v[k].x, v[k].y) * coefficient(first + 2 * at) + joined(v[k].z, v[k].w) * coefficient(first + 2 * at + 1);
    }
  }
  return sum;
}
}  // namespace

KERNEL void __launch_bounds__(256)
    kv_transfer(const uint4* __restrict__ source, const int* __restrict__ source_blocks, uint4* __restrict__ target,
                const int* __restrict__ target_blocks, u64* __restrict__ checksums, int n, int first_layer, int n_layers,
                int n_source_blocks, int n_target_blocks, int chunks) {
  SHARED(u64, warp_sums, [THREADS / 32]);
  for (int item = blockIdx.x; item < n * n_layers; item += gridDim.x) {
    const int from = source_blocks[item % n], to = target ? target_blocks[item % n] : 0;
    const i64 sides = 2 * (i64)(first_layer + item / n);
    u64 sum = 0;
    for (int side = 0; from >= 0 && side < 2; side++)
      sum += copy_page(source + ((sides + side) * n_source_blocks + from) * chunks,
                       target ? target + ((sides + side) * n_target_blocks + to) * chunks : nullptr, chunks, side * 2 * chunks);
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, o);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      u64 total = 0;
      for (int w = 0; w < THREADS / 32; w++) total += warp_sums[w];
      checksums[item] = total;
    }
    __syncthreads();
  }
}
