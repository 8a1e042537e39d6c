// How each weight format lies in a group of 16 outputs, and how it comes out of there: as pairs of int16, fours of bytes, or floats.
//
// A group is the quants of all blocks of 32 inputs, then the scales of all blocks, then (K formats) what 8 blocks share. Lane c is output c.
//   4 bits: 256 B a block, vector j < 4 of 64 B, byte 4 c + i: low nibble input 4 j + i, high nibble 16 + 4 j + i (as GGUF pairs them)
//   Q8_0:   512 B, vector j < 8, byte 4 c + i: input 4 j + i, int8
//   Q6_K:   the low nibbles as above, then 128 B in two vectors: bits 2 t of vector v's 16-bit lanes are bits 4 and 5 of pair 8 v + t
//   BF16:   1024 B, vector i < 16, lane c: inputs 2 i and 2 i + 1.  F16: 32 x 16 halves.  F32: 32 x 16 floats
//   scales: f16 d[16]; Q4_1 then f16 m[16]; Q4_K u8 scale[16], u8 min[16]; Q6_K int8 scale[16] of inputs 0-15, then of 16-31
//   shared: Q4_K f16 d[16], f16 dmin[16]; Q6_K f16 d[16]
// Pair 2 j + e (j < 8, e < 2) is inputs 4 j + e and 4 j + e + 2; that order is what shifts give for free, and activations are stored in it.
#pragma once
#include "packed_matmul.h"
#include "simd.h"

namespace relay {

struct Scales {
    Floats d, d2, m;  // d2: of inputs 16 to 31, where they have their own
};

// many_rows: from so many rows on blocks are unpacked in memory for all of them where registers hold four rows (AVX2); measured.
struct FourBits {
    static constexpr int quant_bytes = 256;
    static constexpr bool has_bytes = true, halves = false;

    // use(pair, int16 lanes) for all 16 pairs
    template <class F> RELAY_INLINE void expand(const uint8_t* q, F use) {
        const Ints nibble = all_shorts(15);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const Ints v = load_ints(q + 64 * j);
            use(2 * j, both(v, nibble));
            use(2 * j + 8, both(shift_shorts_right<4>(v), nibble));
            use(2 * j + 1, both(shift_shorts_right<8>(v), nibble));
            use(2 * j + 9, shift_shorts_right<12>(v));
        }
    }
    // use(four, byte lanes): inputs 4 four to 4 four + 3
    template <class F> RELAY_INLINE void expand_bytes(const uint8_t* q, F use) {
        const Ints nibbles = all_shorts(0x0f0f);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const Ints v = load_ints(q + 64 * j);
            use(j, both(v, nibbles));
            use(j + 4, both(shift_shorts_right<4>(v), nibbles));
        }
    }
};

struct Q4_0 : FourBits {  // d (q - 8)
    static constexpr int scale_bytes = 32, shared_bytes = 0, zero_point = 8;
    static constexpr int many_rows = 24;
    static constexpr bool has_min = false;
    RELAY_INLINE Scales scales(const uint8_t* s, const uint8_t*, int b) { return {from_halves(s + 32 * b), zeros(), zeros()}; }
};

struct Q4_1 : FourBits {  // d q + m
    static constexpr int scale_bytes = 64, shared_bytes = 0, zero_point = 0;
    static constexpr int many_rows = 32;
    static constexpr bool has_min = true;
    RELAY_INLINE Scales scales(const uint8_t* s, const uint8_t*, int b) {
        return {from_halves(s + 64 * b), zeros(), from_halves(s + 64 * b + 32)};
    }
};

struct Q4_K : FourBits {  // d scale q - dmin min
    static constexpr int scale_bytes = 32, shared_bytes = 64, zero_point = 0;
    static constexpr int many_rows = 12;
    static constexpr bool has_min = true;
    RELAY_INLINE Scales scales(const uint8_t* s, const uint8_t* shared, int b) {
        const Floats d = from_halves(shared + 64 * (b / 8)), dmin = from_halves(shared + 64 * (b / 8) + 32);
        return {mul(d, from_bytes(s + 32 * b)), zeros(), sub(zeros(), mul(dmin, from_bytes(s + 32 * b + 16)))};
    }
};

struct Q8_0 {  // d q
    static constexpr int quant_bytes = 512, scale_bytes = 32, shared_bytes = 0, zero_point = 0;
    static constexpr int many_rows = 32;
    static constexpr bool has_bytes = false, has_min = false, halves = false;
    RELAY_INLINE Scales scales(const uint8_t* s, const uint8_t*, int b) { return {from_halves(s + 32 * b), zeros(), zeros()}; }
    template <class F> RELAY_INLINE void expand(const uint8_t* q, F use) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const Ints v = load_ints(q + 64 * j);
            use(2 * j, shift_shorts_signed<8>(shift_shorts_left<8>(v)));
            use(2 * j + 1, shift_shorts_signed<8>(v));
        }
    }
};

struct Q6_K {  // d scale (q - 32)
    static constexpr int quant_bytes = 384, scale_bytes = 32, shared_bytes = 32, zero_point = 0;
    static constexpr int many_rows = 4;
    static constexpr bool has_bytes = false, has_min = false, halves = true;
    RELAY_INLINE Scales scales(const uint8_t* s, const uint8_t* shared, int b) {
        const Floats d = from_halves(shared + 32 * (b / 8));
        return {mul(d, from_signed_bytes(s + 32 * b)), mul(d, from_signed_bytes(s + 32 * b + 16)), zeros()};
    }
    // bits 2 T of the 16-bit lanes, moved to bits 4 and 5
    template <int T> RELAY_INLINE Ints high(Ints v) {
        if constexpr (T < 2) return both(shift_shorts_left<4 - 2 * T>(v), all_shorts(0x30));
        if constexpr (T >= 2) return both(shift_shorts_right<2 * T - 4>(v), all_shorts(0x30));
    }
    // pairs 2 J and 2 J + 1 of the low half, 2 J + 8 and 2 J + 9 of the high half
    template <int J, class F> RELAY_INLINE void expand_vector(const uint8_t* q, F use) {
        const Ints nibble = all_shorts(15), offset = all_shorts(32);
        const Ints v = load_ints(q + 64 * J), h0 = load_ints(q + 256), h1 = load_ints(q + 320);
        use(2 * J, sub_shorts(either(both(v, nibble), high<2 * J>(h0)), offset));
        use(2 * J + 1, sub_shorts(either(both(shift_shorts_right<8>(v), nibble), high<2 * J + 1>(h0)), offset));
        use(2 * J + 8, sub_shorts(either(both(shift_shorts_right<4>(v), nibble), high<2 * J>(h1)), offset));
        use(2 * J + 9, sub_shorts(either(shift_shorts_right<12>(v), high<2 * J + 1>(h1)), offset));
    }
    template <class F> RELAY_INLINE void expand(const uint8_t* q, F use) {
        expand_vector<0>(q, use);
        expand_vector<1>(q, use);
        expand_vector<2>(q, use);
        expand_vector<3>(q, use);
    }
};

struct F16 {
    static constexpr int quant_bytes = 1024;
    // use(input, float lanes)
    template <class F> RELAY_INLINE void expand(const uint8_t* q, F use) {
#pragma GCC unroll 4
        for (int k = 0; k < BLOCK; k++) use(k, from_halves(q + 32 * k));
    }
};

struct BF16 {
    static constexpr int quant_bytes = 1024;
    template <class F> RELAY_INLINE void expand(const uint8_t* q, F use) {
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK / 2; i++) {
            const Ints v = load_ints(q + 64 * i);
            use(2 * i, low_bfloat16(v));
            use(2 * i + 1, high_bfloat16(v));
        }
    }
};

struct F32 {
    static constexpr int quant_bytes = 2048;
    template <class F> RELAY_INLINE void expand(const uint8_t* q, F use) {
#pragma GCC unroll 4
        for (int k = 0; k < BLOCK; k++) use(k, load(reinterpret_cast<const float*>(q + 64 * k)));
    }
};

}  // namespace relay
