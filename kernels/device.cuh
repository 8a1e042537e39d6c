// The device layer: what every .cu here is written against, and the only file with inline PTX.
//
// Needs no header of the CUDA toolkit, so that NVRTC compiles the files of this folder from nothing else. On the CPU (RELAY_EMULATOR) the
// emulator in kernels/emulator gives the same functions the same meaning. Floating-point contraction is off (--fmad=false): a product and a
// sum are one operation where the source says fmaf, and nowhere else, so that two kernels which share code share bits.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

#ifndef RELAY_EMULATOR

#define KERNEL extern "C" __global__
#define SHARED(T, name, dims) __shared__ T name dims
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) u8 name[]

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}

// 2^x. Two units in the last place; 2^-inf is 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even, the first in the low half.
template <class T>
__device__ u32 pack2(float low, float high);
template <>
__device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
template <>
__device__ __forceinline__ u32 pack2<fp16>(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

template <class T>
__device__ float2 unpack2(u32 pair);
template <>
__device__ __forceinline__ float2 unpack2<bf16>(u32 pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack2<fp16>(u32 pair) {
  float2 f;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(f.x), "=f"(f.y) : "r"(pair));
  return f;
}

// a * b + c of both halves, rounded once.
template <class T>
__device__ u32 fma2(u32 a, u32 b, u32 c);
template <>
__device__ __forceinline__ u32 fma2<bf16>(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <>
__device__ __forceinline__ u32 fma2<fp16>(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// c += a b on one warp: a 16x16 (rows), b 16x8 (columns), in the fragment layout of mma.m16n8k16.
template <class T>
__device__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements from shared memory; lane i gives the address of row i % 8 of matrix i / 8, 16-byte aligned.
__device__ __forceinline__ void load_matrices(u32 (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}

// 16 bytes from global to shared memory in the background; zeros where `there` is false (src is then not read).
__device__ __forceinline__ void copy16_async(void* dst, const void* src, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most N of this thread's groups are under way.
template <int N>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// 16 bytes that nobody will read again soon: past the first-level cache.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// 8 bytes, likewise.
__device__ __forceinline__ uint2 load_stream8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

#endif  // RELAY_EMULATOR

constexpr u32 ALL_LANES = 0xffffffffu;

template <class T>
__device__ __forceinline__ float to_float(T x) {
  return unpack2<T>(x.bits).x;
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
  T t;
  t.bits = (u16)pack2<T>(x, 0.f);
  return t;
}
__device__ __forceinline__ float minus_infinity() {
  return __int_as_float((int)0xff800000u);
}
__device__ __forceinline__ float not_a_number() {
  return __int_as_float(0x7fffffff);
}
