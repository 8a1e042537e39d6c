// y = W x over weights that stay packed, for a few rows of x: bound by reading W once.
//
// A block of 8 warps computes 32 outputs (two mma tiles of 16) for up to 8 * NT rows, grid (ceil(n_out / 32), row tiles). Inputs come in
// chunks of
// 64. Warp w takes the w-th eighth of the chunks, in ascending order, so that it streams through memory that lies together; the warps' sums
// meet in shared memory and are added in order of w. That split follows from n_in alone.
//
// The weights are the rows of mma, packed so that a lane's 16 bytes are its fragments: four of 16 x 16 in 4 bits, two in 8 bits. x is the
// columns; within each 32 inputs a lane's fragments take 8 neighbouring ones, which it reads with one load of 16 bytes. A fragment is
// turned into exact small integers of the element's type by bit operations. Each 32 inputs have two mma steps into fresh accumulators, and
// the result is scaled in float32: y += scale * sum(q x) + least * sum(x), with sum(x) from a fragment of ones. The next DEPTH chunks are
// on their way into registers meanwhile.
//
// Compiled with ELEMENT (bf16, fp16) and FORMAT: Q4_0, Q4_1, Q4_K, Q4_Z (scale and zero point for each `group` inputs), Q8_0, Q8_G and F8_G
// (a float32 scale for each `group` inputs). Layouts: quant_matvec.py.
#include "device.cuh"

namespace {
using T = ELEMENT;
enum Format { Q4_0, Q4_1, Q4_K, Q4_Z, Q8_0, Q8_G, F8_G };
constexpr Format KIND = FORMAT;
constexpr bool FOUR_BITS = KIND <= Q4_Z, HAS_LEAST = KIND == Q4_1 || KIND == Q4_K || KIND == Q4_Z;
constexpr int WARPS = 8, MT = 2, DEPTH = FOUR_BITS ? 2 : 1, CODES = 2 / DEPTH, RECORD = KIND == Q4_1 ? 4 : 2;  // in 16 and 4 bytes

template <class E>
struct Constants;
template <>
struct Constants<bf16> {
  static constexpr u32 ONE = 0x3f803f80u, MINUS_ONE = 0xbf80bf80u, MAGIC = 0x43004300u, MINUS_128 = 0xc300c300u, MINUS_136 = 0xc308c308u;
  static constexpr int NIBBLE_SHIFT = 0, FP8_SHIFT = 4;
  static constexpr u32 FP8_SCALE = 0x7b807b80u;  // 2^120
};
template <>
struct Constants<fp16> {
  static constexpr u32 ONE = 0x3c003c00u, MINUS_ONE = 0xbc00bc00u, MAGIC = 0x58005800u, MINUS_128 = 0xd800d800u, MINUS_136 = 0xd840d840u;
  static constexpr int NIBBLE_SHIFT = 3, FP8_SHIFT = 7;
  static constexpr u32 FP8_SCALE = 0x5c005c00u;  // 2^8
};
using C = Constants<T>;

// What a lane needs of one tile of 16 outputs and 64 inputs; of 8 bits there are two vectors of codes, for 32 inputs each.
struct Chunk {
  uint4 codes[CODES];
  u32 record[RECORD], super[2];
};

__device__ __forceinline__ u32 word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A pair of numbers from 0 to 15, in the low 4 bits of both halves, as 128 + q: MAGIC is 128, whose last bits count in ones.
__device__ __forceinline__ u32 small(u32 pair) {
  return pair << C::NIBBLE_SHIFT | C::MAGIC;
}

// Four pairs of 4 bits: pair i in bits 4 i and 16 + 4 i.
__device__ __forceinline__ void from_nibbles(u32 (&a)[4], u32 codes) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = fma2<T>(small(codes >> (4 * i) & 0x000f000fu), C::ONE, KIND == Q4_0 ? C::MINUS_136 : C::MINUS_128);
}

// Two bytes, moved to the low byte of both halves, as integers of two's complement, or as e4m3.
__device__ __forceinline__ u32 from_bytes(u32 bytes) {
  if (KIND == F8_G) return fma2<T>((bytes & 0x00800080u) << 8 | (bytes & 0x007f007fu) << C::FP8_SHIFT, C::FP8_SCALE, 0x80008000u);
  // q = (128 + low 7 bits) - (128 + 128 * sign)
  const u32 low = (bytes & 0x007f007fu) << C::NIBBLE_SHIFT | C::MAGIC, sign = (bytes & 0x00800080u) << C::NIBBLE_SHIFT;
  return fma2<T>(sign + C::MAGIC, C::MINUS_ONE, low);
}

// The fragment of 16 inputs, `step` 0 or 1 of the 32 inputs `part`.
__device__ __forceinline__ void fragment(u32 (&a)[4], const Chunk& chunk, int part, int step) {
  if (FOUR_BITS) {
    from_nibbles(a, word(chunk.codes[0], part * 2 + step));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 both = word(chunk.codes[FOUR_BITS ? 0 : part], step * 2 + i / 2);
    a[i] = from_bytes(__byte_perm(both, 0, i % 2 ? 0x4342u : 0x4140u));
  }
}

// For this lane's two outputs. Halves are the file's own fp16, whatever ELEMENT is.
__device__ __forceinline__ void scales(const Chunk& chunk, int part, float2& scale, float2& least) {
  least = make_float2(0.f, 0.f);
  if (KIND == Q4_0 || KIND == Q8_0) {
    scale = unpack2<fp16>(chunk.record[part]);
  } else if (KIND == Q4_1) {
    scale = unpack2<fp16>(chunk.record[part * 2]);
    least = unpack2<fp16>(chunk.record[(part * 2 + 1) % RECORD]);
  } else if (KIND == Q4_K) {
    const u32 small = chunk.record[part];
    const float2 d = unpack2<fp16>(chunk.super[0]), d_least = unpack2<fp16>(chunk.super[1]);
    scale = make_float2(d.x * (float)(small & 255), d.y * (float)(small >> 8 & 255));
    least = make_float2(-d_least.x * (float)(small >> 16 & 255), -d_least.y * (float)(small >> 24));
  } else if (KIND == Q4_Z) {
    const float2 zero = unpack2<fp16>(chunk.record[1]);
    scale = unpack2<fp16>(chunk.record[0]);
    least = make_float2(-scale.x * zero.x, -scale.y * zero.y);
  } else {
    scale = make_float2(__uint_as_float(chunk.record[0]), __uint_as_float(chunk.record[1]));
  }
}

template <int NT>
__device__ __forceinline__ void multiply(const uint4* __restrict__ codes, const u32* __restrict__ records, const u32* __restrict__ supers,
                                         const T* __restrict__ x, void* __restrict__ out, int n_rows, int n_out, int n_in,
                                         int chunks_per_record, int as_float) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row0 = blockIdx.y * NT * 8;
  const int n_chunks = n_in / 64, share = (n_chunks + WARPS - 1) / WARPS, begin = warp * share, end = min(n_chunks, begin + share);
  const int n_records = (n_chunks + chunks_per_record - 1) / chunks_per_record, n_supers = (n_chunks + 3) / 4;
  const i64 tile0 = blockIdx.x * MT;

  auto load = [&](Chunk& chunk, int m, int at) {
    const i64 tile = tile0 + m;
#pragma unroll
    for (int i = 0; i < CODES; i++) chunk.codes[i] = load_stream(codes + ((tile * n_chunks + at) * CODES + i) * 32 + lane);
    const u32* record = records + ((tile * n_records + at / chunks_per_record) * 8 + g) * RECORD;
    const uint2 first = load_stream8(record), second = RECORD > 2 ? load_stream8(record + 2) : first;
    chunk.record[0] = first.x;
    chunk.record[1] = first.y;
    chunk.record[RECORD - 2] = second.x;
    chunk.record[RECORD - 1] = second.y;
    if (KIND == Q4_K) {
      const uint2 both = load_stream8(supers + ((tile * n_supers + at / 4) * 8 + g) * 2);
      chunk.super[0] = both.x;
      chunk.super[1] = both.y;
    }
  };

  float c[MT][NT][4];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) c[m][n][i] = 0.f;

  auto add = [&](const Chunk(&chunk)[MT], int at) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      uint4 b[NT];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int row = row0 + n * 8 + g;
        b[n] = row < n_rows ? __ldg(reinterpret_cast<const uint4*>(x + (i64)row * n_in + at * 64 + part * 32 + t * 8))
                            : make_uint4(0, 0, 0, 0);
      }
      float sums[NT][4];
      if (HAS_LEAST) {
        const u32 ones[4] = {C::ONE, C::ONE, C::ONE, C::ONE};
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) sums[n][i] = 0.f;
          mma<T>(sums[n], ones, b[n].x, b[n].y);
          mma<T>(sums[n], ones, b[n].z, b[n].w);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; m++) {
        u32 a[2][4];
        fragment(a[0], chunk[m], part, 0);
        fragment(a[1], chunk[m], part, 1);
        float2 scale, least;
        scales(chunk[m], part, scale, least);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float dot[4] = {0.f, 0.f, 0.f, 0.f};
          mma<T>(dot, a[0], b[n].x, b[n].y);
          mma<T>(dot, a[1], b[n].z, b[n].w);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            c[m][n][i] = fmaf(i < 2 ? scale.x : scale.y, dot[i], c[m][n][i]);
            if (HAS_LEAST) c[m][n][i] = fmaf(i < 2 ? least.x : least.y, sums[n][i], c[m][n][i]);
          }
        }
      }
    }
  };

  Chunk now[DEPTH][MT], next[DEPTH][MT];
  auto load_all = [&](Chunk(&to)[DEPTH][MT], int at) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
#pragma unroll
      for (int m = 0; m < MT; m++)
        if (at + d < end) load(to[d][m], m, at + d);
  };
  load_all(now, begin);
  for (int at = begin; at < end; at += 2 * DEPTH) {
    load_all(next, at + DEPTH);
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
      if (at + d < end) add(now[d], at + d);
    load_all(now, at + 2 * DEPTH);
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
      if (at + DEPTH + d < end) add(next[d], at + DEPTH + d);
  }

  // [warp][row of x][output]: neighbouring threads then write neighbouring outputs
  SHARED(float, parts, [WARPS][NT * 8][MT * 16 + 1]);
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) parts[warp][n * 8 + 2 * t + i % 2][m * 16 + g + i / 2 * 8] = c[m][n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < NT * 8 * MT * 16; i += WARPS * 32) {
    const int row = i / (MT * 16), output = i % (MT * 16);
    if (row0 + row >= n_rows || tile0 * 16 + output >= n_out) continue;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w][row][output];
    const i64 at = (i64)(row0 + row) * n_out + tile0 * 16 + output;
    if (as_float)
      static_cast<float*>(out)[at] = sum;
    else
      static_cast<T*>(out)[at] = from_float<T>(sum);
  }
}
}  // namespace

KERNEL void __launch_bounds__(256)
    quant_matvec_8(const uint4* __restrict__ codes, const u32* __restrict__ records, const u32* __restrict__ supers,
                   const T* __restrict__ x, void* __restrict__ out, int n_rows, int n_out, int n_in, int chunks_per_record, int as_float) {
  multiply<1>(codes, records, supers, x, out, n_rows, n_out, n_in, chunks_per_record, as_float);
}
KERNEL void __launch_bounds__(256)
    quant_matvec_32(const uint4* __restrict__ codes, const u32* __restrict__ records, const u32* __restrict__ supers,
                    const T* __restrict__ x, void* __restrict__ out, int n_rows, int n_out, int n_in, int chunks_per_record, int as_float) {
  multiply<4>(codes, records, supers, x, out, n_rows, n_out, n_in, chunks_per_record, as_float);
}
