// bf16 and fp16 as bit patterns: to float exactly, from float rounded to nearest even.
#pragma once
#include "intrinsics.h"

namespace emulator {

inline uint16_t to_bf16(float f) {
  const uint32_t u = __float_as_uint(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float of_bf16(uint16_t h) {
  return __uint_as_float((uint32_t)h << 16);
}

inline uint16_t to_fp16(float f) {
  const uint32_t u = __float_as_uint(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return 0x7fff;
  if (a >= 0x477ff000) return uint16_t(sign | 0x7c00);                                               // 65520 and more round to infinity
  if (a < 0x38800000) return uint16_t(sign | (int)std::nearbyint(__uint_as_float(a) * 16777216.f));  // units of 2^-24
  return uint16_t(sign | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));
}
inline float of_fp16(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)fraction * 5.9604644775390625e-8f));
  return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

}  // namespace emulator
