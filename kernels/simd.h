// Sixteen lanes, whatever the processor: the one vocabulary in which all arithmetic here is written.
//
// `Floats` is 16 float lanes, `Ints` 64 bytes read as 16 x int32, 32 x int16 or 64 x int8. With AVX-512 each is one register, with AVX2 two;
// every operation below does the same to each lane in both, and reductions over lanes follow one fixed tree (8 + 8, 4 + 4, 2 + 2, 1 + 1).
// So the two give the same bits, as long as nobody contracts a multiplication and an addition behind our back (-ffp-contract=off).
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(RELAY_EMULATED_AVX512)
#include "emulated_avx512.h"  // tests/kernels: the AVX-512 half in plain C++
#else
#include <immintrin.h>
#endif

namespace relay {

#define RELAY_INLINE static inline __attribute__((always_inline))

#if defined(RELAY_AVX512)

constexpr bool wide_registers = true;  // 32 registers of 16 lanes

struct Floats {
    __m512 v;
};
struct Ints {
    __m512i v;
};

RELAY_INLINE Floats zeros() { return {_mm512_setzero_ps()}; }
RELAY_INLINE Floats all(float x) { return {_mm512_set1_ps(x)}; }
RELAY_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
RELAY_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
RELAY_INLINE Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
RELAY_INLINE Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
RELAY_INLINE Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
RELAY_INLINE Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
RELAY_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
RELAY_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
RELAY_INLINE Floats fnma(Floats a, Floats b, Floats c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
RELAY_INLINE Floats round_even(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
RELAY_INLINE Floats absolute(Floats a) { return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))}; }
RELAY_INLINE Floats from_halves(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)))}; }
RELAY_INLINE void to_halves(void* p, Floats a) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
RELAY_INLINE Floats from_bytes(const void* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))))}; }
RELAY_INLINE Floats from_signed_bytes(const void* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))))}; }
RELAY_INLINE Floats as_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
RELAY_INLINE Ints as_ints(Floats a) { return {_mm512_castps_si512(a.v)}; }
RELAY_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
RELAY_INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }

RELAY_INLINE Ints no_ints() { return {_mm512_setzero_si512()}; }
RELAY_INLINE Ints all(int32_t x) { return {_mm512_set1_epi32(x)}; }
RELAY_INLINE Ints all_shorts(int16_t x) { return {_mm512_set1_epi16(x)}; }
RELAY_INLINE Ints load_ints(const void* p) { return {_mm512_loadu_si512(p)}; }
RELAY_INLINE void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a.v); }
RELAY_INLINE Ints broadcast_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return {_mm512_set1_epi32(word)};
}
RELAY_INLINE Ints both(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
RELAY_INLINE Ints either(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
RELAY_INLINE Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
RELAY_INLINE Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
RELAY_INLINE Ints sub_shorts(Ints a, Ints b) { return {_mm512_sub_epi16(a.v, b.v)}; }
template <int N> RELAY_INLINE Ints shift_left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> RELAY_INLINE Ints shift_right(Ints a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> RELAY_INLINE Ints shift_shorts_left(Ints a) { return {_mm512_slli_epi16(a.v, N)}; }
template <int N> RELAY_INLINE Ints shift_shorts_right(Ints a) { return {_mm512_srli_epi16(a.v, N)}; }
template <int N> RELAY_INLINE Ints shift_shorts_signed(Ints a) { return {_mm512_srai_epi16(a.v, N)}; }
// acc + w0 x0 + w1 x1 of the int16 pairs of each lane
RELAY_INLINE Ints dot_shorts(Ints acc, Ints w, Ints x) { return {_mm512_dpwssd_epi32(acc.v, w.v, x.v)}; }
// acc + the four u8 x s8 products of each lane. What accumulates is read by `bytes_dot` only.
RELAY_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)}; }
RELAY_INLINE Ints bytes_dot(Ints acc) { return acc; }
// `a` in lanes below n, `b` in the others
RELAY_INLINE Floats lanes_below(int n, Floats a, Floats b) {
    const __mmask16 mask = n <= 0 ? 0 : n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1);
    return {_mm512_mask_mov_ps(b.v, mask, a.v)};
}
// bit i: a > b in lane i
RELAY_INLINE uint32_t greater(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
RELAY_INLINE uint32_t at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
RELAY_INLINE __m256 lower(Floats a) { return _mm512_castps512_ps256(a.v); }
RELAY_INLINE __m256 upper(Floats a) { return _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(a.v), 1)); }
RELAY_INLINE __m256i lower(Ints a) { return _mm512_castsi512_si256(a.v); }
RELAY_INLINE __m256i upper(Ints a) { return _mm512_extracti64x4_epi64(a.v, 1); }
// forbids the compiler to know what `a` is, and so to compute with it once for all
RELAY_INLINE void forget(Ints& a) { asm volatile("" : "+m"(a)); }

#else

constexpr bool wide_registers = false;  // 16 registers of 8 lanes

struct Floats {
    __m256 lo, hi;
};
struct Ints {
    __m256i lo, hi;
};

RELAY_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
RELAY_INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
RELAY_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
RELAY_INLINE void store(float* p, Floats a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
RELAY_INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
RELAY_INLINE Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
RELAY_INLINE Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
RELAY_INLINE Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
RELAY_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
RELAY_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
RELAY_INLINE Floats fnma(Floats a, Floats b, Floats c) { return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)}; }
RELAY_INLINE Floats round_even(Floats a) {
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
RELAY_INLINE Floats absolute(Floats a) {
    const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
RELAY_INLINE Floats from_halves(const void* p) {
    const __m128i* q = static_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
RELAY_INLINE void to_halves(void* p, Floats a) {
    __m128i* q = static_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
RELAY_INLINE Floats from_bytes(const void* p) {
    const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
RELAY_INLINE Floats from_signed_bytes(const void* p) {
    const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
RELAY_INLINE Floats as_floats(Ints a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
RELAY_INLINE Ints as_ints(Floats a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
RELAY_INLINE Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
RELAY_INLINE Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

RELAY_INLINE Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
RELAY_INLINE Ints all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
RELAY_INLINE Ints all_shorts(int16_t x) { return {_mm256_set1_epi16(x), _mm256_set1_epi16(x)}; }
RELAY_INLINE Ints load_ints(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
RELAY_INLINE void store_ints(void* p, Ints a) {
    __m256i* q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, a.lo);
    _mm256_storeu_si256(q + 1, a.hi);
}
RELAY_INLINE Ints broadcast_word(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    const __m256i v = _mm256_set1_epi32(word);
    return {v, v};
}
RELAY_INLINE Ints both(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
RELAY_INLINE Ints either(Ints a, Ints b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
RELAY_INLINE Ints add(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
RELAY_INLINE Ints sub(Ints a, Ints b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
RELAY_INLINE Ints sub_shorts(Ints a, Ints b) { return {_mm256_sub_epi16(a.lo, b.lo), _mm256_sub_epi16(a.hi, b.hi)}; }
template <int N> RELAY_INLINE Ints shift_left(Ints a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N> RELAY_INLINE Ints shift_right(Ints a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
template <int N> RELAY_INLINE Ints shift_shorts_left(Ints a) { return {_mm256_slli_epi16(a.lo, N), _mm256_slli_epi16(a.hi, N)}; }
template <int N> RELAY_INLINE Ints shift_shorts_right(Ints a) { return {_mm256_srli_epi16(a.lo, N), _mm256_srli_epi16(a.hi, N)}; }
template <int N> RELAY_INLINE Ints shift_shorts_signed(Ints a) { return {_mm256_srai_epi16(a.lo, N), _mm256_srai_epi16(a.hi, N)}; }
// Compilers may reorder integer sums, and do: into trees that need more registers than there are. An empty statement in between forbids it.
RELAY_INLINE Ints in_order(__m256i lo, __m256i hi) {
    asm("" : "+x"(lo), "+x"(hi));
    return {lo, hi};
}
// acc + w0 x0 + w1 x1 of the int16 pairs of each lane
RELAY_INLINE Ints dot_shorts(Ints acc, Ints w, Ints x) {
    return in_order(_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, x.lo)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, x.hi)));
}
// acc + the four u8 x s8 products of each lane. What accumulates (two int16 sums a lane: eight calls with weights below 16 fit) is read by
// `bytes_dot` only.
RELAY_INLINE Ints dot_bytes(Ints acc, Ints w, Ints x) {
    return in_order(_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, x.lo)), _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, x.hi)));
}
RELAY_INLINE Ints bytes_dot(Ints acc) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(acc.lo, one), _mm256_madd_epi16(acc.hi, one)};
}
// `a` in lanes below n, `b` in the others
RELAY_INLINE Floats lanes_below(int n, Floats a, Floats b) {
    const __m256i limit = _mm256_set1_epi32(n), low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, low))),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, high)))};
}
// bit i: a > b in lane i
RELAY_INLINE uint32_t greater(Floats a, Floats b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) << 8;
}
RELAY_INLINE uint32_t at_least(Floats a, Floats b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))) << 8;
}
RELAY_INLINE __m256 lower(Floats a) { return a.lo; }
RELAY_INLINE __m256 upper(Floats a) { return a.hi; }
RELAY_INLINE __m256i lower(Ints a) { return a.lo; }
RELAY_INLINE __m256i upper(Ints a) { return a.hi; }
// forbids the compiler to know what `a` is, and so to compute with it once for all
RELAY_INLINE void forget(Ints& a) { asm volatile("" : "+x"(a.lo), "+x"(a.hi)); }

#endif

// The fixed tree of every reduction: lanes i and i + 8, then i + 4, i + 2, i + 1.
RELAY_INLINE float sum_of_lanes(Floats a) {
    const __m256 eight = _mm256_add_ps(lower(a), upper(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
RELAY_INLINE float max_of_lanes(Floats a) {
    const __m256 eight = _mm256_max_ps(lower(a), upper(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
RELAY_INLINE int32_t sum_of_lanes(Ints a) {
    const __m256i eight = _mm256_add_epi32(lower(a), upper(a));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}

// exp(x) for x <= 88, within 2 units in the last place; exp(0) is 1; below -87.3 it is the smallest normal number or so, never less; of NaN, NaN
// (of two operands one of which is NaN, max is the second).
// Cody and Waite's reduction by ln 2 in two parts, then Cephes' polynomial of degree 6 (expf.c).
RELAY_INLINE Floats exponential(Floats x) {
    x = max(all(-87.33654f), x);
    const Floats n = round_even(mul(x, all(1.44269504f)));
    const Floats r = fnma(n, all(-2.12194440e-4f), fnma(n, all(0.693359375f), x));
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(mul(r, r), p, add(r, all(1.0f)));
    return mul(p, as_floats(shift_left<23>(add(to_ints(n), all(127)))));
}

// the nearest bfloat16, even among two, in the low 16 bits of each lane
RELAY_INLINE Ints to_bfloat16(Floats a) {
    const Ints bits = as_ints(a);
    const Ints odd = both(shift_right<16>(bits), all(1));
    return shift_right<16>(add(bits, add(odd, all(0x7fff))));
}

// a bfloat16 in the low, or high, 16 bits of each lane
RELAY_INLINE Floats low_bfloat16(Ints a) { return as_floats(shift_left<16>(a)); }
RELAY_INLINE Floats high_bfloat16(Ints a) { return as_floats(both(a, all(static_cast<int32_t>(0xffff0000)))); }

// 16 int32 as int16, saturated, each four in the order 0 2 1 3
RELAY_INLINE void store_shorts(void* p, Ints a) {
    const __m256i low = _mm256_shuffle_epi32(lower(a), 0xd8), high = _mm256_shuffle_epi32(upper(a), 0xd8);
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
}
// 16 int32 as int8, saturated, in order
RELAY_INLINE void store_bytes(void* p, Ints a) {
    const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(lower(a), upper(a)), 0xd8);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
}

// `bytes` bytes from p on, into the second-level cache
RELAY_INLINE void prefetch(const void* p, int bytes) {
    for (int i = 0; i < bytes; i += 64) _mm_prefetch(static_cast<const char*>(p) + i, _MM_HINT_T1);
}

}  // namespace relay
