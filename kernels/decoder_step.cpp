// One step of a decoder over all rows of a batch, as a sequence of phases whose chunks threads share. See decoder_step.py.
//
// A layer is  norm | q k v, rope, KV write | attention, pushes | output matrix + residual | norm | gate, up, silu | down + residual
// with each matrix's epilogue in the chunk that computed it. With one or two rows the norms are not phases: every thread that takes a chunk of the
// next matrix norms for itself, which costs less than waiting for whoever would do it.
//
// What a row becomes depends on nothing but the row: every sum has one order (packed_matmul.cpp, paged_attention.cpp), norms sum in 16 lanes
// and one tree. Chunks divide outputs, rows and heads, never a sum.
#include "decoder_step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include <time.h>

#include "block_push.h"
#include "export.h"
#include "simd.h"
#include "thread_pool.h"

namespace relay {
namespace {

constexpr int FEW_ROWS = 4;      // of one sequence: a tile of so few keeps fewer threads busy, and unpacks for few
constexpr int ROW_BLOCK = 128;   // rows of one matrix chunk: their activations stay in the second-level cache
constexpr int PRIVATE_ROWS = 2;  // up to so many rows each thread norms for itself
constexpr int LOGIT_TILE = 32;   // logit rows at a time
constexpr size_t CHUNK_BYTES = 32768;  // of weights, at least, unless there are too few

int ceil_div(int a, int b) { return (a + b - 1) / b; }

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// 64-byte aligned memory that grows and is never smaller; what it held is not kept.
template <class T> class Buffer {
  public:
    T* reserve(size_t n) {
        if (n > size_) {
            const size_t bytes = (n * sizeof(T) + 63) / 64 * 64;
            memory_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
            if (memory_ == nullptr) throw std::bad_alloc();
            std::memset(static_cast<void*>(memory_.get()), 0, bytes);
            size_ = n;
        }
        return memory_.get();
    }
    T* get() const { return memory_.get(); }

  private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t size_ = 0;
};

enum class Kind { EMBED, NORM, QKV, ATTENTION, QUANTIZE, ATTN_OUT, GATE_UP, DOWN, FINAL_NORM, HEAD, SAMPLE };
enum class Norm { ATTN, FFN, FINAL };

struct Phase {
    Kind kind;
    int layer;
    int per_chunk;      // units: groups, heads, rows
    int n_unit_chunks;  // chunks of one row block
    int first_logit;    // of the logit tile
    Norm norm;
};

// A piece of attention: one row and split, or (split < 0) a tile of rows, of one K/V head.
struct Piece {
    int32_t row, n_rows, kv_head, split;
};

struct ThreadScratch {
    Buffer<float> out, attention, row;
    Buffer<uint8_t> private_rows;
    Activations activations = {};
    std::unique_ptr<Sampler> sampler;
    std::vector<Partial> partials;
    int64_t prepared = -1;  // phase whose private rows are there
};

class Decoder {
  public:
    Decoder(const Model& model, int n_threads, int64_t spin_ns, const uint64_t* coefficients);
    Refusal begin(Step& step);
    void finish();
    ThreadCounters counters(int thread) const { return pool_.counters(thread); }

  private:
    Refusal check(const Step& step) const;
    void reserve();
    void plan();
    void plan_attention();
    void schedule(Kind kind, int layer, int n_units, int per_chunk, int n_row_blocks, Norm norm = Norm::ATTN, int first_logit = 0);
    void schedule_matrix(Kind kind, int layer, int n_units, size_t unit_bytes, int n_rows, Norm norm, int first_logit = 0);
    void chunk(const Phase& phase, int64_t number, int chunk, int thread);

    const Activations& inputs(const Phase& phase, int64_t number, ThreadScratch& own);
    void embed(int row);
    void norm_row(const float* x, const float* weight, ThreadScratch& own, const Activations& to, int row);
    void rows_of(const Phase& phase, int chunk, int& first, int& n) const;
    void qkv(const Phase& phase, int unit, const Activations& x, int first, int n, ThreadScratch& own);
    void gate_up(const Phase& phase, int unit, const Activations& x, int first, int n, ThreadScratch& own);
    void add_residual(const Matrix& w, int group, const Activations& x, int first, int n, ThreadScratch& own);
    void attention(const Phase& phase, int chunk, ThreadScratch& own);
    const uint8_t* first_keys(int layer, int index) const;
    void mixed_to_activations(int row, int kv_head);
    void push(int layer, int index);
    void head(const Phase& phase, int group, int n_groups, const Activations& x);

    const Model model_;
    const std::vector<Layer> layers_;
    const uint64_t* const coefficients_;
    const int hidden_, q_width_, kv_width_, ffn_, vocab_;  // padded to what kernels need
    bool heads_fill_blocks_;

    Step* step_ = nullptr;
    int64_t step_number_ = 0;
    std::vector<Phase> phases_;
    std::vector<int32_t> n_chunks_;
    std::vector<Piece> pieces_;
    std::vector<int32_t> partial_at_;            // [rows]: first partial of a decode row
    int n_partials_ = 0, pieces_per_chunk_ = 1, n_piece_chunks_ = 0;
    std::vector<std::pair<int32_t, int32_t>> push_at_;  // (push, block in it)
    std::unique_ptr<std::atomic<int32_t>[]> left_;      // [rows, n_kv_heads]: splits not yet done
    size_t n_left_ = 0;
    std::atomic<int64_t> push_ns_{0};
    std::vector<ThreadScratch> scratch_;
    Activations normed_, mixed_, gated_, last_;
    Buffer<float> x_, q_, mixed_floats_, turns_, partials_, logits_;
    Buffer<uint8_t> normed_memory_, mixed_memory_, gated_memory_, last_memory_;
    ThreadPool pool_;  // ends first: its threads use all of the above
};

Activations layout_for(int n_in, const std::vector<const Matrix*>& readers) {
    const auto any = [&](Inputs inputs) { return std::any_of(readers.begin(), readers.end(), [&](const Matrix* m) { return inputs_of(*m) == inputs; }); };
    return activation_layout(n_in, any(Inputs::WIDE), any(Inputs::NARROW), any(Inputs::FLOAT));
}

int padded(int n) { return ceil_div(n, BLOCK) * BLOCK; }

Decoder::Decoder(const Model& model, int n_threads, int64_t spin_ns, const uint64_t* coefficients)
    : model_(model),
      layers_(model.layers, model.layers + model.n_layers),
      coefficients_(coefficients),
      hidden_(padded(model.hidden)),
      q_width_(model.n_heads * model.head_dim),
      kv_width_(model.n_kv_heads * model.head_dim),
      ffn_(padded(model.ffn)),
      vocab_(ceil_div(model.vocab_size, 64) * 64),
      heads_fill_blocks_(model.n_heads / model.n_kv_heads * model.head_dim % BLOCK == 0),
      scratch_(static_cast<size_t>(n_threads)),
      pool_(n_threads, spin_ns) {
    std::vector<const Matrix*> of_hidden = {&model_.head}, of_mixed, of_gated;
    for (const Layer& layer : layers_) {
        of_hidden.insert(of_hidden.end(), {&layer.q, &layer.k, &layer.v, &layer.gate, &layer.up});
        of_mixed.push_back(&layer.attn_out);
        of_gated.push_back(&layer.down);
    }
    normed_ = last_ = layout_for(model.hidden, of_hidden);
    mixed_ = layout_for(q_width_, of_mixed);
    gated_ = layout_for(model.ffn, of_gated);
    for (ThreadScratch& own : scratch_) {
        own.out.reserve(static_cast<size_t>(ROW_BLOCK) * static_cast<size_t>(std::max(model.head_dim, 4 * GROUP)));
        own.attention.reserve(attention_scratch_floats(model.head_dim));
        own.row.reserve(static_cast<size_t>(std::max(hidden_, padded(q_width_))));
        own.activations = normed_;
        own.activations.data = own.private_rows.reserve(normed_.bytes_for(PRIVATE_ROWS));
        own.sampler = std::make_unique<Sampler>(model.vocab_size);
    }
}

// Everything that is an index is looked at before anything is computed.
Refusal Decoder::check(const Step& s) const {
    const auto refuse = [](Fault fault, int64_t index, int64_t value) { return Refusal{fault, static_cast<int32_t>(index), value}; };
    for (int r = 0; r < s.n_rows; r++) {
        if (s.tokens[r] < 0 || s.tokens[r] >= model_.vocab_size) return refuse(Fault::TOKEN, r, s.tokens[r]);
        if (s.positions[r] < 0 || s.positions[r] >= model_.max_context || s.positions[r] / PAGE_TOKENS >= s.table_width)
            return refuse(Fault::POSITION, r, s.positions[r]);
        if (s.sequence[r] < 0 || s.sequence[r] >= s.n_sequences) return refuse(Fault::SEQUENCE, r, s.sequence[r]);
        if (r > 0 && s.sequence[r] == s.sequence[r - 1] && s.positions[r] <= s.positions[r - 1]) return refuse(Fault::ORDER, r, s.positions[r]);
        if (r + 1 < s.n_rows && s.sequence[r] == s.sequence[r + 1]) continue;
        const int32_t* blocks = s.table + static_cast<size_t>(s.sequence[r]) * static_cast<size_t>(s.table_width);
        for (int b = 0; b <= s.positions[r] / PAGE_TOKENS; b++)
            if (blocks[b] < 0 || blocks[b] >= model_.kv.n_blocks) return refuse(Fault::BLOCK, s.sequence[r], blocks[b]);
    }
    for (int i = 0; i < s.n_logit_rows; i++) {
        if (s.logit_rows[i] < 0 || s.logit_rows[i] >= s.n_rows) return refuse(Fault::LOGIT_ROW, i, s.logit_rows[i]);
        const Draw& d = s.draws[i];
        const auto known = [&](int64_t id) { return id >= 0 && id < model_.vocab_size; };
        if (d.target >= model_.vocab_size) return refuse(Fault::DRAW, i, d.target);
        for (int32_t j = 0; j < d.n_biases; j++)
            if (!known(d.bias_ids[j])) return refuse(Fault::DRAW, i, d.bias_ids[j]);
        for (int32_t j = 0; j < d.n_suppress; j++)
            if (!known(d.suppress[j])) return refuse(Fault::DRAW, i, d.suppress[j]);
        for (int64_t j = 0; j < d.n_tokens; j++)
            if (!known(d.tokens[j])) return refuse(Fault::DRAW, i, d.tokens[j]);
    }
    for (int p = 0; p < s.n_pushes; p++)
        for (int i = 0; i < s.pushes[p].n; i++) {
            const Push& push = s.pushes[p];
            if (push.blocks[i] < 0 || push.blocks[i] >= model_.kv.n_blocks) return refuse(Fault::PUSH_BLOCK, p, push.blocks[i]);
            if (push.target_blocks[i] < 0 || push.target_blocks[i] >= push.target_blocks_total) return refuse(Fault::TARGET_BLOCK, p, push.target_blocks[i]);
        }
    return {Fault::NONE, 0, 0};
}

void Decoder::reserve() {
    const auto rows = static_cast<size_t>(step_->n_rows);
    x_.reserve(rows * static_cast<size_t>(hidden_));
    q_.reserve(rows * static_cast<size_t>(q_width_));
    mixed_floats_.reserve(rows * static_cast<size_t>(padded(q_width_)));
    turns_.reserve(rows * static_cast<size_t>(model_.head_dim));
    normed_.data = normed_memory_.reserve(normed_.bytes_for(step_->n_rows));
    mixed_.data = mixed_memory_.reserve(mixed_.bytes_for(step_->n_rows));
    gated_.data = gated_memory_.reserve(gated_.bytes_for(step_->n_rows));
    last_.data = last_memory_.reserve(last_.bytes_for(LOGIT_TILE));
    logits_.reserve(static_cast<size_t>(std::min(step_->n_logit_rows, LOGIT_TILE)) * static_cast<size_t>(vocab_));
    const size_t n_left = rows * static_cast<size_t>(model_.n_kv_heads);
    if (n_left > n_left_) {
        left_.reset(new std::atomic<int32_t>[n_left]());
        n_left_ = n_left;
    }
}

// Runs of consecutive positions of one sequence become tiles, rows of shorter ones pieces per split. Longest contexts first.
void Decoder::plan_attention() {
    const Step& s = *step_;
    const int group = model_.n_heads / model_.n_kv_heads, tile_rows = std::max(1, TILE_QUERIES / group);
    pieces_.clear();
    partial_at_.assign(static_cast<size_t>(s.n_rows), 0);
    n_partials_ = 0;
    for (int r = 0; r < s.n_rows;) {
        int end = r + 1;
        while (end < s.n_rows && s.sequence[end] == s.sequence[r] && s.positions[end] == s.positions[end - 1] + 1) end++;
        if (end - r <= FEW_ROWS) {
            // windows differ between layers: there is room for all splits, and a layer leaves out what its window does not reach
            for (int row = r; row < end; row++) {
                partial_at_[static_cast<size_t>(row)] = n_partials_;
                n_partials_ += last_split(s.positions[row]) + 1;
            }
            for (int split = last_split(s.positions[end - 1]); split >= 0; split--)
                for (int h = 0; h < model_.n_kv_heads; h++)
                    for (int row = r; row < end; row++)
                        if (split <= last_split(s.positions[row])) pieces_.push_back({row, 1, h, split});
        } else {
            for (int last = end; last > r;) {
                const int first = std::max(r, last - tile_rows);
                for (int h = 0; h < model_.n_kv_heads; h++) pieces_.push_back({first, last - first, h, -1});
                last = first;
            }
        }
        r = end;
    }
    pieces_per_chunk_ = ceil_div(static_cast<int>(pieces_.size()), MAX_CHUNKS / 2);
    n_piece_chunks_ = ceil_div(static_cast<int>(pieces_.size()), pieces_per_chunk_);
    const int heads = model_.n_heads;
    partials_.reserve(static_cast<size_t>(n_partials_) * static_cast<size_t>(heads) * static_cast<size_t>(model_.head_dim + 2));
    push_at_.clear();
    for (int p = 0; p < s.n_pushes; p++)
        for (int i = 0; i < s.pushes[p].n; i++) push_at_.emplace_back(p, i);
}

void Decoder::schedule(Kind kind, int layer, int n_units, int per_chunk, int n_row_blocks, Norm norm, int first_logit) {
    const int n_unit_chunks = ceil_div(n_units, per_chunk);
    phases_.push_back({kind, layer, per_chunk, n_unit_chunks, first_logit, norm});
    n_chunks_.push_back(n_unit_chunks * n_row_blocks);
}

void Decoder::schedule_matrix(Kind kind, int layer, int n_units, size_t unit_bytes, int n_rows, Norm norm, int first_logit) {
    const int row_blocks = ceil_div(n_rows, ROW_BLOCK);
    const int enough = static_cast<int>((CHUNK_BYTES + unit_bytes - 1) / unit_bytes), fair = n_units * row_blocks / (8 * pool_.n_threads());
    const int fits = ceil_div(n_units * row_blocks, MAX_CHUNKS - row_blocks);
    schedule(kind, layer, n_units, std::max({1, std::min(enough, fair), fits}), row_blocks, norm, first_logit);
}

void Decoder::plan() {
    const Step& s = *step_;
    phases_.clear();
    n_chunks_.clear();
    plan_attention();
    const int rows = s.n_rows;
    const bool apart = rows > PRIVATE_ROWS;
    const int norm_rows = std::clamp(rows / (8 * pool_.n_threads()), 1, 16);
    schedule(Kind::EMBED, 0, rows, norm_rows, 1);
    for (int i = 0; i < model_.n_layers; i++) {
        const Layer& layer = layers_[static_cast<size_t>(i)];
        if (apart) schedule(Kind::NORM, i, rows, norm_rows, 1, Norm::ATTN);
        schedule_matrix(Kind::QKV, i, model_.n_heads + 2 * model_.n_kv_heads, layer.q.group_bytes * static_cast<size_t>(model_.head_dim / GROUP), rows, Norm::ATTN);
        schedule(Kind::ATTENTION, i, n_piece_chunks_ + static_cast<int>(push_at_.size()), 1, 1);
        if (!heads_fill_blocks_) schedule(Kind::QUANTIZE, i, rows, norm_rows, 1);
        schedule_matrix(Kind::ATTN_OUT, i, layer.attn_out.n_groups, layer.attn_out.group_bytes, rows, Norm::ATTN);
        if (apart) schedule(Kind::NORM, i, rows, norm_rows, 1, Norm::FFN);
        schedule_matrix(Kind::GATE_UP, i, ffn_ / BLOCK, 4 * layer.gate.group_bytes, rows, Norm::FFN);
        schedule_matrix(Kind::DOWN, i, layer.down.n_groups, layer.down.group_bytes, rows, Norm::FFN);
    }
    for (int first = 0; first < s.n_logit_rows; first += LOGIT_TILE) {
        const int n = std::min(LOGIT_TILE, s.n_logit_rows - first);
        if (n > PRIVATE_ROWS) schedule(Kind::FINAL_NORM, 0, n, 1, 1, Norm::FINAL, first);
        schedule_matrix(Kind::HEAD, 0, model_.head.n_groups, model_.head.group_bytes, n, Norm::FINAL, first);
        schedule(Kind::SAMPLE, 0, n, 1, 1, Norm::FINAL, first);
    }
}

Refusal Decoder::begin(Step& step) {
    step_ = nullptr;
    const Refusal refusal = check(step);
    step.push_ns = 0;
    if (refusal.fault != Fault::NONE || step.n_rows == 0) return refusal;
    step_ = &step;
    step_number_++;
    try {
        plan();
        reserve();
    } catch (const std::bad_alloc&) {
        step_ = nullptr;
        return {Fault::MEMORY, 0, 0};
    }
    push_ns_.store(0, std::memory_order_relaxed);
    pool_.begin(n_chunks_.data(), static_cast<int>(phases_.size()), [](void* self, int phase, int chunk, int thread) {
        Decoder& decoder = *static_cast<Decoder*>(self);
        decoder.chunk(decoder.phases_[static_cast<size_t>(phase)], decoder.step_number_ << 20 | phase, chunk, thread);
    }, this, &step.abandoned);
    return refusal;
}

void Decoder::finish() {
    if (step_ == nullptr) return;
    pool_.finish();
    step_->push_ns = push_ns_.load(std::memory_order_relaxed);
}

// Rows of the row block that a matrix chunk belongs to.
void Decoder::rows_of(const Phase& phase, int chunk, int& first, int& n) const {
    const int rows = phase.kind == Kind::HEAD ? std::min(LOGIT_TILE, step_->n_logit_rows - phase.first_logit) : step_->n_rows;
    first = chunk / phase.n_unit_chunks * ROW_BLOCK;
    n = std::min(ROW_BLOCK, rows - first);
}

void Decoder::chunk(const Phase& phase, int64_t number, int chunk, int thread) {
    ThreadScratch& own = scratch_[static_cast<size_t>(thread)];
    const int begin = chunk % phase.n_unit_chunks * phase.per_chunk;
    const auto end_of = [&](int n) { return std::min(begin + phase.per_chunk, n); };
    const Layer& layer = layers_[static_cast<size_t>(phase.layer)];
    int first = 0, n = 0;
    switch (phase.kind) {
        case Kind::EMBED:
            for (int r = begin; r < end_of(step_->n_rows); r++) embed(r);
            break;
        case Kind::NORM: {
            const float* weight = phase.norm == Norm::ATTN ? layer.attn_norm : layer.ffn_norm;
            for (int r = begin; r < end_of(step_->n_rows); r++) norm_row(x_.get() + static_cast<size_t>(r) * hidden_, weight, own, normed_, r);
            break;
        }
        case Kind::QKV: {
            rows_of(phase, chunk, first, n);
            const Activations& x = inputs(phase, number, own);
            for (int u = begin; u < end_of(model_.n_heads + 2 * model_.n_kv_heads); u++) qkv(phase, u, x, first, n, own);
            break;
        }
        case Kind::ATTENTION: attention(phase, chunk, own); break;
        case Kind::QUANTIZE:
            for (int r = begin; r < end_of(step_->n_rows); r++) store_row(mixed_floats_.get() + static_cast<size_t>(r) * padded(q_width_), mixed_, r);
            break;
        case Kind::ATTN_OUT:
            rows_of(phase, chunk, first, n);
            for (int g = begin; g < end_of(layer.attn_out.n_groups); g++) add_residual(layer.attn_out, g, mixed_, first, n, own);
            break;
        case Kind::GATE_UP: {
            rows_of(phase, chunk, first, n);
            const Activations& x = inputs(phase, number, own);
            for (int u = begin; u < end_of(ffn_ / BLOCK); u++) gate_up(phase, u, x, first, n, own);
            break;
        }
        case Kind::DOWN:
            rows_of(phase, chunk, first, n);
            for (int g = begin; g < end_of(layer.down.n_groups); g++) add_residual(layer.down, g, gated_, first, n, own);
            break;
        case Kind::FINAL_NORM: {
            const int row = step_->logit_rows[phase.first_logit + begin];
            norm_row(x_.get() + static_cast<size_t>(row) * hidden_, model_.final_norm, own, last_, begin);
            break;
        }
        case Kind::HEAD: head(phase, begin, end_of(model_.head.n_groups) - begin, inputs(phase, number, own)); break;
        case Kind::SAMPLE: {
            const int i = phase.first_logit + begin;
            float* logits = logits_.get() + static_cast<size_t>(begin) * vocab_;
            if (step_->logits != nullptr)
                std::memcpy(step_->logits + static_cast<size_t>(i) * static_cast<size_t>(model_.vocab_size), logits, sizeof(float) * static_cast<size_t>(model_.vocab_size));
            own.sampler->draw(logits, step_->draws[i], step_->drawn[i]);
            break;
        }
    }
}

// The normed rows a matrix reads: those of a norm phase, or few enough to norm here, once a thread and phase.
const Activations& Decoder::inputs(const Phase& phase, int64_t number, ThreadScratch& own) {
    const bool is_head = phase.norm == Norm::FINAL;
    const int n = is_head ? std::min(LOGIT_TILE, step_->n_logit_rows - phase.first_logit) : step_->n_rows;
    if (n > PRIVATE_ROWS) return is_head ? last_ : normed_;
    if (own.prepared != number) {
        own.prepared = number;
        const Layer& layer = layers_[static_cast<size_t>(phase.layer)];
        const float* weight = is_head ? model_.final_norm : phase.norm == Norm::ATTN ? layer.attn_norm : layer.ffn_norm;
        for (int r = 0; r < n; r++) {
            const int row = is_head ? step_->logit_rows[phase.first_logit + r] : r;
            norm_row(x_.get() + static_cast<size_t>(row) * hidden_, weight, own, own.activations, r);
        }
    }
    return own.activations;
}

// The token's embedding, and the turns of rope at its position: cos of all pairs, then sin.
void Decoder::embed(int row) {
    float* x = x_.get() + static_cast<size_t>(row) * hidden_;
    read_row(model_.embedding, step_->tokens[row], x);
    const int pairs = model_.head_dim / 2;
    float* turn = turns_.get() + static_cast<size_t>(row) * model_.head_dim;
    for (int i = 0; i < pairs; i++) {
        const double angle = step_->positions[row] * model_.inverse_frequencies[i];
        turn[i] = static_cast<float>(std::cos(angle)) * model_.rope_scale;
        turn[pairs + i] = static_cast<float>(std::sin(angle)) * model_.rope_scale;
    }
}

float mean_square(const float* x, int padded_width, int width) {
    Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
    for (int i = 0; i < padded_width; i += 16) {
        const Floats v = load(x + i);
        Floats& sum = sums[i / 16 % 4];
        sum = fma(v, v, sum);
    }
    return sum_of_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(width);
}

// x / sqrt(mean(x^2) + eps) * weight. Widths are padded with zeros, weights too.
void norm_to(const float* x, const float* weight, int padded_width, int width, float eps, float* out) {
    const Floats scale = all(1.0f / std::sqrt(mean_square(x, padded_width, width) + eps));
    for (int i = 0; i < padded_width; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

void Decoder::norm_row(const float* x, const float* weight, ThreadScratch& own, const Activations& to, int row) {
    float* normed = own.row.get();
    norm_to(x, weight, hidden_, model_.hidden, model_.rms_eps, normed);
    store_row(normed, to, row);
}

// Unit: a query head, then the K heads, then the V heads.
void Decoder::qkv(const Phase& phase, int unit, const Activations& x, int first, int n, ThreadScratch& own) {
    const Layer& layer = layers_[static_cast<size_t>(phase.layer)];
    const int head_dim = model_.head_dim, groups = head_dim / GROUP, half = head_dim / 2;
    const int side = unit < model_.n_heads ? 0 : unit < model_.n_heads + model_.n_kv_heads ? 1 : 2;  // q, k, v
    const int head = side == 0 ? unit : side == 1 ? unit - model_.n_heads : unit - model_.n_heads - model_.n_kv_heads;
    const Matrix& w = side == 0 ? layer.q : side == 1 ? layer.k : layer.v;
    const float* bias = side == 0 ? layer.q_bias : side == 1 ? layer.k_bias : layer.v_bias;
    const float* norm = side == 0 ? layer.q_norm : side == 1 ? layer.k_norm : nullptr;
    float* out = own.out.get();
    multiply(w, head * groups, groups, x, first, n, out, head_dim);
    const Floats q_scale = all(model_.attn_scale);
    for (int r = 0; r < n; r++) {
        const int row = first + r, position = step_->positions[row];
        float* vector = out + static_cast<size_t>(r) * head_dim;
        if (bias != nullptr)
            for (int d = 0; d < head_dim; d += 16) store(vector + d, add(load(vector + d), load(bias + head * head_dim + d)));
        if (norm != nullptr) norm_to(vector, norm, head_dim, head_dim, model_.rms_eps, vector);
        if (side != 2) {
            const float* turn = turns_.get() + static_cast<size_t>(row) * head_dim;
            if (half % 16 == 0) {
                for (int d = 0; d < half; d += 16) {
                    const Floats a = load(vector + d), b = load(vector + half + d), cos = load(turn + d), sin = load(turn + half + d);
                    store(vector + d, fnma(b, sin, mul(a, cos)));
                    store(vector + half + d, fma(a, sin, mul(b, cos)));
                }
            } else {
                for (int d = 0; d < half; d++) {
                    const float a = vector[d], b = vector[half + d], cos = turn[d], sin = turn[half + d];
                    vector[d] = std::fma(-b, sin, a * cos);
                    vector[half + d] = std::fma(a, sin, b * cos);
                }
            }
        }
        if (side == 0) {
            float* q = q_.get() + static_cast<size_t>(row) * q_width_ + static_cast<size_t>(head) * head_dim;
            for (int d = 0; d < head_dim; d += 16) store(q + d, mul(load(vector + d), q_scale));
        } else {
            const int block = step_->table[static_cast<size_t>(step_->sequence[row]) * step_->table_width + position / PAGE_TOKENS];
            write_kv(model_.kv, phase.layer, side - 1, block, position % PAGE_TOKENS, head, vector);
        }
    }
}

// Unit: 32 gated outputs, which are one block of what `down` reads.
void Decoder::gate_up(const Phase& phase, int unit, const Activations& x, int first, int n, ThreadScratch& own) {
    const Layer& layer = layers_[static_cast<size_t>(phase.layer)];
    const int group = 2 * unit, n_groups = std::min(2, layer.gate.n_groups - group);
    float* out = own.out.get();  // row: gate[32], up[32]
    if (n_groups < 2) std::fill(out, out + static_cast<size_t>(n) * 4 * GROUP, 0.0f);
    multiply(layer.gate, group, n_groups, x, first, n, out, 4 * GROUP);
    multiply(layer.up, group, n_groups, x, first, n, out + 2 * GROUP, 4 * GROUP);
    for (int r = 0; r < n; r++) {
        float* gate = out + static_cast<size_t>(r) * 4 * GROUP;
        for (int d = 0; d < BLOCK; d += 16) {
            const Floats g = load(gate + d), silu = div(g, add(exponential(sub(zeros(), g)), all(1.0f)));
            store(gate + d, mul(silu, load(gate + BLOCK + d)));
        }
        store_block(gate, gated_, first + r, unit);
    }
}

void Decoder::add_residual(const Matrix& w, int group, const Activations& x, int first, int n, ThreadScratch& own) {
    float* out = own.out.get();
    multiply(w, group, 1, x, first, n, out, GROUP);
    for (int r = 0; r < n; r++) {
        float* to = x_.get() + static_cast<size_t>(first + r) * hidden_ + static_cast<size_t>(group) * GROUP;
        store(to, add(load(to), load(out + static_cast<size_t>(r) * GROUP)));
    }
}

void Decoder::attention(const Phase& phase, int chunk, ThreadScratch& own) {
    if (chunk >= n_piece_chunks_) return push(phase.layer, chunk - n_piece_chunks_);
    const int group = model_.n_heads / model_.n_kv_heads, head_dim = model_.head_dim, mixed_width = padded(q_width_);
    const int window = layers_[static_cast<size_t>(phase.layer)].window;
    const int end = std::min((chunk + 1) * pieces_per_chunk_, static_cast<int>(pieces_.size()));
    for (int i = chunk * pieces_per_chunk_; i < end; i++) {
        const Piece& piece = pieces_[static_cast<size_t>(i)];
        const int position = step_->positions[piece.row], first_head = piece.kv_head * group;
        const int32_t* blocks = step_->table + static_cast<size_t>(step_->sequence[piece.row]) * step_->table_width;
        const Context context = {&model_.kv, blocks, phase.layer, piece.kv_head, group, window, first_keys(phase.layer, i + 1)};
        const float* q = q_.get() + static_cast<size_t>(piece.row) * q_width_ + static_cast<size_t>(first_head) * head_dim;
        float* out = mixed_floats_.get() + static_cast<size_t>(piece.row) * mixed_width + static_cast<size_t>(first_head) * head_dim;
        if (piece.split < 0) {
            // rows of q and of the output are equally wide unless heads leave part of a block over
            attend_tile(context, position, piece.n_rows, q, static_cast<size_t>(q_width_), out, static_cast<size_t>(mixed_width), own.attention.get());
            for (int r = 0; r < piece.n_rows; r++) mixed_to_activations(piece.row + r, piece.kv_head);
            continue;
        }
        const int first = first_split(position, window), last = last_split(position);
        if (piece.split < first) continue;
        const auto partial = [&](int split) {
            const size_t at = static_cast<size_t>(partial_at_[static_cast<size_t>(piece.row)] + split) * static_cast<size_t>(model_.n_heads) + static_cast<size_t>(first_head);
            float* base = partials_.get();
            const size_t all_of_them = static_cast<size_t>(n_partials_) * static_cast<size_t>(model_.n_heads);
            return Partial{base + at, base + all_of_them + at, base + 2 * all_of_them + at * static_cast<size_t>(head_dim)};
        };
        attend_split(context, position, piece.split, q, partial(piece.split), own.attention.get());
        // whoever is last folds them all, in order
        std::atomic<int32_t>& left = left_[static_cast<size_t>(piece.row) * static_cast<size_t>(model_.n_kv_heads) + static_cast<size_t>(piece.kv_head)];
        if (first != last) {
            if (left.fetch_add(1, std::memory_order_acq_rel) + 1 < last - first + 1) continue;
            left.store(0, std::memory_order_relaxed);
        }
        own.partials.clear();
        for (int split = first; split <= last; split++) own.partials.push_back(partial(split));
        fold_partials(last - first + 1, own.partials.data(), group, head_dim, out);
        mixed_to_activations(piece.row, piece.kv_head);
    }
}

// The first block of K that a piece reads if no window hides it; null behind the last.
const uint8_t* Decoder::first_keys(int layer, int index) const {
    if (index >= static_cast<int>(pieces_.size())) return nullptr;
    const Piece& piece = pieces_[static_cast<size_t>(index)];
    const int32_t* blocks = step_->table + static_cast<size_t>(step_->sequence[piece.row]) * static_cast<size_t>(step_->table_width);
    return model_.kv.head(layer, 0, blocks[std::max(piece.split, 0) * (SPLIT / PAGE_TOKENS)], piece.kv_head);
}

// The heads of one K/V head are whole blocks of what the output matrix reads, or else a phase of its own does this.
void Decoder::mixed_to_activations(int row, int kv_head) {
    if (!heads_fill_blocks_) return;
    const int width = model_.n_heads / model_.n_kv_heads * model_.head_dim;
    const float* mixed = mixed_floats_.get() + static_cast<size_t>(row) * padded(q_width_);
    for (int b = kv_head * width / BLOCK; b < (kv_head + 1) * width / BLOCK; b++) store_block(mixed + static_cast<size_t>(b) * BLOCK, mixed_, row, b);
}

void Decoder::push(int layer, int index) {
    const int64_t began = now_ns();
    const auto [number, i] = push_at_[static_cast<size_t>(index)];
    const Push& push = step_->pushes[number];
    KVPool target = model_.kv;
    target.base = push.target;
    target.n_blocks = push.target_blocks_total;
    const size_t words = model_.kv.page_bytes() / 8;
    uint64_t sum = 0;
    for (int side = 0; side < 2; side++) {
        const auto* from = reinterpret_cast<const uint64_t*>(model_.kv.head(layer, side, push.blocks[i], 0));
        sum += copy_page(from, reinterpret_cast<uint64_t*>(target.head(layer, side, push.target_blocks[i], 0)), coefficients_ + static_cast<size_t>(side) * words, words);
    }
    push.checksums[static_cast<size_t>(layer) * static_cast<size_t>(push.n) + static_cast<size_t>(i)] = sum;
    push_ns_.fetch_add(now_ns() - began, std::memory_order_relaxed);
}

void Decoder::head(const Phase& phase, int group, int n_groups, const Activations& x) {
    const int n = std::min(LOGIT_TILE, step_->n_logit_rows - phase.first_logit);
    multiply(model_.head, group, n_groups, x, 0, n, logits_.get() + static_cast<size_t>(group) * GROUP, vocab_);
}

}  // namespace
}  // namespace relay

// sizeof of every struct that Python mirrors
RELAY_EXPORT void relay_struct_bytes(int32_t* bytes) {
    const size_t sizes[] = {sizeof(relay::Matrix), sizeof(relay::KVPool), sizeof(relay::Layer), sizeof(relay::Model), sizeof(relay::Push),
                            sizeof(relay::Draw), sizeof(relay::Drawn), sizeof(relay::Step), sizeof(relay::Refusal), sizeof(relay::ThreadCounters)};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) bytes[i] = static_cast<int32_t>(sizes[i]);
}

RELAY_EXPORT void* relay_decoder_create(const relay::Model* model, int n_threads, int64_t spin_ns, const uint64_t* coefficients) {
    try {
        return new relay::Decoder(*model, n_threads, spin_ns, coefficients);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

RELAY_EXPORT void relay_decoder_destroy(void* decoder) { delete static_cast<relay::Decoder*>(decoder); }

RELAY_EXPORT void relay_decoder_begin(void* decoder, relay::Step* step, relay::Refusal* refusal) { *refusal = static_cast<relay::Decoder*>(decoder)->begin(*step); }

RELAY_EXPORT void relay_decoder_finish(void* decoder) { static_cast<relay::Decoder*>(decoder)->finish(); }

RELAY_EXPORT void relay_decoder_counters(void* decoder, int thread, relay::ThreadCounters* counters) {
    *counters = static_cast<relay::Decoder*>(decoder)->counters(thread);
}
