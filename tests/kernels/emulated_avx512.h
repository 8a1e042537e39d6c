// The AVX-512 instructions that kernels/simd.h uses, in plain C++, lane by lane as Intel's manual defines them: so that the AVX-512 half of the
// kernels can be run, and compared bit for bit, on a processor without it. Included by simd.h under RELAY_EMULATED_AVX512.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

#define EMULATED static __attribute__((noinline, unused))

template <class T> struct Lanes {
    T lane[64 / sizeof(T)];
};
template <class T, class V> EMULATED Lanes<T> lanes(V v) {
    Lanes<T> out;
    std::memcpy(&out, &v, 64);
    return out;
}
template <class V, class T> EMULATED V vector(const Lanes<T>& lanes) {
    V out;
    std::memcpy(&out, &lanes, 64);
    return out;
}
template <class T, class V, class F> EMULATED V each(V a, F f) {
    Lanes<T> x = lanes<T>(a);
    for (T& lane : x.lane) lane = f(lane);
    return vector<V>(x);
}
template <class T, class V, class F> EMULATED V each(V a, V b, F f) {
    Lanes<T> x = lanes<T>(a);
    const Lanes<T> y = lanes<T>(b);
    for (unsigned i = 0; i < 64 / sizeof(T); i++) x.lane[i] = f(x.lane[i], y.lane[i]);
    return vector<V>(x);
}
template <class T, class V> EMULATED V all(T value) {
    Lanes<T> out;
    for (T& lane : out.lane) lane = value;
    return vector<V>(out);
}

EMULATED __m512 setzero_ps() { return all<float, __m512>(0.0f); }
EMULATED __m512 set1_ps(float x) { return all<float, __m512>(x); }
EMULATED __m512 loadu_ps(const float* p) {
    __m512 out;
    std::memcpy(&out, p, 64);
    return out;
}
EMULATED void storeu_ps(float* p, __m512 a) { std::memcpy(p, &a, 64); }
EMULATED __m512 add_ps(__m512 a, __m512 b) { return each<float>(a, b, [](float x, float y) { return x + y; }); }
EMULATED __m512 sub_ps(__m512 a, __m512 b) { return each<float>(a, b, [](float x, float y) { return x - y; }); }
EMULATED __m512 mul_ps(__m512 a, __m512 b) { return each<float>(a, b, [](float x, float y) { return x * y; }); }
EMULATED __m512 div_ps(__m512 a, __m512 b) { return each<float>(a, b, [](float x, float y) { return x / y; }); }
// the second operand if either is NaN or both are zeros
EMULATED __m512 max_ps(__m512 a, __m512 b) { return each<float>(a, b, [](float x, float y) { return x > y ? x : y; }); }
EMULATED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const Lanes<float> x = lanes<float>(a), y = lanes<float>(b);
    Lanes<float> z = lanes<float>(c);
    for (int i = 0; i < 16; i++) z.lane[i] = std::fma(x.lane[i], y.lane[i], z.lane[i]);
    return vector<__m512>(z);
}
EMULATED __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    const Lanes<float> x = lanes<float>(a), y = lanes<float>(b);
    Lanes<float> z = lanes<float>(c);
    for (int i = 0; i < 16; i++) z.lane[i] = std::fma(-x.lane[i], y.lane[i], z.lane[i]);
    return vector<__m512>(z);
}
EMULATED __m512 roundscale_ps(__m512 a, int) { return each<float>(a, [](float x) { return std::nearbyint(x); }); }
EMULATED __m512 cvtph_ps(__m256i a) {
    uint16_t halves[16];
    std::memcpy(halves, &a, 32);
    Lanes<float> out;
    for (int i = 0; i < 16; i++) out.lane[i] = _cvtsh_ss(halves[i]);
    return vector<__m512>(out);
}
EMULATED __m256i cvtps_ph(__m512 a, int) {
    const Lanes<float> x = lanes<float>(a);
    uint16_t halves[16];
    for (int i = 0; i < 16; i++) halves[i] = _cvtss_sh(x.lane[i], _MM_FROUND_TO_NEAREST_INT);
    __m256i out;
    std::memcpy(&out, halves, 32);
    return out;
}
EMULATED __m512 cvtepi32_ps(__m512i a) {
    const Lanes<int32_t> x = lanes<int32_t>(a);
    Lanes<float> out;
    for (int i = 0; i < 16; i++) out.lane[i] = static_cast<float>(x.lane[i]);
    return vector<__m512>(out);
}
// what does not fit, NaN too, is the lowest integer
EMULATED __m512i cvtps_epi32(__m512 a) {
    const Lanes<float> x = lanes<float>(a);
    Lanes<int32_t> out;
    for (int i = 0; i < 16; i++) {
        const float rounded = std::nearbyint(x.lane[i]);
        out.lane[i] = rounded >= -2147483648.0f && rounded < 2147483648.0f ? static_cast<int32_t>(rounded) : INT32_MIN;
    }
    return vector<__m512i>(out);
}
template <class T> EMULATED __m512i widen(__m128i a) {
    T bytes[16];
    std::memcpy(bytes, &a, 16);
    Lanes<int32_t> out;
    for (int i = 0; i < 16; i++) out.lane[i] = bytes[i];
    return vector<__m512i>(out);
}
EMULATED __m512i cvtepu8_epi32(__m128i a) { return widen<uint8_t>(a); }
EMULATED __m512i cvtepi8_epi32(__m128i a) { return widen<int8_t>(a); }
EMULATED __m512 castsi512_ps(__m512i a) { return reinterpret_cast<__m512>(a); }
EMULATED __m512i castps_si512(__m512 a) { return reinterpret_cast<__m512i>(a); }
EMULATED __m256 castps512_ps256(__m512 a) {
    __m256 out;
    std::memcpy(&out, &a, 32);
    return out;
}
EMULATED __m256i castsi512_si256(__m512i a) {
    __m256i out;
    std::memcpy(&out, &a, 32);
    return out;
}
EMULATED __m256i extracti64x4_epi64(__m512i a, int half) {
    __m256i out;
    std::memcpy(&out, reinterpret_cast<const uint8_t*>(&a) + 32 * half, 32);
    return out;
}

EMULATED __m512i setzero_si512() { return all<int32_t, __m512i>(0); }
EMULATED __m512i set1_epi32(int32_t x) { return all<int32_t, __m512i>(x); }
EMULATED __m512i set1_epi16(int16_t x) { return all<int16_t, __m512i>(x); }
EMULATED __m512i loadu_si512(const void* p) {
    __m512i out;
    std::memcpy(&out, p, 64);
    return out;
}
EMULATED void storeu_si512(void* p, __m512i a) { std::memcpy(p, &a, 64); }
EMULATED __m512i and_si512(__m512i a, __m512i b) { return each<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x & y; }); }
EMULATED __m512i or_si512(__m512i a, __m512i b) { return each<uint64_t>(a, b, [](uint64_t x, uint64_t y) { return x | y; }); }
EMULATED __m512i add_epi32(__m512i a, __m512i b) { return each<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x + y; }); }
EMULATED __m512i sub_epi32(__m512i a, __m512i b) { return each<uint32_t>(a, b, [](uint32_t x, uint32_t y) { return x - y; }); }
EMULATED __m512i sub_epi16(__m512i a, __m512i b) { return each<uint16_t>(a, b, [](uint16_t x, uint16_t y) { return static_cast<uint16_t>(x - y); }); }
EMULATED __m512i slli_epi32(__m512i a, unsigned n) { return each<uint32_t>(a, [n](uint32_t x) { return x << n; }); }
EMULATED __m512i srli_epi32(__m512i a, unsigned n) { return each<uint32_t>(a, [n](uint32_t x) { return x >> n; }); }
EMULATED __m512i slli_epi16(__m512i a, unsigned n) { return each<uint16_t>(a, [n](uint16_t x) { return static_cast<uint16_t>(x << n); }); }
EMULATED __m512i srli_epi16(__m512i a, unsigned n) { return each<uint16_t>(a, [n](uint16_t x) { return static_cast<uint16_t>(x >> n); }); }
EMULATED __m512i srai_epi16(__m512i a, unsigned n) { return each<int16_t>(a, [n](int16_t x) { return static_cast<int16_t>(x >> n); }); }
EMULATED __m512i dpwssd_epi32(__m512i acc, __m512i a, __m512i b) {
    Lanes<uint32_t> sum = lanes<uint32_t>(acc);
    const Lanes<int16_t> x = lanes<int16_t>(a), y = lanes<int16_t>(b);
    for (int i = 0; i < 32; i++) sum.lane[i / 2] += static_cast<uint32_t>(x.lane[i] * y.lane[i]);
    return vector<__m512i>(sum);
}
EMULATED __m512i dpbusd_epi32(__m512i acc, __m512i a, __m512i b) {
    Lanes<uint32_t> sum = lanes<uint32_t>(acc);
    const Lanes<uint8_t> x = lanes<uint8_t>(a);
    const Lanes<int8_t> y = lanes<int8_t>(b);
    for (int i = 0; i < 64; i++) sum.lane[i / 4] += static_cast<uint32_t>(x.lane[i] * y.lane[i]);
    return vector<__m512i>(sum);
}
EMULATED __m512 mask_mov_ps(__m512 otherwise, __mmask16 mask, __m512 a) {
    Lanes<float> out = lanes<float>(otherwise);
    const Lanes<float> x = lanes<float>(a);
    for (int i = 0; i < 16; i++)
        if (mask >> i & 1) out.lane[i] = x.lane[i];
    return vector<__m512>(out);
}
EMULATED __mmask16 cmp_ps_mask(__m512 a, __m512 b, int how) {
    const Lanes<float> x = lanes<float>(a), y = lanes<float>(b);
    unsigned mask = 0;
    for (int i = 0; i < 16; i++) mask |= static_cast<unsigned>(how == _CMP_GT_OQ ? x.lane[i] > y.lane[i] : x.lane[i] >= y.lane[i]) << i;
    return static_cast<__mmask16>(mask);
}

}  // namespace emulated

#define _mm512_setzero_ps emulated::setzero_ps
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_add_ps emulated::add_ps
#define _mm512_sub_ps emulated::sub_ps
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_div_ps emulated::div_ps
#define _mm512_max_ps emulated::max_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps emulated::roundscale_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph emulated::cvtps_ph
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_castsi512_si256 emulated::castsi512_si256
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 emulated::extracti64x4_epi64
#define _mm512_setzero_si512 emulated::setzero_si512
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi16 emulated::set1_epi16
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_and_si512 emulated::and_si512
#define _mm512_or_si512 emulated::or_si512
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_sub_epi32 emulated::sub_epi32
#define _mm512_sub_epi16 emulated::sub_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated::slli_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated::srli_epi32
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated::slli_epi16
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated::srli_epi16
#undef _mm512_srai_epi16
#define _mm512_srai_epi16 emulated::srai_epi16
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_mask_mov_ps emulated::mask_mov_ps
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask emulated::cmp_ps_mask
