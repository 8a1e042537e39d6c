// y = W x over packed weights. packed_matmul.py has the formula, weight_formats.h the layout of weights, packed_matmul.h that of activations.
//
// A group of 16 outputs is 16 lanes; lane c belongs to output c. For one row x and one block of 32 inputs
//     dot = sum q_w q_x                 exact in int32
//     acc = fma(float(dot), d s, acc)   then, where the format has one, acc = fma(m, s sum(q_x), acc)
// over the blocks in order: one chain per output that never depends on which other rows or outputs are computed. Float formats have the
// chain acc = fma(w, x, acc) over all inputs in order.
//
// Integer products come in pairs of int16 (a weight's pair is a lane's 32 bits; an activation's pair is broadcast), or, where activations
// have 8 bits and weights 4, in fours of bytes; both are exact, so they are the same number. Each weight is unpacked in registers once for
// up to `TILE` rows. More rows pass over the group again: it is in the first-level cache then. With AVX2, whose registers hold four rows, many
// rows have some blocks unpacked there for all of them.
#include "packed_matmul.h"

#include <type_traits>
#include <vector>

#include "export.h"
#include "simd.h"
#include "weight_formats.h"

namespace relay {
namespace {

constexpr int PREFETCH_AHEAD = 16384;

// Some rows that lie in one tile, as one part of its records has them.
struct Rows {
    const uint8_t* part;  // of the tile's first record
    size_t record_bytes;
    int slot;

    Rows(const Activations& x, int part_at, int row) : part(x.record(row, 0) + part_at), record_bytes(static_cast<size_t>(x.record_bytes)), slot(row % TILE) {}
    const float* scale(int block) const { return reinterpret_cast<const float*>(part + static_cast<size_t>(block) * record_bytes) + slot; }
    const uint8_t* quants(int block, int row_bytes) const { return part + static_cast<size_t>(block) * record_bytes + SCALE_BYTES + row_bytes * slot; }
    const float* inputs(int block) const { return reinterpret_cast<const float*>(part + static_cast<size_t>(block) * record_bytes) + BLOCK * slot; }
};

// acc + the block's contribution to one row. s points to the row's scale; s sum(q) and sum(q) lie 16 and 32 words behind.
template <class W> RELAY_INLINE Floats fold(Floats acc, Ints dot, const Scales& scales, const float* s) {
    acc = fma(to_floats(dot), mul(scales.d, all(*s)), acc);
    if constexpr (W::has_min) acc = fma(scales.m, all(s[TILE]), acc);
    return acc;
}

RELAY_INLINE Ints minus_zero_point(Ints dot, int zero_point, const float* s) {
    int32_t sum;
    std::memcpy(&sum, s + 2 * TILE, 4);
    return sub(dot, all(zero_point * sum));
}

// use(first, how many) for rows [0, n), as many at a time as a tile has; "how many" is a constant: a kernel called through a table of pointers
// was slower by 2 to 10 %.
template <class F> RELAY_INLINE void in_tiles(int n, F use) {
    int r = 0;
    for (; n - r >= TILE; r += TILE) use(r, std::integral_constant<int, TILE>());
    if (TILE > 4 && n - r >= 4) {
        use(r, std::integral_constant<int, 4>());
        r += 4;
    }
    if (n - r == 1) use(r, std::integral_constant<int, 1>());
    if (n - r == 2) use(r, std::integral_constant<int, 2>());
    if (n - r == 3) use(r, std::integral_constant<int, 3>());
}

// `ROWS` rows of one tile with one group.
template <class W, int ROWS, bool BYTES>
__attribute__((noinline)) void group_rows(const uint8_t* group, int n_blocks, const Rows x, float* out, int stride) {
    const uint8_t* scales = group + static_cast<size_t>(n_blocks) * W::quant_bytes;
    const uint8_t* shared = scales + static_cast<size_t>(n_blocks) * W::scale_bytes;
    Floats total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) total[r] = zeros();
    for (int b = 0; b < n_blocks; b++) {
        const uint8_t* q = group + static_cast<size_t>(b) * W::quant_bytes;
        prefetch(group + static_cast<size_t>(b) * (W::quant_bytes + W::scale_bytes) + PREFETCH_AHEAD, W::quant_bytes + W::scale_bytes);
        Ints dot[ROWS], dot2[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) dot[r] = dot2[r] = no_ints();
        if constexpr (BYTES) {
            const uint8_t* fours = x.quants(b, 32);
            W::expand_bytes(q, [&](int i, Ints w) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) dot[r] = dot_bytes(dot[r], w, broadcast_word(fours + 32 * r + 4 * i));
            });
        } else {
            const uint8_t* pairs = x.quants(b, 64);
            W::expand(q, [&](int i, Ints w) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    Ints& sum = W::halves && i >= 8 ? dot2[r] : dot[r];
                    sum = dot_shorts(sum, w, broadcast_word(pairs + 64 * r + 4 * i));
                }
            });
        }
        const Scales s = W::scales(scales, shared, b);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const float* row_scale = x.scale(b) + r;
            if constexpr (BYTES) dot[r] = bytes_dot(dot[r]);
            if constexpr (W::zero_point != 0) dot[r] = minus_zero_point(dot[r], W::zero_point, row_scale);
            total[r] = fold<W>(total[r], dot[r], s, row_scale);
            if constexpr (W::halves) total[r] = fma(to_floats(dot2[r]), mul(s.d2, all(*row_scale)), total[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) store(out + static_cast<size_t>(r) * stride, total[r]);
}

// A block of a group, unpacked: pairs as `expand` gives them, less the zero point; d; and m, or d2.
struct alignas(64) Unpacked {
    int16_t pairs[BLOCK / 2][2 * GROUP];
    float d[GROUP], other[GROUP];
};
constexpr int SLICE = 16;  // blocks unpacked at once: 18 KiB, half of the first-level cache

template <class W> void unpack(const uint8_t* group, int n_blocks, int first, int n, Unpacked* to) {
    const uint8_t* scales = group + static_cast<size_t>(n_blocks) * W::quant_bytes;
    const uint8_t* shared = scales + static_cast<size_t>(n_blocks) * W::scale_bytes;
    for (int b = first; b < first + n; b++, to++) {
        prefetch(group + static_cast<size_t>(b) * (W::quant_bytes + W::scale_bytes) + PREFETCH_AHEAD, W::quant_bytes + W::scale_bytes);
        W::expand(group + static_cast<size_t>(b) * W::quant_bytes, [&](int i, Ints w) __attribute__((always_inline)) {
            store_ints(to->pairs[i], W::zero_point != 0 ? sub_shorts(w, all_shorts(W::zero_point)) : w);
        });
        const Scales s = W::scales(scales, shared, b);
        store(to->d, s.d);
        store(to->other, W::halves ? s.d2 : s.m);
    }
}

// `ROWS` rows of one tile with `n` unpacked blocks from `first` on; `out` goes on where the blocks before left it.
template <bool HAS_MIN, bool HALVES, int ROWS>
__attribute__((noinline)) void slice_rows(const Unpacked* w, int first, int n, const Rows x, float* out, int stride) {
    Floats total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) total[r] = first == 0 ? zeros() : load(out + static_cast<size_t>(r) * stride);
    for (int b = first; b < first + n; b++, w++) {
        const uint8_t* pairs = x.quants(b, 64);
#pragma GCC unroll 2
        for (int half = 0; half < (HALVES ? 2 : 1); half++) {
            constexpr int n_pairs = HALVES ? BLOCK / 4 : BLOCK / 2;
            Ints dot[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) dot[r] = no_ints();
#pragma GCC unroll 16
            for (int i = half * n_pairs; i < (half + 1) * n_pairs; i++) {
                Ints lanes = load_ints(w->pairs[i]);
                forget(lanes);  // so that it stays in registers: it would be an operand in memory, loaded for each row
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) dot[r] = dot_shorts(dot[r], lanes, broadcast_word(pairs + 64 * r + 4 * i));
            }
            const Floats d = load(half == 0 ? w->d : w->other), m = load(w->other);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const float* s = x.scale(b) + r;
                total[r] = fma(to_floats(dot[r]), mul(d, all(*s)), total[r]);
                if constexpr (HAS_MIN) total[r] = fma(m, all(s[TILE]), total[r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) store(out + static_cast<size_t>(r) * stride, total[r]);
}

// All rows; one function for all formats that are alike once they are unpacked.
template <bool HAS_MIN, bool HALVES>
void slice(const Unpacked* w, int first, int n, const Activations& x, int first_row, int n_rows, float* out, int stride) {
    in_tiles(n_rows, [&](int r, auto rows) __attribute__((always_inline)) {
        slice_rows<HAS_MIN, HALVES, rows()>(w, first, n, Rows(x, x.wide, first_row + r), out + static_cast<size_t>(r) * stride, stride);
    });
}

template <class W, bool BYTES>
void integer(const Matrix& w, int first_group, int n_groups, const Activations& x, int first_row, int n_rows, float* out, int stride) {
    for (int g = 0; g < n_groups; g++) {
        const uint8_t* group = w.data + static_cast<size_t>(first_group + g) * w.group_bytes;
        float* to = out + GROUP * g;
        if constexpr (!BYTES && !wide_registers) {
            if (n_rows >= W::many_rows) {
                Unpacked unpacked[SLICE];
                for (int first = 0; first < w.n_blocks; first += SLICE) {
                    const int n = w.n_blocks - first < SLICE ? w.n_blocks - first : SLICE;
                    unpack<W>(group, w.n_blocks, first, n, unpacked);
                    slice<W::has_min, W::halves>(unpacked, first, n, x, first_row, n_rows, to, stride);
                }
                continue;
            }
        }
        in_tiles(n_rows, [&](int r, auto rows) __attribute__((always_inline)) {
            if constexpr (BYTES || wide_registers || rows() < W::many_rows) {
                const Rows some(x, BYTES ? x.narrow : x.wide, first_row + r);
                group_rows<W, rows(), BYTES>(group, w.n_blocks, some, to + static_cast<size_t>(r) * stride, stride);
            }
        });
    }
}

// The same for floats; several groups at a time where rows are few, since one chain alone waits for its own additions.
template <class W, int ROWS, int GROUPS>
void group_rows_of_floats(const uint8_t* group, size_t group_bytes, int n_blocks, const Rows x, float* out, int stride) {
    Floats total[ROWS][GROUPS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) total[r][g] = zeros();
    for (int b = 0; b < n_blocks; b++) {
        const float* inputs = x.inputs(b);
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) {
            const uint8_t* q = group + g * group_bytes + static_cast<size_t>(b) * W::quant_bytes;
            prefetch(q + PREFETCH_AHEAD / GROUPS, W::quant_bytes);
            W::expand(q, [&](int k, Floats w) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) total[r][g] = fma(w, all(inputs[BLOCK * r + k]), total[r][g]);
            });
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) store(out + static_cast<size_t>(r) * stride + GROUP * g, total[r][g]);
}

template <class W>
void floating(const Matrix& w, int first_group, int n_groups, const Activations& x, int first_row, int n_rows, float* out, int stride) {
    using Kernel = void (*)(const uint8_t*, size_t, int, Rows, float*, int);
    static constexpr Kernel by_rows[] = {nullptr, group_rows_of_floats<W, 1, 1>, group_rows_of_floats<W, 2, 1>, group_rows_of_floats<W, 3, 1>,
                                         group_rows_of_floats<W, 4, 1>};
    for (int g = 0; g < n_groups;) {
        const uint8_t* group = w.data + static_cast<size_t>(first_group + g) * w.group_bytes;
        float* to = out + GROUP * g;
        const int several = n_rows == 1 && n_groups - g >= 4 ? 4 : n_rows == 2 && n_groups - g >= 2 ? 2 : 1;
        for (int r = 0; r < n_rows;) {
            const int step = n_rows - r < 4 ? n_rows - r : 4;
            const Kernel kernel = several == 4 ? group_rows_of_floats<W, 1, 4> : several == 2 ? group_rows_of_floats<W, 2, 2> : by_rows[step];
            kernel(group, w.group_bytes, w.n_blocks, Rows(x, x.floats, first_row + r), to + static_cast<size_t>(r) * stride, stride);
            r += step;
        }
        g += several;
    }
}

float half_to_float(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return _cvtsh_ss(half);
}

// Input k of output c in the 4-bit layout.
int nibble_at(const uint8_t* q, int c, int k) { return q[64 * (k % 16 / 4) + 4 * c + k % 4] >> (k < 16 ? 0 : 4) & 15; }

}  // namespace

bool is_float(Format format) { return format == Format::F16 || format == Format::BF16 || format == Format::F32; }

Inputs inputs_of(const Matrix& w) { return is_float(w.format) ? Inputs::FLOAT : w.narrow ? Inputs::NARROW : Inputs::WIDE; }

size_t group_bytes(Format format, int n_blocks) {
    const size_t n = static_cast<size_t>(n_blocks), shared = (n + 7) / 8;
    size_t bytes = 0;
    switch (format) {
        case Format::Q4_0: bytes = n * (Q4_0::quant_bytes + Q4_0::scale_bytes); break;
        case Format::Q4_1: bytes = n * (Q4_1::quant_bytes + Q4_1::scale_bytes); break;
        case Format::Q8_0: bytes = n * (Q8_0::quant_bytes + Q8_0::scale_bytes); break;
        case Format::Q4_K: bytes = n * (Q4_K::quant_bytes + Q4_K::scale_bytes) + shared * Q4_K::shared_bytes; break;
        case Format::Q6_K: bytes = n * (Q6_K::quant_bytes + Q6_K::scale_bytes) + shared * Q6_K::shared_bytes; break;
        case Format::F16:
        case Format::BF16: bytes = n * F16::quant_bytes; break;
        case Format::F32: bytes = n * F32::quant_bytes; break;
    }
    return (bytes + 63) / 64 * 64;
}

Activations activation_layout(int n_in, bool wide, bool narrow, bool floats) {
    Activations x = {nullptr, (n_in + BLOCK - 1) / BLOCK, 0, -1, -1, -1};
    const auto add = [&](bool there, int32_t& at, int32_t bytes) {
        if (!there) return;
        at = x.record_bytes;
        x.record_bytes += (bytes + 63) / 64 * 64;
    };
    add(wide, x.wide, SCALE_BYTES + TILE * BLOCK * 2);
    add(narrow, x.narrow, SCALE_BYTES + TILE * BLOCK);
    add(floats, x.floats, TILE * BLOCK * 4);
    return x;
}

namespace {

struct Rounded {
    Ints low, high;
};

// 32 inputs as integers of at most `top`; their scale and sums go to `part`.
Rounded round_block(Floats a, Floats b, int top, uint8_t* part, int slot) {
    const float most = max_of_lanes(max(absolute(a), absolute(b)));
    const bool some = most > 1e-30f;
    const float limit = static_cast<float>(top), s = some ? most / limit : 0.0f;
    const Floats inverse = all(some ? limit / most : 0.0f);
    const Rounded q = {to_ints(mul(a, inverse)), to_ints(mul(b, inverse))};
    const int32_t sum = sum_of_lanes(add(q.low, q.high));
    float* scales = reinterpret_cast<float*>(part) + slot;
    scales[0] = s;
    scales[TILE] = s * static_cast<float>(sum);
    std::memcpy(scales + 2 * TILE, &sum, 4);
    return q;
}

}  // namespace

void store_block(const float* x, const Activations& to, int row, int block) {
    uint8_t* record = to.record(row, block);
    const int slot = row % TILE;
    const Floats a = load(x), b = load(x + 16);
    if (to.wide >= 0) {
        const Rounded q = round_block(a, b, TOP_WIDE, record + to.wide, slot);
        uint8_t* quants = record + to.wide + SCALE_BYTES + 64 * slot;
        store_shorts(quants, q.low);
        store_shorts(quants + 32, q.high);
    }
    if (to.narrow >= 0) {
        const Rounded q = round_block(a, b, TOP_NARROW, record + to.narrow, slot);
        uint8_t* quants = record + to.narrow + SCALE_BYTES + 32 * slot;
        store_bytes(quants, q.low);
        store_bytes(quants + 16, q.high);
    }
    if (to.floats >= 0) {
        float* floats = reinterpret_cast<float*>(record + to.floats) + BLOCK * slot;
        store(floats, a);
        store(floats + 16, b);
    }
}

void store_row(const float* x, const Activations& to, int row) {
    for (int b = 0; b < to.n_blocks; b++) store_block(x + static_cast<size_t>(BLOCK) * static_cast<size_t>(b), to, row, b);
}

void multiply(const Matrix& w, int first_group, int n_groups, const Activations& x, int first_row, int n_rows, float* out, int stride) {
    switch (w.format) {
        case Format::Q4_0: return (w.narrow ? integer<Q4_0, true> : integer<Q4_0, false>)(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::Q4_1: return (w.narrow ? integer<Q4_1, true> : integer<Q4_1, false>)(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::Q4_K: return (w.narrow ? integer<Q4_K, true> : integer<Q4_K, false>)(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::Q8_0: return integer<Q8_0, false>(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::Q6_K: return integer<Q6_K, false>(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::F16: return floating<F16>(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::BF16: return floating<BF16>(w, first_group, n_groups, x, first_row, n_rows, out, stride);
        case Format::F32: return floating<F32>(w, first_group, n_groups, x, first_row, n_rows, out, stride);
    }
}

void read_row(const Matrix& w, int row, float* out) {
    const uint8_t* group = w.data + static_cast<size_t>(row / GROUP) * w.group_bytes;
    const int c = row % GROUP, n = w.n_blocks;
    for (int b = 0; b < n; b++, out += BLOCK) {
        const size_t at = static_cast<size_t>(b);
        switch (w.format) {
            case Format::Q4_0:
            case Format::Q4_1: {
                const int scale_bytes = w.format == Format::Q4_0 ? 32 : 64;
                const uint8_t *q = group + 256 * at, *s = group + 256 * static_cast<size_t>(n) + scale_bytes * at + 2 * c;
                const float d = half_to_float(s), m = w.format == Format::Q4_0 ? -8.0f * d : half_to_float(s + 32);
                for (int k = 0; k < BLOCK; k++) out[k] = d * static_cast<float>(nibble_at(q, c, k)) + m;
                break;
            }
            case Format::Q4_K: {
                const uint8_t *q = group + 256 * at, *s = group + 256 * static_cast<size_t>(n) + 32 * at;
                const uint8_t* shared = group + 288 * static_cast<size_t>(n) + 64 * (at / 8) + 2 * c;
                const float d = half_to_float(shared) * s[c], m = half_to_float(shared + 32) * s[16 + c];
                for (int k = 0; k < BLOCK; k++) out[k] = d * static_cast<float>(nibble_at(q, c, k)) - m;
                break;
            }
            case Format::Q8_0: {
                const uint8_t* q = group + 512 * at;
                const float d = half_to_float(group + 512 * static_cast<size_t>(n) + 32 * at + 2 * c);
                for (int k = 0; k < BLOCK; k++) out[k] = d * static_cast<float>(static_cast<int8_t>(q[64 * (k / 4) + 4 * c + k % 4]));
                break;
            }
            case Format::Q6_K: {
                const uint8_t *q = group + 384 * at, *s = group + 384 * static_cast<size_t>(n) + 32 * at;
                const float d = half_to_float(group + 416 * static_cast<size_t>(n) + 32 * (at / 8) + 2 * c);
                for (int k = 0; k < BLOCK; k++) {
                    // pair 2 (k / 4) + (k % 2), its first or second half
                    const int pair = 2 * (k / 4) + k % 2, t = pair % 8;
                    uint16_t high;
                    std::memcpy(&high, q + 256 + 64 * (pair / 8) + 4 * c + 2 * (k % 4 / 2), 2);
                    const int value = (nibble_at(q, c, k) | (high >> (2 * t) & 3) << 4) - 32;
                    out[k] = d * static_cast<float>(static_cast<int8_t>(s[16 * (k / 16) + c])) * static_cast<float>(value);
                }
                break;
            }
            case Format::F16:
                for (int k = 0; k < BLOCK; k++) out[k] = half_to_float(group + 1024 * at + 32 * k + 2 * c);
                break;
            case Format::BF16:
                for (int k = 0; k < BLOCK; k++) {
                    uint32_t pair;
                    std::memcpy(&pair, group + 1024 * at + 64 * (k / 2) + 4 * c, 4);
                    const uint32_t bits = k % 2 ? pair & 0xffff0000u : pair << 16;
                    std::memcpy(out + k, &bits, 4);
                }
                break;
            case Format::F32:
                for (int k = 0; k < BLOCK; k++) std::memcpy(out + k, group + 2048 * at + 64 * k + 4 * c, 4);
                break;
        }
    }
}

}  // namespace relay

// For tests and benchmarks: x [n_rows, n_blocks * 32] -> out [n_rows, n_groups * 16].
RELAY_EXPORT void relay_multiply(const relay::Matrix* w, int n_rows, const float* x, float* out) {
    using namespace relay;
    const Inputs inputs = inputs_of(*w);
    Activations rows = activation_layout(w->n_in, inputs == Inputs::WIDE, inputs == Inputs::NARROW, inputs == Inputs::FLOAT);
    std::vector<uint8_t> memory(rows.bytes_for(n_rows));
    rows.data = memory.data();
    const int width = rows.n_blocks * BLOCK;
    for (int r = 0; r < n_rows; r++) store_row(x + static_cast<size_t>(r) * static_cast<size_t>(width), rows, r);
    multiply(*w, 0, w->n_groups, rows, 0, n_rows, out, w->n_groups * GROUP);
}

RELAY_EXPORT void relay_read_row(const relay::Matrix* w, int row, float* out) { relay::read_row(*w, row, out); }
