// Drawing a token from a row of logits by selection: no pass sorts more than the few that matter.
//
// First the highest logit of each chunk of 64 is found. The n-th highest of those is at most the n-th highest logit, so only chunks that
// reach it are looked into for the n best. That serves greedy rows, log probabilities, and top_k and top_p among the `FEW` best. Where the kept
// set is larger, weights are counted into buckets by their upper bits, and only the bucket where the set ends is sorted.
#include "token_sampling.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "export.h"
#include "simd.h"

namespace relay {
namespace {

constexpr int CHUNK = 64;
constexpr int FEW = 512;
constexpr int BUCKET_SHIFT = 16;                         // a bucket is an exponent and 7 bits of mantissa
constexpr int N_BUCKETS = (0x3f800000 >> BUCKET_SHIFT) + 1;  // weights are at most 1
constexpr float NOTHING = -INFINITY;
constexpr float COLDEST = 1e-30f;
constexpr float LEAST = -87.0f;  // exponents below weigh nothing beside the highest weight, 1

RELAY_INLINE Floats weights_of(Floats logits, Floats top, Floats temperature) {
    const Floats x = div(sub(logits, top), temperature), w = exponential(x);
    const uint32_t some = greater(x, all(LEAST));
    if (some == 0xffff) return w;
    alignas(64) float lanes[16];
    store(lanes, w);
    for (int i = 0; i < 16; i++)
        if (!(some >> i & 1)) lanes[i] = 0.0f;
    return load(lanes);
}

RELAY_INLINE void sum_in_double(Floats a, __m256d (&sums)[4]) {
    const __m256 low = lower(a), high = upper(a);
    sums[0] = _mm256_add_pd(sums[0], _mm256_cvtps_pd(_mm256_castps256_ps128(low)));
    sums[1] = _mm256_add_pd(sums[1], _mm256_cvtps_pd(_mm256_extractf128_ps(low, 1)));
    sums[2] = _mm256_add_pd(sums[2], _mm256_cvtps_pd(_mm256_castps256_ps128(high)));
    sums[3] = _mm256_add_pd(sums[3], _mm256_cvtps_pd(_mm256_extractf128_ps(high, 1)));
}

double total_of(const __m256d (&sums)[4]) {
    alignas(32) double lanes[4];
    _mm256_store_pd(lanes, _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]), _mm256_add_pd(sums[2], sums[3])));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

}  // namespace

bool Sampler::better(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

Sampler::Sampler(int vocab_size)
    : vocab_size_(vocab_size), padded_((vocab_size + CHUNK - 1) / CHUNK * CHUNK), top_(0.0f), tops_(padded_ / CHUNK), counts_(vocab_size) {}

void Sampler::find_tops(const float* values) {
    top_ = NOTHING;
    for (int c = 0; c < padded_ / CHUNK; c++) {
        const float* v = values + static_cast<size_t>(CHUNK) * c;
        tops_[c] = max_of_lanes(max(max(load(v), load(v + 16)), max(load(v + 32), load(v + 48))));
        top_ = std::max(top_, tops_[c]);
    }
}

// Candidates become all values that are at least the n-th highest less `slack`, and perhaps more; at least n, in no order.
void Sampler::highest(const float* values, int n, float slack) {
    float edge = NOTHING;
    if (n <= static_cast<int>(tops_.size())) {
        ranked_ = tops_;
        std::nth_element(ranked_.begin(), ranked_.begin() + (n - 1), ranked_.end(), std::greater<float>());
        edge = ranked_[n - 1] - slack;
    }
    candidates_.clear();
    const Floats least = all(edge);
    for (int c = 0; c < padded_ / CHUNK; c++) {
        if (tops_[c] < edge) continue;
        for (int i = CHUNK * c; i < CHUNK * (c + 1); i += 16)
            for (uint32_t found = at_least(load(values + i), least); found != 0; found &= found - 1) {
                const int id = i + __builtin_ctz(found);
                if (id < vocab_size_) candidates_.push_back({values[id], id});
            }
    }
}

// log of sum exp(logit - top), exponentials in float, their sum in double
double Sampler::log_total(const float* logits) const {
    __m256d sums[4] = {};
    for (int i = 0; i < padded_; i += 16) sum_in_double(exponential(sub(load(logits + i), all(top_))), sums);
    // the padding's -inf came out as the least exponential, which is nothing beside the top's 1
    return std::log(total_of(sums));
}

// Penalties, bias, suppression; what was there before is in edits_.
void Sampler::adjust(float* logits, const Draw& how) {
    const auto edit = [&](int32_t id) { edits_.push_back({id, logits[id]}); };
    edits_.clear();
    const bool repeated = how.repetition_penalty != 1.0f, counted = how.frequency_penalty != 0.0 || how.presence_penalty != 0.0;
    if (repeated || counted) {
        constexpr int32_t SEEN = INT32_MIN;
        for (int64_t i = 0; i < how.n_tokens; i++) {
            int32_t& count = counts_[how.tokens[i]];
            if (count == 0) {
                edit(how.tokens[i]);
                count = SEEN;
            }
            if (i >= how.n_prompt) count++;
        }
        for (const Edit& seen : edits_) {
            float& value = logits[seen.id];
            if (repeated) value = value > 0 ? value / how.repetition_penalty : value * how.repetition_penalty;
            const int32_t n_generated = counts_[seen.id] - SEEN;
            if (counted && n_generated > 0) value -= static_cast<float>(n_generated * how.frequency_penalty + how.presence_penalty);
            counts_[seen.id] = 0;
        }
    }
    for (int i = 0; i < how.n_biases; i++) {
        edit(how.bias_ids[i]);
        logits[how.bias_ids[i]] += how.biases[i];
    }
    for (int i = 0; i < how.n_suppress; i++) {
        edit(how.suppress[i]);
        logits[how.suppress[i]] = NOTHING;
    }
}

void Sampler::draw(float* logits, const Draw& how, Drawn& drawn) {
    std::fill(logits + vocab_size_, logits + padded_, NOTHING);
    find_tops(logits);
    const float top = top_;
    double log_sum = 0.0;
    if (how.n_top >= 0) {
        log_sum = log_total(logits);
        if (how.n_top > 0) {
            const int n = std::min(how.n_top, vocab_size_);
            highest(logits, n, 0.0f);
            candidates_.resize(std::max(candidates_.size(), static_cast<size_t>(n)), {NOTHING, 0});  // NaN
            std::partial_sort(candidates_.begin(), candidates_.begin() + n, candidates_.end(), better);
            for (int i = 0; i < n; i++) {
                drawn.top_ids[i] = candidates_[i].id;
                drawn.top[i] = static_cast<double>(candidates_[i].value) - top - log_sum;
            }
        }
    }
    drawn.id = how.target;
    if (how.target < 0) {
        adjust(logits, how);
        if (!edits_.empty()) find_tops(logits);
        drawn.id = sample(logits, how);
        for (auto edit = edits_.rbegin(); edit != edits_.rend(); ++edit) logits[edit->id] = edit->before;
    }
    if (how.n_top >= 0 && drawn.id >= 0) drawn.logprob = static_cast<double>(logits[drawn.id]) - top - log_sum;
}

int Sampler::sample(const float* logits, const Draw& how) {
    if (!(top_ > NOTHING && top_ < INFINITY)) return -1;
    if (how.temperature == 0.0f) return first_top(logits);
    const float temperature = std::max(how.temperature, COLDEST);
    const bool cut = how.top_k > 0 && how.top_k < vocab_size_;
    if (cut && how.top_k <= FEW) return sample_few(logits, how, temperature, how.top_k, -1.0);
    weights_.resize(static_cast<size_t>(padded_));
    weigh(logits, padded_, temperature, weights_.data());
    if (!cut && how.top_p < 1.0 && FEW < vocab_size_) {
        const int id = sample_few(logits, how, temperature, FEW, total_weight());
        if (id >= 0) return id;
    }
    if (cut) keep_prefix(INFINITY, how.top_k);
    if (how.top_p < 1.0) keep_prefix(how.top_p * total_weight(), INT64_MAX);
    if (how.min_p > 0.0f)
        for (int i = 0; i < padded_; i++)
            if (weights_[i] < how.min_p) weights_[i] = 0.0f;
    return pick(how.uniform);
}

// There is one.
int Sampler::first_top(const float* logits) const {
    for (int c = 0; c < padded_ / CHUNK; c++) {
        if (tops_[c] != top_) continue;
        for (int i = CHUNK * c; i < vocab_size_ && i < CHUNK * (c + 1); i++)
            if (logits[i] == top_) return i;
    }
    return 0;
}

void Sampler::weigh(const float* logits, int n, float temperature, float* weights) const {
    for (int i = 0; i < n; i += 16) store(weights + i, weights_of(load(logits + i), all(top_), all(temperature)));
}

double Sampler::total_weight() const {
    __m256d sums[4] = {};
    for (int i = 0; i < padded_; i += 16) sum_in_double(load(&weights_[i]), sums);
    return total_of(sums);
}

// The k best are candidates, and top_p counts `whole`, or where that is negative their own weight. -1 if top_p wants more than k.
int Sampler::sample_few(const float* logits, const Draw& how, float temperature, int k, double whole) {
    // logits this close may have equal weights, and equals are told apart by id
    highest(logits, k, temperature * 1e-6f + std::abs(top_) * 1e-6f);
    const size_t n = candidates_.size();
    if (n < static_cast<size_t>(k)) return first_top(logits);  // NaN
    few_.assign((n + 15) / 16 * 16, NOTHING);
    for (size_t i = 0; i < n; i++) few_[i] = candidates_[i].value;
    weigh(few_.data(), static_cast<int>(few_.size()), temperature, few_.data());
    for (size_t i = 0; i < n; i++) candidates_[i].value = few_[i];
    std::partial_sort(candidates_.begin(), candidates_.begin() + k, candidates_.end(), better);
    size_t n_kept = static_cast<size_t>(k);
    if (how.top_p < 1.0) {
        if (whole < 0) whole = std::accumulate(candidates_.begin(), candidates_.begin() + k, 0.0, [](double sum, const Candidate& c) { return sum + c.value; });
        const double goal = how.top_p * whole;
        double sum = 0.0;
        for (n_kept = 0; n_kept < static_cast<size_t>(k);) {
            sum += candidates_[n_kept++].value;
            if (sum >= goal) break;
        }
        if (sum < goal && how.top_k != k) return -1;
    }
    if (how.min_p > 0.0f)
        while (n_kept > 1 && candidates_[n_kept - 1].value < how.min_p) n_kept--;
    std::sort(candidates_.begin(), candidates_.begin() + n_kept, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    double total = 0.0, sum = 0.0;
    for (size_t i = 0; i < n_kept; i++) total += candidates_[i].value;
    const double goal = how.uniform * total;
    int32_t last = 0;
    for (size_t i = 0; i < n_kept && sum <= goal; i++) {
        if (candidates_[i].value == 0.0f) continue;
        sum += candidates_[i].value;
        last = candidates_[i].id;
    }
    return last;
}

// Of the weights, highest first and the lower id among equals, keep as many as bring their sum to `goal`, and `most` at most; at least one.
// The others become 0.
void Sampler::keep_prefix(double goal, int64_t most) {
    const auto bucket_of = [&](int i) {
        uint32_t bits;
        std::memcpy(&bits, &weights_[i], 4);
        return static_cast<int>(bits >> BUCKET_SHIFT);
    };
    bucket_counts_.assign(N_BUCKETS, 0);
    bucket_sums_.assign(N_BUCKETS, 0.0);
    for (int i = 0; i < vocab_size_; i++) {
        const int bucket = bucket_of(i);
        bucket_counts_[bucket]++;
        bucket_sums_[bucket] += weights_[i];
    }
    int last = N_BUCKETS - 1;  // where the prefix ends
    double sum = 0.0;
    int64_t n = 0;
    while (last > 0 && sum + bucket_sums_[last] < goal && n + bucket_counts_[last] < most) {
        sum += bucket_sums_[last];
        n += bucket_counts_[last];
        last--;
    }
    candidates_.clear();
    for (int i = 0; i < vocab_size_; i++) {
        const int bucket = bucket_of(i);
        if (bucket < last) weights_[i] = 0.0f;
        if (bucket == last) candidates_.push_back({weights_[i], i});
    }
    std::sort(candidates_.begin(), candidates_.end(), better);
    size_t kept = 0;
    while (kept < candidates_.size() && n < most) {
        sum += candidates_[kept++].value;
        n++;
        if (sum >= goal) break;
    }
    for (; kept < candidates_.size(); kept++) weights_[candidates_[kept].id] = 0.0f;
}

// The first id at which the weights' running sum exceeds uniform times their total; where rounding lets none do so, the last of any weight.
int Sampler::pick(double uniform) {
    const int n_chunks = padded_ / CHUNK;
    sums_.resize(static_cast<size_t>(n_chunks));
    double total = 0.0;
    for (int c = 0; c < n_chunks; c++) {
        __m256d sums[4] = {};
        for (int i = CHUNK * c; i < CHUNK * (c + 1); i += 16) sum_in_double(load(&weights_[i]), sums);
        sums_[c] = total_of(sums);
        total += sums_[c];
    }
    const double goal = uniform * total;
    double sum = 0.0;
    for (int c = 0; c < n_chunks; c++) {
        if (sum + sums_[c] <= goal) {
            sum += sums_[c];
            continue;
        }
        for (int i = CHUNK * c; i < CHUNK * (c + 1); i++) {
            sum += weights_[i];
            if (sum > goal) return i;
        }
    }
    int last = vocab_size_ - 1;
    while (last > 0 && weights_[last] == 0.0f) last--;
    return last;
}

}  // namespace relay

// For tests and benchmarks: rows [n_rows, vocab_size].
RELAY_EXPORT void relay_draw_rows(const float* rows, int n_rows, int vocab_size, const relay::Draw* draws, relay::Drawn* drawn) {
    relay::Sampler sampler(vocab_size);
    std::vector<float> logits(static_cast<size_t>(vocab_size) + 64);
    for (int r = 0; r < n_rows; r++) {
        std::copy_n(rows + static_cast<size_t>(r) * static_cast<size_t>(vocab_size), vocab_size, logits.begin());
        sampler.draw(logits.data(), draws[r], drawn[r]);
    }
}
