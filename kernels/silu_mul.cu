// The gate of a gated network: activation(gate) * up, where both lie side by side in each row.
//
// Grid (ceil(width / 2048), rows), 256 threads: a thread computes 8 neighbouring elements (16 bytes) of one row. Everything in float32,
// rounded once at the end; an element's bits depend on its gate and its up alone.
//
// Compiled with ELEMENT (bf16, fp16) and ACTIVATION (silu, gelu_tanh).
#include "device.cuh"

namespace {
using T = ELEMENT;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float sigmoid(float x) {
  return __fdiv_rn(1.f, 1.f + exp2_fast(-x * LOG2_E));
}
__device__ __forceinline__ float silu(float x) {
  return x * sigmoid(x);
}
// x (1 + tanh(t)) / 2 with t = sqrt(2 / pi) (x + 0.044715 x^3), which is x sigmoid(2 t)
__device__ __forceinline__ float gelu_tanh(float x) {
  return x * sigmoid(x * (1.5957691216057308f + 0.07135481282565148f * (x * x)));
}
}  // namespace

KERNEL void __launch_bounds__(256) silu_mul(const T* __restrict__ gate_up, T* __restrict__ out, int width) {
  const int column = (blockIdx.x * 256 + threadIdx.x) * 8;
  if (column >= width) return;
  const T* gate = gate_up + 2 * (i64)blockIdx.y * width + column;
  const uint4 g = load_stream(gate), u = load_stream(gate + width);
  const u32 gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
  u32 y[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 a = unpack2<T>(gates[i]), b = unpack2<T>(ups[i]);
    y[i] = pack2<T>(ACTIVATION(a.x) * b.x, ACTIVATION(a.y) * b.y);
  }
  *reinterpret_cast<uint4*>(out + (i64)blockIdx.y * width + column) = make_uint4(y[0], y[1], y[2], y[3]);
}
