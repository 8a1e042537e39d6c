// Kernels with one mistake each, and some that make none: what the emulator must and must not report.
#include "device.cuh"

KERNEL void barrier_on_two_lines(int* o) {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    o[threadIdx.x] = 1;
    __syncthreads();
  }
}
KERNEL void ends_while_awaited(int* o) {
  if (threadIdx.x < 40) __syncwarp();
  o[threadIdx.x] = 1;
}
KERNEL void lane_outside_its_mask(int* o) {
  o[threadIdx.x] = __shfl_sync(0x0fffffffu, (int)threadIdx.x, 0);
}
KERNEL void shuffle_from_outside(int* o) {
  if (threadIdx.x < 16) o[threadIdx.x] = __shfl_sync(0xffffu, (int)threadIdx.x, 20);
}
KERNEL void missing_barrier(int* o) {
  SHARED(int, all, [64]);
  all[threadIdx.x] = threadIdx.x;
  o[threadIdx.x] = all[63 - threadIdx.x];
}
KERNEL void writes_from_two_blocks(int* o) {
  o[0] = blockIdx.x;
}
KERNEL void reads_past_the_end(int* o) {
  o[threadIdx.x] = o[threadIdx.x + 1];
}
KERNEL void shared_past_the_end(int* o) {
  DYNAMIC_SHARED(memory);
  reinterpret_cast<int*>(memory)[threadIdx.x] = 1;
  o[threadIdx.x] = 1;
}
KERNEL void shifts_too_far(int* o) {
  o[threadIdx.x] = 1 << (threadIdx.x + 1);
}
KERNEL void misaligned_copy(int* o) {
  DYNAMIC_SHARED(memory);
  copy16_async(memory, o + 1, true);
  copy_commit();
  copy_wait<0>();
}
KERNEL void copy_in_flight_at_the_end(int* o) {
  DYNAMIC_SHARED(memory);
  copy16_async(memory + 16 * threadIdx.x, o, true);
  copy_commit();
}
KERNEL void missing_wait(int* o) {
  DYNAMIC_SHARED(memory);
  int* words = reinterpret_cast<int*>(memory);
  words[threadIdx.x * 4] = 7;
  copy16_async(words + threadIdx.x * 4, o, true);
  copy_commit();
  o[threadIdx.x] = words[threadIdx.x * 4];
  copy_wait<0>();
}
KERNEL void rows_in_one_bank(int* o) {
  DYNAMIC_SHARED(memory);
  u32 d[4];
  load_matrices(d, memory + threadIdx.x * 128);
  o[threadIdx.x] = d[0];
}
KERNEL void never_wrong(int* o) {
  const int t = threadIdx.x;
  const unsigned odd = __ballot_sync(ALL_LANES, t & 1);
  SHARED(int, count, [1]);
  if (t == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(count, 1);
  const int thirds = __syncthreads_count(t % 3 == 0);
  o[t] = (odd == 0xaaaaaaaau) + 2 * (thirds == 22) + 4 * (count[0] == 64) +
         8 * (__shfl_up_sync(ALL_LANES, t, 1) == ((t & 31) ? t - 1 : t)) +
         16 * (__shfl_down_sync(ALL_LANES, t, 4) == ((t & 31) < 28 ? t + 4 : t)) +
         32 * (__reduce_max_sync(ALL_LANES, (unsigned)t) == (t | 31));
}
KERNEL void round_trip(const float* f, u32* b, u32* h, float* fb, float* fh, int n) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i >= n) return;
  b[i] = from_float<bf16>(f[i]).bits;
  h[i] = from_float<fp16>(f[i]).bits;
  fb[i] = to_float(bf16{(u16)b[i]});
  fh[i] = to_float(fp16{(u16)h[i]});
}
// c = a b for one 16x16 and one 16x8 matrix (b given by columns), both through shared memory
KERNEL void one_product(const u32* a, const u32* b, float* c) {
  SHARED(u32, rows, [16][12]);
  SHARED(u32, columns, [16][12]);
  const int t = threadIdx.x;
  for (int i = t; i < 128; i += 32) rows[i / 8][i % 8] = a[i];
  for (int i = t; i < 128; i += 32) columns[i / 8][i % 8] = i < 64 ? b[i] : 0;
  __syncwarp();
  u32 x[4], y[4];
  load_matrices(x, &rows[t % 16][(t / 16) * 4]);
  load_matrices(y, &columns[t % 8 + (t / 16) * 8][(t / 8 % 2) * 4]);
  float d[4] = {};
  mma<ELEMENT>(d, x, y[0], y[1]);
  for (int i = 0; i < 4; i++) c[(t / 4 + 8 * (i / 2)) * 8 + t % 4 * 2 + i % 2] = d[i];
}
