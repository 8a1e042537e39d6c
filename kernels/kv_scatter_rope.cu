// Rotary embedding of queries and keys, and the scatter of keys and values into the paged pool, in one pass over the rows of a step.
//
// One block of 128 threads for each row. A thread takes the same 8 elements (16 bytes) of both halves of one head at a time: of the
// queries, which are turned and go to `q`; of the keys, turned, and of the values, as they are, which go to the row's slot in the pool.
// Neighbouring threads take neighbouring bytes. Products and sums are rounded one by one in float32, as the reference does, and the result
// once more to the element's type. A row of sequence -1 is padding: its queries are turned, its keys and values go nowhere.
//
// Compiled with ELEMENT (bf16, fp16).
#include "device.cuh"

namespace {
using T = ELEMENT;

// a' = a cos - b sin, b' = b cos + a sin, for 8 pairs
__device__ __forceinline__ void turn(uint4& a, uint4& b, const float* __restrict__ cos, const float* __restrict__ sin) {
  u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 x = unpack2<T>(low[i]), y = unpack2<T>(high[i]);
    const float2 c = __ldg(reinterpret_cast<const float2*>(cos) + i), s = __ldg(reinterpret_cast<const float2*>(sin) + i);
    low[i] = pack2<T>(x.x * c.x - y.x * s.x, x.y * c.y - y.y * s.y);
    high[i] = pack2<T>(y.x * c.x + x.x * s.x, y.y * c.y + x.y * s.y);
  }
  a = make_uint4(low[0], low[1], low[2], low[3]);
  b = make_uint4(high[0], high[1], high[2], high[3]);
}
}  // namespace

KERNEL void __launch_bounds__(128)
    kv_scatter_rope(const T* __restrict__ qkv, const float* __restrict__ cos, const float* __restrict__ sin,
                    const int* __restrict__ positions, const int* __restrict__ sequence, const int* __restrict__ table, T* __restrict__ q,
                    T* __restrict__ keys, T* __restrict__ values, int n_heads, int n_kv_heads, int head_dim, int max_blocks,
                    int page_shift) {
  const int row = blockIdx.x, half = head_dim / 2, chunks = half / 8, position = positions[row], which = sequence[row];
  const int n_items = (n_heads + 2 * n_kv_heads) * chunks;
  i64 slot = 0;  // of the row's first K/V head
  if (which >= 0) {
    const i64 block = table[(i64)which * max_blocks + (position >> page_shift)];
    slot = ((block * n_kv_heads) << page_shift) + (position & ((1 << page_shift) - 1));
  }
  qkv += (i64)row * (n_heads + 2 * n_kv_heads) * head_dim;
  for (int item = threadIdx.x; item < n_items; item += 128) {
    const int head = item / chunks, column = (item % chunks) * 8;
    const T* from = qkv + (i64)head * head_dim + column;
    uint4 a = load_stream(from), b = load_stream(from + half);
    if (head < n_heads + n_kv_heads) turn(a, b, cos + (i64)position * half + column, sin + (i64)position * half + column);
    T* to = q + ((i64)row * n_heads + head) * head_dim;
    if (head >= n_heads) {
      if (which < 0) continue;
      const int kv_head = (head - n_heads) % n_kv_heads;
      to = (head < n_heads + n_kv_heads ? keys : values) + (slot + ((i64)kv_head << page_shift)) * head_dim;
    }
    *reinterpret_cast<uint4*>(to + column) = a;
    *reinterpret_cast<uint4*>(to + half + column) = b;
  }
}
