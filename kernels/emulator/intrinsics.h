// What CUDA C++ has and C++ has not: qualifiers, vector types, loads, bits, arithmetic with a fixed rounding, atomics.
#pragma once
#include <climits>
#include <cmath>

#include "warp.h"

#define KERNEL static
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define SHARED(T, name, dims) \
  using name##_type = T dims; \
  static char name##_key;     \
  name##_type& name = emulator::static_shared<name##_type>(&name##_key)
#define DYNAMIC_SHARED(name) char* const name = emulator::block.dynamic

#define EMULATED_VECTOR2(T, N)      \
  struct alignas(2 * sizeof(T)) N { \
    T x, y;                         \
  };                                \
  inline N make_##N(T x, T y) {     \
    return {x, y};                  \
  }
#define EMULATED_VECTOR4(T, N)                                \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N { \
    T x, y, z, w;                                             \
  };                                                          \
  inline N make_##N(T x, T y, T z, T w) {                     \
    return {x, y, z, w};                                      \
  }
EMULATED_VECTOR2(float, float2)
EMULATED_VECTOR2(int, int2)
EMULATED_VECTOR2(unsigned, uint2)
EMULATED_VECTOR2(unsigned long long, ulonglong2)
EMULATED_VECTOR4(float, float4)
EMULATED_VECTOR4(int, int4)
EMULATED_VECTOR4(unsigned, uint4)

template <class T>
T __ldg(const T* p) {
  return *p;
}
inline int __float_as_int(float f) {
  return emulator::bits_of<int>(f);
}
inline unsigned __float_as_uint(float f) {
  return emulator::bits_of<unsigned>(f);
}
inline float __int_as_float(int i) {
  return emulator::bits_of<float>(i);
}
inline float __uint_as_float(unsigned i) {
  return emulator::bits_of<float>(i);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __clz(int x) {
  return x ? __builtin_clz((unsigned)x) : 32;
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
  const uint64_t both = ((uint64_t)b << 32) | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned s = (selectors >> (4 * i)) & 15, byte = (both >> (8 * (s & 7))) & 255;
    result |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return result;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline float rsqrtf(float a) {
  return 1.f / std::sqrt(a);
}
inline unsigned long long __float2ull_rn(float f) {
  return (unsigned long long)std::nearbyint(f);
}
inline unsigned long long __double2ull_ru(double d) {
  return (unsigned long long)std::ceil(d);
}
inline int __float2int_rn(float f) {
  return (int)std::nearbyint(f);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) > T(b) ? T(a) : T(b);
}
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(a) : T(b);
}

template <class T>
T atomicAdd(T* p, std::common_type_t<T> v) {
  return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* p, std::common_type_t<T> v) {
  return __atomic_fetch_or(p, v, __ATOMIC_RELAXED);
}
template <class T, class F>
T emulated_exchange(T* p, F f) {
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, f(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
  return old;
}
template <class T>
T atomicMax(T* p, std::common_type_t<T> v) {
  return emulated_exchange(p, [=](T old) { return old > v ? old : v; });
}
template <class T>
T atomicMin(T* p, std::common_type_t<T> v) {
  return emulated_exchange(p, [=](T old) { return old < v ? old : v; });
}
