// One row of logits becomes a token. See token_sampling.py.
#pragma once
#include <cstdint>
#include <vector>

namespace relay {

// What to do with one row. Pointers may be null where their count is 0.
struct Draw {
    double uniform;
    double top_p, frequency_penalty, presence_penalty;
    float temperature, min_p, repetition_penalty;
    int32_t top_k;
    int32_t target;      // >= 0: nothing is drawn, this token is scored
    int32_t n_top;       // log probabilities: -1 none, else how many alternatives
    const int32_t* tokens;  // all of the sequence, of which n_prompt are the prompt
    int64_t n_tokens, n_prompt;
    const int32_t* bias_ids;
    const float* biases;
    const int32_t* suppress;
    int32_t n_biases, n_suppress;
};

// `id` is -1 where the highest logit is not finite. `top_ids` and `top` have room for n_top; log probabilities are written only where asked for.
struct Drawn {
    int32_t id;
    int32_t unused;
    double logprob;
    int32_t* top_ids;
    double* top;
};

// Scratch of one thread, for one vocabulary.
class Sampler {
  public:
    explicit Sampler(int vocab_size);
    // logits: [vocab_size], padded to a multiple of 64 by anything; left as they were (the padding becomes -inf).
    void draw(float* logits, const Draw& how, Drawn& drawn);

  private:
    struct Candidate {
        float value;
        int32_t id;
    };
    struct Edit {
        int32_t id;
        float before;
    };

    static bool better(const Candidate& a, const Candidate& b);

    void find_tops(const float* values);
    double log_total(const float* logits) const;
    void highest(const float* values, int n, float slack);
    void adjust(float* logits, const Draw& how);
    int sample(const float* logits, const Draw& how);
    int sample_few(const float* logits, const Draw& how, float temperature, int k, double whole);
    int first_top(const float* logits) const;
    void weigh(const float* logits, int n, float temperature, float* weights) const;
    double total_weight() const;
    void keep_prefix(double goal, int64_t most);
    int pick(double uniform);

    const int vocab_size_, padded_;
    float top_;                          // of the logits at hand
    std::vector<float> tops_, ranked_;   // of each CHUNK
    std::vector<float> weights_, few_;   // of all, and of the candidates
    std::vector<double> sums_;           // of each CHUNK of weights
    std::vector<Candidate> candidates_;
    std::vector<Edit> edits_;
    std::vector<int32_t> counts_;        // of generated tokens; zero between calls
    std::vector<int64_t> bucket_counts_;
    std::vector<double> bucket_sums_;
};

}  // namespace relay
