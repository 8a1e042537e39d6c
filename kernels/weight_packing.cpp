// Packs rows of GGUF blocks, or of plain numbers, into groups: the same numbers in another order, nothing is rounded.
//
// Source blocks (https://github.com/ggml-org/ggml, ggml-common.h), all little-endian:
//   Q4_0: f16 d, 16 bytes (byte i: input i low, 16 + i high).  Q4_1: f16 d, f16 m, the same 16 bytes.  Q8_0: f16 d, int8[32].
//   Q4_K: f16 d, f16 dmin, 12 bytes of eight 6-bit scales and mins, 128 bytes (byte 32 p + i: inputs 64 p + i low, 64 p + 32 + i high).
//   Q6_K: 128 bytes of low nibbles, 64 bytes of high pairs, int8[16] scales, f16 d; in each half of 128 inputs byte l of 32 serves inputs
//         l, 32 + l, 64 + l and 96 + l.
#include "weight_packing.h"

#include <cstring>

#include "export.h"

namespace relay {
namespace {

struct Source {
    int inputs, bytes;  // of one block in the file
};

Source source_of(Format format) {
    switch (format) {
        case Format::Q4_0: return {32, 18};
        case Format::Q4_1: return {32, 20};
        case Format::Q8_0: return {32, 34};
        case Format::Q4_K: return {256, 144};
        case Format::Q6_K: return {256, 210};
        case Format::F16:
        case Format::BF16: return {1, 2};
        case Format::F32: return {1, 4};
    }
    return {1, 1};
}

// 32 inputs below 16 -> their nibbles in one lane's four words of the 4-bit layout.
void put_nibbles(const uint8_t* values, int lane, uint8_t* block) {
    for (int i = 0; i < 16; i++) block[64 * (i / 4) + 4 * lane + i % 4] = static_cast<uint8_t>(values[i] | values[16 + i] << 4);
}

void pack_4_bits(const uint8_t* row, int n_blocks, int lane, bool has_min, uint8_t* quants, uint8_t* scales) {
    const int head = has_min ? 4 : 2, source = head + 16;
    for (int b = 0; b < n_blocks; b++, row += source) {
        uint8_t* s = scales + static_cast<size_t>(b) * (has_min ? 64 : 32) + 2 * lane;
        std::memcpy(s, row, 2);
        if (has_min) std::memcpy(s + 32, row + 2, 2);
        for (int j = 0; j < 4; j++) std::memcpy(quants + 256 * static_cast<size_t>(b) + 64 * j + 4 * lane, row + head + 4 * j, 4);
    }
}

void pack_q8_0(const uint8_t* row, int n_blocks, int lane, uint8_t* quants, uint8_t* scales) {
    for (int b = 0; b < n_blocks; b++, row += 34) {
        std::memcpy(scales + 32 * static_cast<size_t>(b) + 2 * lane, row, 2);
        for (int j = 0; j < 8; j++) std::memcpy(quants + 512 * static_cast<size_t>(b) + 64 * j + 4 * lane, row + 2 + 4 * j, 4);
    }
}

void pack_q4_k(const uint8_t* row, int n_blocks, int lane, uint8_t* quants, uint8_t* scales, uint8_t* supers) {
    for (int super = 0; super < n_blocks / 8; super++, row += 144) {
        std::memcpy(supers + 64 * static_cast<size_t>(super) + 2 * lane, row, 2);
        std::memcpy(supers + 64 * static_cast<size_t>(super) + 32 + 2 * lane, row + 2, 2);
        const uint8_t *packed = row + 4, *q = row + 16;
        for (int i = 0; i < 8; i++) {
            uint8_t* s = scales + 32 * static_cast<size_t>(8 * super + i) + lane;
            const bool first = i < 4;  // the last four are spread over the first eight bytes' upper bits
            s[0] = static_cast<uint8_t>(first ? packed[i] & 63 : (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4);
            s[16] = static_cast<uint8_t>(first ? packed[i + 4] & 63 : (packed[i + 4] >> 4) | (packed[i] >> 6) << 4);
            uint8_t values[32];
            for (int k = 0; k < 32; k++) values[k] = q[32 * (i / 2) + k] >> (i % 2 ? 4 : 0) & 15;
            put_nibbles(values, lane, quants + 256 * static_cast<size_t>(8 * super + i));
        }
    }
}

void pack_q6_k(const uint8_t* row, int n_blocks, int lane, uint8_t* quants, uint8_t* scales, uint8_t* supers) {
    for (int super = 0; super < n_blocks / 8; super++, row += 210) {
        std::memcpy(supers + 32 * static_cast<size_t>(super) + 2 * lane, row + 208, 2);
        for (int i = 0; i < 8; i++) {
            const int half = i / 4, quarter = i % 4;
            const uint8_t *low = row + 64 * half + 32 * (quarter % 2), *high = row + 128 + 32 * half, *scale = row + 192 + 2 * i;
            uint8_t* s = scales + 32 * static_cast<size_t>(8 * super + i) + lane;
            s[0] = scale[0];
            s[16] = scale[1];
            uint8_t* block = quants + 384 * static_cast<size_t>(8 * super + i);
            uint8_t nibbles[32];
            uint16_t pairs[2][2] = {};  // [vector][16-bit lane]
            for (int k = 0; k < 32; k++) {
                nibbles[k] = low[k] >> (quarter / 2 ? 4 : 0) & 15;
                const int bits = high[k] >> (2 * quarter) & 3, pair = 2 * (k / 4) + k % 2;
                pairs[pair / 8][k % 4 / 2] |= static_cast<uint16_t>(bits << 2 * (pair % 8));
            }
            put_nibbles(nibbles, lane, block);
            for (int v = 0; v < 2; v++) std::memcpy(block + 256 + 64 * v + 4 * lane, pairs[v], 4);
        }
    }
}

}  // namespace

size_t source_row_bytes(Format format, int n_in) {
    const Source source = source_of(format);
    return static_cast<size_t>(n_in) / static_cast<size_t>(source.inputs) * static_cast<size_t>(source.bytes);
}

void pack_group(Format format, const uint8_t* const* rows, int n_in, uint8_t* to) {
    const int n_blocks = (n_in + BLOCK - 1) / BLOCK;
    const size_t n = static_cast<size_t>(n_blocks);
    std::memset(to, 0, group_bytes(format, n_blocks));
    for (int lane = 0; lane < GROUP; lane++) {
        const uint8_t* row = rows[lane];
        if (row == nullptr) continue;
        switch (format) {
            case Format::Q4_0: pack_4_bits(row, n_blocks, lane, false, to, to + 256 * n); break;
            case Format::Q4_1: pack_4_bits(row, n_blocks, lane, true, to, to + 256 * n); break;
            case Format::Q8_0: pack_q8_0(row, n_blocks, lane, to, to + 512 * n); break;
            case Format::Q4_K: pack_q4_k(row, n_blocks, lane, to, to + 256 * n, to + 288 * n); break;
            case Format::Q6_K: pack_q6_k(row, n_blocks, lane, to, to + 384 * n, to + 416 * n); break;
            case Format::F16:
                for (int k = 0; k < n_in; k++) std::memcpy(to + 32 * static_cast<size_t>(k) + 2 * lane, row + 2 * static_cast<size_t>(k), 2);
                break;
            case Format::BF16:
                for (int k = 0; k < n_in; k++)
                    std::memcpy(to + 64 * static_cast<size_t>(k / 2) + 4 * lane + 2 * (k % 2), row + 2 * static_cast<size_t>(k), 2);
                break;
            case Format::F32:
                for (int k = 0; k < n_in; k++) std::memcpy(to + 64 * static_cast<size_t>(k) + 4 * lane, row + 4 * static_cast<size_t>(k), 4);
                break;
        }
    }
}

}  // namespace relay

// Groups [first, first + n) of a matrix [n_out, n_in] whose rows lie one after the other.
RELAY_EXPORT void relay_pack_groups(int32_t format, const uint8_t* source, int n_out, int n_in, int first, int n, uint8_t* to) {
    using namespace relay;
    const auto kind = static_cast<Format>(format);
    const size_t row_bytes = source_row_bytes(kind, n_in), bytes = group_bytes(kind, (n_in + BLOCK - 1) / BLOCK);
    for (int g = first; g < first + n; g++) {
        const uint8_t* rows[GROUP];
        for (int i = 0; i < GROUP; i++) rows[i] = GROUP * g + i < n_out ? source + static_cast<size_t>(GROUP * g + i) * row_bytes : nullptr;
        pack_group(kind, rows, n_in, to + static_cast<size_t>(g) * bytes);
    }
}
