// Attention over a paged pool of keys and values, in fixed splits. See paged_attention.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace relay {

constexpr int PAGE_TOKENS = 16;   // tokens of a block: the lanes of a register
constexpr int SPLIT = 256;        // keys that share a softmax; splits are folded left to right
constexpr int TILE_QUERIES = 48;  // most (row, head) pairs of one tile
constexpr int MIX_FLOATS = 4096;  // of V, that a tile unpacks at once, whole blocks

enum class KVType : int32_t { BF16 = 0, F16 = 1, I8 = 2, F32 = 3 };

// A pool: [n_layers, 2 (K, V), n_blocks, n_kv_heads, head_bytes].
struct KVPool {
    uint8_t* base;
    int32_t n_blocks, n_kv_heads, head_dim;
    KVType type;

    size_t head_bytes() const;
    size_t page_bytes() const { return head_bytes() * static_cast<size_t>(n_kv_heads); }
    uint8_t* head(int layer, int side, int block, int kv_head) const {
        return base + ((static_cast<size_t>(layer) * 2 + static_cast<size_t>(side)) * static_cast<size_t>(n_blocks) + static_cast<size_t>(block)) * page_bytes() +
               static_cast<size_t>(kv_head) * head_bytes();
    }
};

// What a run of rows of one sequence attends to: keys of `blocks` from max(0, position - window + 1) (window 0: from 0) to its own position.
struct Context {
    const KVPool* pool;
    const int32_t* blocks;  // of the sequence
    int32_t layer, kv_head, group;
    int32_t window;
    const uint8_t* next;  // a block of K that this thread is likely to read after these, or null: fetched on the way
};

// Softmax statistics of `group` heads in one split: top (m), total (l), and weighted values (o: [group, head_dim]).
struct Partial {
    float *top, *total, *mixed;
};

// Of a tile: weights, values mixed so far and in one split, and a block of K or some of V. A row needs less.
constexpr size_t attention_scratch_floats(int head_dim) {
    const size_t block = static_cast<size_t>(PAGE_TOKENS) * static_cast<size_t>(head_dim), unpacked = block > MIX_FLOATS ? block : MIX_FLOATS;
    return static_cast<size_t>(TILE_QUERIES) * (SPLIT + 2 * static_cast<size_t>(head_dim)) + unpacked;
}

int first_split(int position, int window);
int last_split(int position);

// Write one token's K (side 0) or V (side 1) of one head: vector[head_dim], rounded to the pool's type.
void write_kv(const KVPool& pool, int layer, int side, int block, int slot, int kv_head, const float* vector);

// One row, one split. q: [group, head_dim], scaled. 
void attend_split(const Context& at, int position, int split, const float* q, Partial to, float* scratch);

// Fold n partials of [group] left to right; out: [group, head_dim]. `from[0]` is overwritten.
void fold_partials(int n, const Partial* from, int group, int head_dim, float* out);

// n_rows consecutive rows from `position` on; n_rows * group <= TILE_QUERIES. Row r's heads are at q + r * q_stride and go to out + r * out_stride.
void attend_tile(const Context& at, int position, int n_rows, const float* q, size_t q_stride, float* out, size_t out_stride,
                 float* scratch);

}  // namespace relay
