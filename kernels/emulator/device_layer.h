// The functions of kernels/device.cuh that are inline PTX on a GPU.
#pragma once
#include "numbers.h"

struct bf16;
struct fp16;

inline float exp2_fast(float x) {
  return std::exp2(x);
}

template <class T>
float emulated_value(uint16_t bits);
template <>
inline float emulated_value<bf16>(uint16_t bits) {
  return emulator::of_bf16(bits);
}
template <>
inline float emulated_value<fp16>(uint16_t bits) {
  return emulator::of_fp16(bits);
}
template <class T>
uint16_t emulated_bits(float value);
template <>
inline uint16_t emulated_bits<bf16>(float value) {
  return emulator::to_bf16(value);
}
template <>
inline uint16_t emulated_bits<fp16>(float value) {
  return emulator::to_fp16(value);
}

template <class T>
uint32_t pack2(float low, float high) {
  return emulated_bits<T>(low) | (uint32_t)emulated_bits<T>(high) << 16;
}
template <class T>
float2 unpack2(uint32_t pair) {
  return {emulated_value<T>(uint16_t(pair)), emulated_value<T>(uint16_t(pair >> 16))};
}

// Exact in float32 for what kernels use it for: products and sums that have no more bits than the result.
template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = unpack2<T>(a), y = unpack2<T>(b), z = unpack2<T>(c);
  return pack2<T>(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}

namespace emulator {

struct MmaFragment {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

// Products are exact in float32 or nearly so, and are added in order of k, to one running sum. Hardware adds several at once.
template <class T>
void multiply(WarpRequest** lanes) {
  float a[16][16], b[8][16];
  for (int lane = 0; lane < 32; lane++) {
    const auto& f = *(MmaFragment*)lanes[lane]->fragment;
    const int g = lane >> 2, t = lane & 3;
    for (int i = 0; i < 4; i++) {
      const float2 pair = unpack2<T>(f.a[i]);
      a[g + 8 * (i & 1)][2 * t + 8 * (i >> 1)] = pair.x;
      a[g + 8 * (i & 1)][2 * t + 8 * (i >> 1) + 1] = pair.y;
    }
    for (int i = 0; i < 2; i++) {
      const float2 pair = unpack2<T>(f.b[i]);
      b[g][2 * t + 8 * i] = pair.x;
      b[g][2 * t + 8 * i + 1] = pair.y;
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    auto& f = *(MmaFragment*)lanes[lane]->fragment;
    for (int i = 0; i < 4; i++) {
      const float *row = a[(lane >> 2) + 8 * (i >> 1)], *column = b[2 * (lane & 3) + (i & 1)];
      float sum = f.c[i];
      for (int k = 0; k < 16; k++) sum += row[k] * column[k];
      f.c[i] = sum;
    }
  }
}

struct MatrixFragment {
  uint16_t row[8];  // which this lane's address names
  uintptr_t address;
  uint32_t* d;
};

template <bool TRANSPOSED>
void load(WarpRequest** lanes) {
  auto fragment = [&](int lane) -> MatrixFragment& { return *(MatrixFragment*)lanes[lane]->fragment; };
  for (int m = 0; m < 4; m++) {
    uint32_t banks = 0;
    for (int i = 0; i < 8; i++) banks |= 1u << ((fragment(8 * m + i).address / 16) % 8);
    if (banks != 0xff) fail("load_matrices: rows of one matrix lie in the same banks (line " + std::to_string(lanes[0]->line) + ")");
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane >> 2, t = lane & 3;
      const uint16_t low = TRANSPOSED ? fragment(8 * m + 2 * t).row[g] : fragment(8 * m + g).row[2 * t];
      const uint16_t high = TRANSPOSED ? fragment(8 * m + 2 * t + 1).row[g] : fragment(8 * m + g).row[2 * t + 1];
      fragment(lane).d[m] = low | (uint32_t)high << 16;
    }
  }
}

// A lane's row is read by that lane, before it meets the others: what another lane copied must have been waited for by then.
template <bool TRANSPOSED>
void load_fragment(uint32_t (&d)[4], const void* row, int line) {
  MatrixFragment f{};
  f.address = (uintptr_t)row;
  f.d = d;
  if (f.address & 15) fail("load_matrices: a row is not aligned to 16 bytes (line " + std::to_string(line) + ")");
  for (int i = 0; i < 8; i++) f.row[i] = ((const uint16_t*)row)[i];
  with_fragments(&f, load<TRANSPOSED>, line);
}

inline void finish(std::vector<AsyncCopy>& copies) {
  for (auto& c : copies)
    for (int i = 0; i < 4; i++) ((uint32_t*)c.dst)[i] = c.there ? ((const uint32_t*)c.src)[i] : 0;
}

}  // namespace emulator

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, EMULATED_LINE) {
  emulator::MmaFragment f{c, a, {b0, b1}};
  emulator::with_fragments(&f, emulator::multiply<T>, line);
}
inline void load_matrices(uint32_t (&d)[4], const void* row, EMULATED_LINE) {
  emulator::load_fragment<false>(d, row, line);
}
inline void load_matrices_transposed(uint32_t (&d)[4], const void* row, EMULATED_LINE) {
  emulator::load_fragment<true>(d, row, line);
}

// The bytes land at the wait; from the call until then there is NaN, so that neither what was there before nor what is to come can be read.
inline void copy16_async(void* dst, const void* src, bool there, EMULATED_LINE) {
  if (((uintptr_t)dst & 15) || (there && ((uintptr_t)src & 15)))
    emulator::fail("copy16_async: an address is not aligned to 16 bytes (line " + std::to_string(line) + ")");
  for (int i = 0; i < 4; i++) ((uint32_t*)dst)[i] = ~0u;
  emulator::Unwatched unwatched;
  emulator::block.current->open.push_back({dst, src, there});
}
inline void copy_commit() {
  emulator::Unwatched unwatched;
  auto& fiber = *emulator::block.current;
  fiber.groups.push_back(std::move(fiber.open));
  fiber.open.clear();
}
template <int N>
void copy_wait() {
  for (;;) {
    std::vector<emulator::AsyncCopy> oldest;
    {
      emulator::Unwatched unwatched;
      auto& groups = emulator::block.current->groups;
      if ((int)groups.size() <= N) return;
      oldest = std::move(groups.front());
      groups.erase(groups.begin());
    }
    emulator::finish(oldest);
  }
}
inline uint4 load_stream(const void* p) {
  if ((uintptr_t)p & 15) emulator::fail("load_stream: an address is not aligned to 16 bytes");
  return *(const uint4*)p;
}
inline uint2 load_stream8(const void* p) {
  if ((uintptr_t)p & 7) emulator::fail("load_stream8: an address is not aligned to 8 bytes");
  return *(const uint2*)p;
}
