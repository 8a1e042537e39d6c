// A whole step of a decoder: what it is given. All structs are mirrored in decoder_step.py.
#pragma once
#include "packed_matmul.h"
#include "paged_attention.h"
#include "token_sampling.h"

namespace relay {

// Norms and biases are null where a model has none. `window`: positions a row sees, itself included; 0 for all.
struct Layer {
    Matrix q, k, v, attn_out, gate, up, down;
    const float *attn_norm, *ffn_norm;
    const float *q_bias, *k_bias, *v_bias;
    const float *q_norm, *k_norm;
    int32_t window, unused;
};

struct Model {
    int32_t n_layers, hidden, n_heads, n_kv_heads, head_dim, ffn, vocab_size, max_context;
    float rms_eps, rope_scale, attn_scale;
    int32_t unused;
    const double* inverse_frequencies;  // [head_dim / 2], of rope
    const Layer* layers;
    const float* final_norm;
    Matrix embedding, head;
    KVPool kv;
};

// Blocks to copy into another pool of the same layout; checksums: [n_layers, n].
struct Push {
    uint8_t* target;
    int32_t target_blocks_total, n;
    const int32_t *blocks, *target_blocks;
    uint64_t* checksums;
};

struct Step {
    int32_t n_rows, n_sequences, table_width, n_logit_rows, n_pushes;
    int32_t abandoned;  // not 0, by whomever and whenever: nobody wants the rest
    const int32_t *tokens, *positions, *sequence, *table, *logit_rows;
    const Draw* draws;
    Drawn* drawn;
    const Push* pushes;
    float* logits;  // [n_logit_rows, vocab_size], or null
    int64_t push_ns;  // out: time spent copying, of all threads together
};

// Why a step was refused; `index` is of the array named, `value` what was found there.
enum class Fault : int32_t { NONE, TOKEN, POSITION, SEQUENCE, ORDER, BLOCK, LOGIT_ROW, PUSH_BLOCK, TARGET_BLOCK, DRAW, MEMORY };
struct Refusal {
    Fault fault;
    int32_t index;
    int64_t value;
};

}  // namespace relay
