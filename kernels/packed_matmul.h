// Packed weights and the activations they are multiplied with: types, and what packed_matmul.cpp computes on them.
#pragma once
#include <cstddef>
#include <cstdint>

namespace relay {

constexpr int GROUP = 16;  // output columns side by side: the lanes of a register
constexpr int BLOCK = 32;  // inputs that share the scales of a weight, and of an activation
#if defined(RELAY_AVX512)
constexpr int TILE = 8;  // rows of activations that lie together
#else
constexpr int TILE = 4;
#endif

// How weights lie in memory; the numbers are part of the packed file.
enum class Format : int32_t { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2, Q4_K = 3, Q6_K = 4, F16 = 5, BF16 = 6, F32 = 7 };

// One matrix [n_out, n_in]: `n_groups` groups of 16 outputs, each `group_bytes` long, of `n_blocks` blocks of 32 inputs. Rows and inputs
// beyond n_out and n_in are zero weights. `narrow`: its inputs have 8 bits, not 16 (formats of 4 bits only).
struct Matrix {
    const uint8_t* data;
    int32_t n_out, n_in;
    int32_t n_groups, n_blocks;
    size_t group_bytes;
    Format format;
    int32_t narrow;
};

// How a matrix reads its inputs.
enum class Inputs { WIDE, NARROW, FLOAT };
Inputs inputs_of(const Matrix& w);

// Rows in tiles of `TILE`. A tile is `n_blocks` records, a record what its rows hold of 32 inputs: up to three parts, each from a cache line on, at
// these offsets (-1: not there)
//   wide:   float s[TILE] | float s sum(q)[TILE] | int32 sum(q)[TILE] | int16 q[TILE][32], each four inputs in the order 0 2 1 3
//   narrow: the same three | int8 q[TILE][32]
//   floats: float x[TILE][32]
// with x = s q, |q| at most TOP_WIDE or TOP_NARROW. A tile's rows are what one pass over the weights serves.
struct Activations {
    uint8_t* data;
    int32_t n_blocks;
    int32_t record_bytes;
    int32_t wide, narrow, floats;

    size_t tile_bytes() const { return static_cast<size_t>(n_blocks) * static_cast<size_t>(record_bytes); }
    size_t bytes_for(int n_rows) const { return static_cast<size_t>((n_rows + TILE - 1) / TILE) * tile_bytes(); }
    uint8_t* record(int row, int block) const {
        return data + static_cast<size_t>(row / TILE) * tile_bytes() + static_cast<size_t>(block) * static_cast<size_t>(record_bytes);
    }
};

constexpr int TOP_WIDE = 32512;  // 127 * 256
constexpr int TOP_NARROW = 127;
constexpr int SCALE_BYTES = 3 * TILE * 4;

bool is_float(Format format);
size_t group_bytes(Format format, int n_blocks);

// The layout of rows that matrices read in these ways; `data` is null.
Activations activation_layout(int n_in, bool wide, bool narrow, bool floats);

// x: float [n_blocks * 32] -> row `row`.
void store_row(const float* x, const Activations& to, int row);
// The same for 32 inputs: block `block` of row `row`.
void store_block(const float* x, const Activations& to, int row, int block);

// out[r * stride + c] = sum over k of W[16 first_group + c, k] x[first_row + r, k], r < n_rows, c < 16 n_groups; first_row is a multiple of TILE.
void multiply(const Matrix& w, int first_group, int n_groups, const Activations& x, int first_row, int n_rows, float* out, int stride);

// Row `row` of W as floats: out[n_blocks * 32].
void read_row(const Matrix& w, int row, float* out);

}  // namespace relay
