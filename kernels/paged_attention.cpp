// Attention over a paged pool: for one query q (a row and a head) and one split of its keys
//     s_t = q k_t,  m = max s_t,  p_t = exp(s_t - m),  l = sum p_t,  o = sum p_t v_t
// and splits are folded left to right: m' = max(m, m2), a = exp(m - m'), b = exp(m2 - m'), l' = l a + l2 b, o' = o a + o2 b; last o / l.
//
// Lanes are tokens while scores are computed (one chain of fma over the head's dimensions) and dimensions while values are mixed (one chain
// over tokens in order), so a query's numbers do not depend on what else is computed beside it. A decode row's splits are separate pieces
// of work; a tile of consecutive rows unpacks each block once, to floats, and passes all its queries over it: over one block of K, and over
// some of V, whose sums stay in registers. Both do the same operations on each query in the same order; a tile adds keys that a row may not
// see with weight 0 (and 0 v is 0: those keys are written). Slots nobody has written may hold anything: their scores are replaced, their
// values are not read.
//
// A head of a block is a matrix of rows of 16 lanes, chunk by chunk: K has head_dim rows of 16 tokens, V 16 rows (tokens) of head_dim
// lanes. BF16 keeps rows 2 i and 2 i + 1 as the low and high halves of 32-bit lanes; the others keep rows apart. I8 has float scale[16], one a
// token, behind the matrix.
#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "export.h"
#include "simd.h"

namespace relay {
namespace {

constexpr float NOTHING = -INFINITY;
constexpr int TOKENS = PAGE_TOKENS;
constexpr int SPLIT_BLOCKS = SPLIT / TOKENS;

// Of each type: chunk `c` of rows 2 i and 2 i + 1 of a head whose rows have n chunks, and how many bytes two such rows take.
struct BF16KV {
    static constexpr bool scaled = false;
    static constexpr int pair_bytes = 64;
    RELAY_INLINE Floats even(const uint8_t* head, int i, int c, int n) { return low_bfloat16(load_ints(head + 64 * (i * n + c))); }
    RELAY_INLINE Floats odd(const uint8_t* head, int i, int c, int n) { return high_bfloat16(load_ints(head + 64 * (i * n + c))); }
};

struct F16KV {
    static constexpr bool scaled = false;
    static constexpr int pair_bytes = 64;
    RELAY_INLINE Floats even(const uint8_t* head, int i, int c, int n) { return from_halves(head + 32 * (2 * i * n + c)); }
    RELAY_INLINE Floats odd(const uint8_t* head, int i, int c, int n) { return from_halves(head + 32 * ((2 * i + 1) * n + c)); }
};

struct F32KV {
    static constexpr bool scaled = false;
    static constexpr int pair_bytes = 128;
    RELAY_INLINE Floats even(const uint8_t* head, int i, int c, int n) { return load(reinterpret_cast<const float*>(head) + 16 * (2 * i * n + c)); }
    RELAY_INLINE Floats odd(const uint8_t* head, int i, int c, int n) { return load(reinterpret_cast<const float*>(head) + 16 * ((2 * i + 1) * n + c)); }
};

struct I8KV {
    static constexpr bool scaled = true;
    static constexpr int pair_bytes = 32;
    RELAY_INLINE Floats even(const uint8_t* head, int i, int c, int n) { return from_signed_bytes(head + 16 * (2 * i * n + c)); }
    RELAY_INLINE Floats odd(const uint8_t* head, int i, int c, int n) { return from_signed_bytes(head + 16 * ((2 * i + 1) * n + c)); }
};

// The same of V, whose rows are tokens, times the token's scale where there is one.
template <class KV> RELAY_INLINE Floats even_value(const uint8_t* head, int i, int c, int n) {
    const Floats v = KV::even(head, i, c, n);
    return KV::scaled ? mul(v, all(reinterpret_cast<const float*>(head + 256 * n)[2 * i])) : v;
}
template <class KV> RELAY_INLINE Floats odd_value(const uint8_t* head, int i, int c, int n) {
    const Floats v = KV::odd(head, i, c, n);
    return KV::scaled ? mul(v, all(reinterpret_cast<const float*>(head + 256 * n)[2 * i + 1])) : v;
}

// Compilers like to load much and early, and then have no registers left for sums: nothing is moved over this.
RELAY_INLINE void load_later() { asm volatile("" ::: "memory"); }

// Scores of NQ queries (head_dim apart) with NB blocks: scores[query * SPLIT + 16 block + token]. On the way, the same place of `soon` blocks
// is fetched: what will be read next.
template <class KV, int NQ, int NB>
void score_blocks(const uint8_t* const* k, int head_dim, const float* q, float* scores, const uint8_t* const* soon, const uint8_t* const* later) {
    Floats sum[NQ][NB];
#pragma GCC unroll 4
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) sum[i][b] = zeros();
    for (int d = 0; d < head_dim; d += 2) {
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            prefetch(soon[b] + KV::pair_bytes * (d / 2), KV::pair_bytes);
            prefetch(later[b] + KV::pair_bytes * (d / 2), KV::pair_bytes);
            const Floats even = KV::even(k[b], d / 2, 0, 1);
#pragma GCC unroll 4
            for (int i = 0; i < NQ; i++) sum[i][b] = fma(even, all(q[static_cast<size_t>(i) * head_dim + d]), sum[i][b]);
            load_later();
            const Floats odd = KV::odd(k[b], d / 2, 0, 1);
#pragma GCC unroll 4
            for (int i = 0; i < NQ; i++) sum[i][b] = fma(odd, all(q[static_cast<size_t>(i) * head_dim + d + 1]), sum[i][b]);
            load_later();
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 4
        for (int b = 0; b < NB; b++) {
            Floats s = sum[i][b];
            if (KV::scaled) s = mul(s, load(reinterpret_cast<const float*>(k[b] + TOKENS * head_dim)));
            store(scores + i * SPLIT + TOKENS * b, s);
        }
}

// mixed[query * head_dim + 16 c ...] = sum over tokens [0, n) of p[query * SPLIT + token] v[token], for NC chunks from c on.
template <class KV, int NQ, int NC>
void mix_blocks(const uint8_t* const* v, int n, int head_dim, int c, const float* p, float* mixed) {
    const int n_chunks = head_dim / 16;
    Floats sum[NQ][NC];
#pragma GCC unroll 4
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NC; j++) sum[i][j] = zeros();
    int t = 0;
    for (; t + 1 < n; t += 2) {
        const uint8_t* head = v[t / TOKENS];
        const int row = t % TOKENS / 2;
#pragma GCC unroll 4
        for (int j = 0; j < NC; j++) {
            const Floats even = even_value<KV>(head, row, c + j, n_chunks);
#pragma GCC unroll 4
            for (int i = 0; i < NQ; i++) sum[i][j] = fma(even, all(p[i * SPLIT + t]), sum[i][j]);
            load_later();
            const Floats odd = odd_value<KV>(head, row, c + j, n_chunks);
#pragma GCC unroll 4
            for (int i = 0; i < NQ; i++) sum[i][j] = fma(odd, all(p[i * SPLIT + t + 1]), sum[i][j]);
            load_later();
        }
    }
    if (t < n) {
#pragma GCC unroll 4
        for (int j = 0; j < NC; j++) {
            const Floats even = even_value<KV>(v[t / TOKENS], t % TOKENS / 2, c + j, n_chunks);
#pragma GCC unroll 4
            for (int i = 0; i < NQ; i++) sum[i][j] = fma(even, all(p[i * SPLIT + t]), sum[i][j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NQ; i++)
#pragma GCC unroll 4
        for (int j = 0; j < NC; j++) store(mixed + static_cast<size_t>(i) * head_dim + 16 * (c + j), sum[i][j]);
}

// Scores of tokens [begin, end) become their weights, those of the other tokens in blocks [0, n_blocks) 0. Returns the top score.
float soften(float* scores, int n_blocks, int begin, int end, float& total) {
    // blocks [first, last) are touched; of those, [first_full, last_full) have no token outside
    const int first = begin / TOKENS, last = end > begin ? (end + TOKENS - 1) / TOKENS : first;
    const int first_full = (begin + TOKENS - 1) / TOKENS, last_full = end / TOKENS;
    const auto is_full = [&](int b) { return b >= first_full && b < last_full; };
    const auto inside = [&](int b, Floats x, Floats outside) {
        return lanes_below(begin - TOKENS * b, outside, lanes_below(end - TOKENS * b, x, outside));
    };
    Floats top = all(NOTHING);
    for (int b = first; b < last; b++) {
        const Floats s = load(scores + TOKENS * b);
        top = max(top, is_full(b) ? s : inside(b, s, all(NOTHING)));
    }
    const float m = max_of_lanes(top);
    Floats sum = zeros();
    for (int b = 0; b < first; b++) store(scores + TOKENS * b, zeros());
    for (int b = first; b < last; b++) {
        const Floats s = load(scores + TOKENS * b);
        const Floats p = is_full(b) ? exponential(sub(s, all(m))) : inside(b, exponential(sub(inside(b, s, all(NOTHING)), all(m))), zeros());
        sum = add(sum, p);
        store(scores + TOKENS * b, p);
    }
    for (int b = last; b < n_blocks; b++) store(scores + TOKENS * b, zeros());
    total = sum_of_lanes(sum);
    return m;
}

float exponential_of(float x) {
    float lanes[16];
    store(lanes, exponential(all(x)));
    return lanes[0];
}

// (m, l, o) of one query takes in another split's.
void fold(float& top, float& total, float* mixed, float top2, float total2, const float* mixed2, int head_dim) {
    const float most = top > top2 ? top : top2;
    const float a = exponential_of(top - most), b = exponential_of(top2 - most);
    const Floats fade = all(a), fade2 = all(b);
    total = total * a + total2 * b;
    top = most;
    for (int d = 0; d < head_dim; d += 16) store(mixed + d, fma(load(mixed2 + d), fade2, mul(load(mixed + d), fade)));
}

// o / l; -0 becomes 0, since a tile's keys of weight 0 may have made it so.
void finish(const float* mixed, float total, int head_dim, float* out) {
    const Floats inverse = all(1.0f / total);
    for (int d = 0; d < head_dim; d += 16) store(out + d, add(mul(load(mixed + d), inverse), zeros()));
}

template <class KV> void row_split(const Context& at, int position, int split, const float* q, Partial to, float* scratch) {
    const int head_dim = at.pool->head_dim, n_chunks = head_dim / 16, group = at.group;
    const int start = split * SPLIT;
    int begin = at.window > 0 && position + 1 - at.window > start ? position + 1 - at.window - start : 0;
    const int end = position + 1 - start < SPLIT ? position + 1 - start : SPLIT;
    const int first = begin / TOKENS, n_blocks = (end + TOKENS - 1) / TOKENS - first;  // blocks before `first` are out of the window
    begin -= first * TOKENS;
    const int n = end - first * TOKENS;
    // behind the last block of K comes what this thread reads next; the last blocks of V are repeated
    const uint8_t *k[SPLIT_BLOCKS + 8], *v[SPLIT_BLOCKS + 4];
    for (int b = 0; b < n_blocks; b++) {
        const int block = at.blocks[split * SPLIT_BLOCKS + first + b];
        k[b] = at.pool->head(at.layer, 0, block, at.kv_head);
        v[b] = at.pool->head(at.layer, 1, block, at.kv_head);
    }
    for (int b = n_blocks; b < n_blocks + 8; b++) k[b] = at.next != nullptr ? at.next : k[n_blocks - 1];
    for (int b = n_blocks; b < n_blocks + 4; b++) v[b] = v[n_blocks - 1];
    float* p = scratch;  // [up to 4 heads][SPLIT]
    for (int h = 0; h < group;) {
        const int nq = group - h < 4 ? group - h : 4;
        const float* qh = q + static_cast<size_t>(h) * head_dim;
        int b = 0;
        for (const int at_once = nq == 1 ? 4 : nq == 4 ? 1 : 2; b + at_once <= n_blocks; b += at_once) {
            if (nq == 1) score_blocks<KV, 1, 4>(k + b, head_dim, qh, p + TOKENS * b, k + b + 4, v + b);
            if (nq == 2) score_blocks<KV, 2, 2>(k + b, head_dim, qh, p + TOKENS * b, k + b + 2, v + b);
            if (nq == 3) score_blocks<KV, 3, 2>(k + b, head_dim, qh, p + TOKENS * b, k + b + 2, v + b);
            if (nq == 4) score_blocks<KV, 4, 1>(k + b, head_dim, qh, p + TOKENS * b, k + b + 1, v + b);
        }
        for (; b < n_blocks; b++) {
            if (nq == 1) score_blocks<KV, 1, 1>(k + b, head_dim, qh, p + TOKENS * b, k + b + 1, v + b);
            if (nq == 2) score_blocks<KV, 2, 1>(k + b, head_dim, qh, p + TOKENS * b, k + b + 1, v + b);
            if (nq == 3) score_blocks<KV, 3, 1>(k + b, head_dim, qh, p + TOKENS * b, k + b + 1, v + b);
        }
        for (int i = 0; i < nq; i++) to.top[h + i] = soften(p + i * SPLIT, n_blocks, begin, n, to.total[h + i]);
        float* mixed = to.mixed + static_cast<size_t>(h) * head_dim;
        int c = 0;
        for (; c + 2 <= n_chunks && nq < 4; c += 2) {
            if (nq == 1) mix_blocks<KV, 1, 2>(v, n, head_dim, c, p, mixed);
            if (nq == 2) mix_blocks<KV, 2, 2>(v, n, head_dim, c, p, mixed);
            if (nq == 3) mix_blocks<KV, 3, 2>(v, n, head_dim, c, p, mixed);
        }
        for (; c < n_chunks; c++) {
            if (nq == 1) mix_blocks<KV, 1, 1>(v, n, head_dim, c, p, mixed);
            if (nq == 2) mix_blocks<KV, 2, 1>(v, n, head_dim, c, p, mixed);
            if (nq == 3) mix_blocks<KV, 3, 1>(v, n, head_dim, c, p, mixed);
            if (nq == 4) mix_blocks<KV, 4, 1>(v, n, head_dim, c, p, mixed);
        }
        h += nq;
    }
}

// A tile's inner loops, on what is unpacked to floats: k [head_dim][16], one block; v [tokens][16], one chunk of some blocks.
template <int NQ> void score_unpacked(const float* k, int head_dim, const float* const* q, float* scores) {
    Floats sum[NQ];
#pragma GCC unroll 6
    for (int i = 0; i < NQ; i++) sum[i] = zeros();
    for (int d = 0; d < head_dim; d++) {
        const Floats lanes = load(k + TOKENS * d);
#pragma GCC unroll 6
        for (int i = 0; i < NQ; i++) sum[i] = fma(lanes, all(q[i][d]), sum[i]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < NQ; i++) store(scores + i * SPLIT, sum[i]);
}

template <int NQ> void mix_unpacked(const float* v, int n_tokens, const float* p, bool first, float* mixed, int head_dim) {
    Floats sum[NQ];
#pragma GCC unroll 6
    for (int i = 0; i < NQ; i++) sum[i] = first ? zeros() : load(mixed + static_cast<size_t>(i) * head_dim);
    for (int t = 0; t < n_tokens; t++) {
        const Floats lanes = load(v + 16 * t);
#pragma GCC unroll 6
        for (int i = 0; i < NQ; i++) sum[i] = fma(lanes, all(p[i * SPLIT + t]), sum[i]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < NQ; i++) store(mixed + static_cast<size_t>(i) * head_dim, sum[i]);
}

void score_queries(int n, const float* k, int head_dim, const float* const* q, float* scores) {
    for (; n >= 6; n -= 6, q += 6, scores += 6 * SPLIT) score_unpacked<6>(k, head_dim, q, scores);
    for (; n >= 3; n -= 3, q += 3, scores += 3 * SPLIT) score_unpacked<3>(k, head_dim, q, scores);
    for (; n >= 1; n -= 1, q += 1, scores += SPLIT) score_unpacked<1>(k, head_dim, q, scores);
}

void mix_queries(int n, const float* v, int n_tokens, const float* p, bool first, float* mixed, int head_dim) {
    for (; n >= 6; n -= 6, p += 6 * SPLIT, mixed += 6 * head_dim) mix_unpacked<6>(v, n_tokens, p, first, mixed, head_dim);
    for (; n >= 3; n -= 3, p += 3 * SPLIT, mixed += 3 * head_dim) mix_unpacked<3>(v, n_tokens, p, first, mixed, head_dim);
    for (; n >= 1; n -= 1, p += SPLIT, mixed += head_dim) mix_unpacked<1>(v, n_tokens, p, first, mixed, head_dim);
}

template <class KV>
void tile(const Context& at, int position, int n_rows, const float* q, size_t q_stride, float* out, size_t out_stride, float* scratch) {
    const int head_dim = at.pool->head_dim, n_chunks = head_dim / 16, group = at.group, n_queries = n_rows * group;
    const int at_once = std::max(1, MIX_FLOATS / (TOKENS * head_dim));      // blocks of V
    const size_t chunk_floats = static_cast<size_t>(16 * TOKENS * at_once);
    const int head_bytes = static_cast<int>(at.pool->head_bytes());
    float* p = scratch;                                                     // [n_queries][SPLIT]
    float* mixed = p + static_cast<size_t>(TILE_QUERIES) * SPLIT;           // [n_queries][head_dim]
    float* part = mixed + static_cast<size_t>(TILE_QUERIES) * head_dim;     // the same, of one split
    float* unpacked = part + static_cast<size_t>(TILE_QUERIES) * head_dim;  // one block of K, or V: [n_chunks][tokens][16]
    float top[TILE_QUERIES], total[TILE_QUERIES];
    const float* queries[TILE_QUERIES];
    for (int i = 0; i < n_queries; i++) {
        queries[i] = q + static_cast<size_t>(i / group) * q_stride + static_cast<size_t>(i % group) * head_dim;
        top[i] = NOTHING;
        total[i] = 0.0f;
    }
    const int last = position + n_rows - 1;
    for (int split = first_split(position, at.window); split <= last_split(last); split++) {
        const int start = split * SPLIT;
        const int oldest = at.window > 0 && position + 1 - at.window > start ? position + 1 - at.window - start : 0;
        const int end = last + 1 - start < SPLIT ? last + 1 - start : SPLIT;
        const int first = oldest / TOKENS, n_blocks = (end + TOKENS - 1) / TOKENS;
        const int32_t* blocks = at.blocks + split * SPLIT_BLOCKS;
        for (int b = first; b < n_blocks; b++) {
            const uint8_t* head = at.pool->head(at.layer, 0, blocks[b], at.kv_head);
            prefetch(at.pool->head(at.layer, 1, blocks[b], at.kv_head), head_bytes);
            if (b + 1 < n_blocks) prefetch(at.pool->head(at.layer, 0, blocks[b + 1], at.kv_head), head_bytes);
            for (int d = 0; d < head_dim; d += 2) {
                store(unpacked + TOKENS * d, KV::even(head, d / 2, 0, 1));
                store(unpacked + TOKENS * (d + 1), KV::odd(head, d / 2, 0, 1));
            }
            score_queries(n_queries, unpacked, head_dim, queries, p + TOKENS * b);
            if (KV::scaled) {
                const Floats scale = load(reinterpret_cast<const float*>(head + TOKENS * head_dim));
                for (int i = 0; i < n_queries; i++) store(p + i * SPLIT + TOKENS * b, mul(load(p + i * SPLIT + TOKENS * b), scale));
            }
        }
        float top2[TILE_QUERIES], total2[TILE_QUERIES];
        for (int i = 0; i < n_queries; i++) {
            const int row = position + i / group;
            int row_begin = at.window > 0 && row + 1 - at.window > start ? row + 1 - at.window - start : 0;
            const int row_end = row + 1 - start < SPLIT ? row + 1 - start : SPLIT;
            if (row_begin >= row_end) row_begin = row_end > 0 ? row_end : 0;
            top2[i] = soften(p + i * SPLIT, n_blocks, row_begin, row_end, total2[i]);
        }
        for (int b = first; b < n_blocks; b += at_once) {
            const int n_tokens = std::min(end - TOKENS * b, TOKENS * at_once);
            for (int t = 0; t < n_tokens; t += TOKENS) {
                const uint8_t* head = at.pool->head(at.layer, 1, blocks[b + t / TOKENS], at.kv_head);
                const int n_pairs = (std::min(n_tokens - t, TOKENS) + 1) / 2;
                float* to = unpacked + 16 * t;
                for (int i = 0; i < n_pairs; i++, to += 32)
                    for (int c = 0; c < n_chunks; c++) {
                        store(to + chunk_floats * c, even_value<KV>(head, i, c, n_chunks));
                        store(to + chunk_floats * c + 16, odd_value<KV>(head, i, c, n_chunks));
                    }
            }
            for (int c = 0; c < n_chunks; c++)
                mix_queries(n_queries, unpacked + chunk_floats * c, n_tokens, p + TOKENS * b, b == first, part + 16 * c, head_dim);
        }
        for (int i = 0; i < n_queries; i++) {
            float* mine = mixed + static_cast<size_t>(i) * head_dim;
            const float* other = part + static_cast<size_t>(i) * head_dim;
            if (top2[i] == NOTHING) continue;  // sees nothing here
            if (top[i] == NOTHING) {
                top[i] = top2[i];
                total[i] = total2[i];
                std::memcpy(mine, other, sizeof(float) * static_cast<size_t>(head_dim));
            } else {
                fold(top[i], total[i], mine, top2[i], total2[i], other, head_dim);
            }
        }
    }
    for (int i = 0; i < n_queries; i++) {
        const size_t place = static_cast<size_t>(i / group) * out_stride + static_cast<size_t>(i % group) * head_dim;
        finish(mixed + static_cast<size_t>(i) * head_dim, total[i], head_dim, out + place);
    }
}

}  // namespace

size_t KVPool::head_bytes() const {
    const size_t n = static_cast<size_t>(PAGE_TOKENS) * static_cast<size_t>(head_dim);
    switch (type) {
        case KVType::BF16:
        case KVType::F16: return 2 * n;
        case KVType::I8: return n + 4 * PAGE_TOKENS;
        case KVType::F32: return 4 * n;
    }
    return 0;
}

int first_split(int position, int window) { return window > 0 && position + 1 > window ? (position + 1 - window) / SPLIT : 0; }

int last_split(int position) { return position / SPLIT; }

void write_kv(const KVPool& pool, int layer, int side, int block, int slot, int kv_head, const float* vector) {
    uint8_t* head = pool.head(layer, side, block, kv_head);
    const int n = pool.head_dim, n_chunks = n / 16;
    // element d is row d, lane `slot` of K, and row `slot`, lane d of V
    const auto place = [&](int d) { return side == 0 ? TOKENS * d + slot : 16 * n_chunks * slot + d; };
    alignas(64) int32_t words[16];
    float scale = 0.0f, inverse = 0.0f;
    if (pool.type == KVType::I8) {
        Floats most = zeros();
        for (int d = 0; d < n; d += 16) most = max(most, absolute(load(vector + d)));
        scale = max_of_lanes(most) / 127.0f;
        inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
        std::memcpy(head + TOKENS * n + 4 * slot, &scale, 4);
    }
    for (int c = 0; c < n; c += 16) {
        const Floats lanes = load(vector + c);
        switch (pool.type) {
            case KVType::BF16:
                store_ints(words, to_bfloat16(lanes));
                for (int i = 0; i < 16; i++) {
                    const int row = side == 0 ? c + i : slot, lane = side == 0 ? slot : i, chunk = side == 0 ? 0 : c / 16, width = side == 0 ? 1 : n_chunks;
                    std::memcpy(head + 64 * (row / 2 * width + chunk) + 4 * lane + 2 * (row % 2), words + i, 2);
                }
                break;
            case KVType::F16:
                to_halves(words, lanes);
                for (int i = 0; i < 16; i++) std::memcpy(head + 2 * place(c + i), reinterpret_cast<const uint8_t*>(words) + 2 * i, 2);
                break;
            case KVType::I8:
                store_ints(words, to_ints(mul(lanes, all(inverse))));
                for (int i = 0; i < 16; i++) head[place(c + i)] = static_cast<uint8_t>(words[i]);
                break;
            case KVType::F32:
                for (int i = 0; i < 16; i++) std::memcpy(head + 4 * place(c + i), vector + c + i, 4);
                break;
        }
    }
}

void attend_split(const Context& at, int position, int split, const float* q, Partial to, float* scratch) {
    switch (at.pool->type) {
        case KVType::BF16: return row_split<BF16KV>(at, position, split, q, to, scratch);
        case KVType::F16: return row_split<F16KV>(at, position, split, q, to, scratch);
        case KVType::I8: return row_split<I8KV>(at, position, split, q, to, scratch);
        case KVType::F32: return row_split<F32KV>(at, position, split, q, to, scratch);
    }
}

void fold_partials(int n, const Partial* from, int group, int head_dim, float* out) {
    for (int h = 0; h < group; h++) {
        const size_t at = static_cast<size_t>(h) * head_dim;
        float top = from[0].top[h], total = from[0].total[h];
        for (int s = 1; s < n; s++) fold(top, total, from[0].mixed + at, from[s].top[h], from[s].total[h], from[s].mixed + at, head_dim);
        finish(from[0].mixed + at, total, head_dim, out + at);
    }
}

void attend_tile(const Context& at, int position, int n_rows, const float* q, size_t q_stride, float* out, size_t out_stride, float* scratch) {
    switch (at.pool->type) {
        case KVType::BF16: return tile<BF16KV>(at, position, n_rows, q, q_stride, out, out_stride, scratch);
        case KVType::F16: return tile<F16KV>(at, position, n_rows, q, q_stride, out, out_stride, scratch);
        case KVType::I8: return tile<I8KV>(at, position, n_rows, q, q_stride, out, out_stride, scratch);
        case KVType::F32: return tile<F32KV>(at, position, n_rows, q, q_stride, out, out_stride, scratch);
    }
}

}  // namespace relay

// For tests: rows of one sequence from `position` on, as a decode row if there is one, else as a tile. q, out: [n_rows, group, head_dim].
RELAY_EXPORT void relay_attend(const relay::KVPool* pool, const int32_t* blocks, int layer, int kv_head, int group, int window, int position,
                               int n_rows, const float* q, float* out) {
    using namespace relay;
    const Context at = {pool, blocks, layer, kv_head, group, window, nullptr};
    const size_t width = static_cast<size_t>(group) * static_cast<size_t>(pool->head_dim);
    std::vector<float> scratch(attention_scratch_floats(pool->head_dim));
    if (n_rows > 1) return attend_tile(at, position, n_rows, q, width, out, width, scratch.data());
    std::vector<std::vector<float>> memory;
    std::vector<Partial> partials;
    for (int split = first_split(position, window); split <= last_split(position); split++) {
        memory.emplace_back(width + 2 * static_cast<size_t>(group));
        float* base = memory.back().data();
        partials.push_back({base + width, base + width + group, base});
        attend_split(at, position, split, q, partials.back(), scratch.data());
    }
    fold_partials(static_cast<int>(partials.size()), partials.data(), group, pool->head_dim, out);
}

RELAY_EXPORT void relay_write_kv(const relay::KVPool* pool, int layer, int side, int block, int slot, int kv_head, const float* vector) {
    relay::write_kv(*pool, layer, side, block, slot, kv_head, vector);
}
