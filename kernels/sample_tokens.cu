// A batch of rows of logits and what to do with each become tokens and log probabilities, without a sort and without the host.
//
// sample_tokens: one block of 1024 threads for each row, whatever else is in the batch. It goes over the row in passes, neighbouring
// threads at neighbouring logits, and between passes knows only a few numbers:
//
//   adjust    penalties, grammar mask, bias -> the highest and the lowest id that has it        (temperature 0 ends here)
//   weigh     w = exp((logit - highest) / temperature), kept in `work`
//   cut       the weight at which top_k, then top_p ends: three passes of 11 bits each through a histogram of the weights' bit patterns
//   draw      the kept token, in order of id, whose running sum first exceeds uniform * total: by warps, then lanes, ever finer
//   score     log(sum of exp(logit - highest)) of the raw logits, and the best few ids
//
// Sums are of integers: a weight in units of 2^-44. So they are exact, and the same in any order of threads and atomics; a weight below
// 2^-45 of the highest cannot be drawn. Counts and sums of a histogram's bin are pairs of 32-bit words with a carry (shared memory has no
// 64-bit add).
//
// tally_tokens: one block of 1024 threads for each sequence: counts its tokens anew. A tally is 2 * times generated + (1 if in the prompt).
#include "device.cuh"

namespace {
constexpr int THREADS = 1024, WARPS = 32, BINS = 2048, MOST_TOP = 32;
constexpr int NO_ID = 0x7fffffff;
constexpr float UNITS = 17592186044416.f;  // 2^44

// As in sample_tokens.py.
struct Row {
  u64 seed, choice, position;
  double top_p, frequency_penalty, presence_penalty;
  float temperature, min_p, repetition_penalty;
  int top_k;      // 0: off
  int target;     // -1: draw
  int n_top;      // -1: no log probabilities
  int tally;      // row of `tallies`; -1: none
  int mask;       // row of `masks`; -1: none
  int bias_from;  // in `bias_ids`
  int bias_to;
};

struct Best {
  float value;
  int id;
};

// Elements above `key` belong to it, and of those that equal it the first ones in order of id, up to and including `last_id`.
struct Cut {
  u32 key;
  int last_id;
  u64 above, at;  // measure of elements above the key, and at it
};

struct Scratch {
  u32 low[BINS], high[BINS];
  u64 sums[WARPS];
  u64 found[2];
  float values[WARPS];
  int ids[WARPS];
  u32 top_keys[MOST_TOP];
  int top_ids[MOST_TOP];
  int n_found;
};

// Order-preserving: a larger float has a larger key.
__device__ __forceinline__ u32 ordered(float f) {
  const u32 u = __float_as_uint(f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ u64 in_units(float weight) {
  return __float2ull_rn(weight * UNITS);
}

__device__ __forceinline__ u64 mixed(u64 z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

__device__ __forceinline__ u64 block_sum(Scratch& s, u64 x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(ALL_LANES, x, o);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = x;
  __syncthreads();
  u64 total = 0;
  for (int w = 0; w < WARPS; w++) total += s.sums[w];
  return total;
}

__device__ __forceinline__ bool better(const Best& a, const Best& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

__device__ __forceinline__ Best block_best(Scratch& s, Best best) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const Best other{__shfl_xor_sync(ALL_LANES, best.value, o), __shfl_xor_sync(ALL_LANES, best.id, o)};
    if (better(other, best)) best = other;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    s.values[threadIdx.x / 32] = best.value;
    s.ids[threadIdx.x / 32] = best.id;
  }
  __syncthreads();
  for (int w = 0; w < WARPS; w++)
    if (better({s.values[w], s.ids[w]}, best)) best = {s.values[w], s.ids[w]};
  return best;
}

// The sum of what lower threads of the block have, x not included.
__device__ __forceinline__ u64 sum_before(Scratch& s, u64 x) {
  const int lane = threadIdx.x % 32;
  u64 through = x;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const u64 before = __shfl_up_sync(ALL_LANES, through, o);
    if (lane >= o) through += before;
  }
  __syncthreads();
  if (lane == 31) s.sums[threadIdx.x / 32] = through;
  __syncthreads();
  u64 before = through - x;
  for (int w = 0; w < threadIdx.x / 32; w++) before += s.sums[w];
  return before;
}

// The highest key such that the elements at or above it measure `goal` or more. goal: 1 to the measure of all. measure(key): of one
// element.
template <class Key, class Measure>
__device__ Cut find_cut(Scratch& s, int n, Key key, Measure measure, u64 goal) {
  u32 prefix = 0;
  u64 above = 0;
  for (int shift = 22; shift >= 0; shift -= 11) {
    for (int b = threadIdx.x; b < BINS; b += THREADS) s.low[b] = s.high[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
      const u32 k = key(i);
      if (shift < 22 && (k >> (shift + 11)) != prefix) continue;
      const int bin = (k >> shift) % BINS;
      const u64 m = measure(k);
      const u32 low = (u32)m, before = atomicAdd(&s.low[bin], low);
      const u32 high = (u32)(m >> 32) + (before + low < before);
      if (high) atomicAdd(&s.high[bin], high);
    }
    __syncthreads();
    // two bins to a thread, the highest first
    const int bin = BINS - 1 - 2 * (int)threadIdx.x;
    const u64 first = s.low[bin] | (u64)s.high[bin] << 32, second = s.low[bin - 1] | (u64)s.high[bin - 1] << 32;
    const u64 before = above + sum_before(s, first + second);
    const bool in_first = goal > before && goal <= before + first, in_second = goal > before + first && goal <= before + first + second;
    if (in_first || in_second) {
      s.found[0] = in_first ? bin : bin - 1;
      s.found[1] = in_first ? before : before + first;
    }
    __syncthreads();
    prefix = prefix << 11 | (u32)s.found[0];
    above = s.found[1];
    __syncthreads();
  }
  // the last histogram still stands: what lies at the key
  const int bin = prefix % BINS;
  return {prefix, NO_ID, above, s.low[bin] | (u64)s.high[bin] << 32};
}

// The first i in [from, to) at which the running sum of measure(i) exceeds `goal`. One warp; some i must.
template <class Measure>
__device__ int locate_in_warp(int from, int to, Measure measure, u64 goal) {
  const int lane = threadIdx.x % 32;
  u64 before = 0;
  for (int i = from; i < to; i += 32) {
    u64 through = i + lane < to ? measure(i + lane) : 0;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const u64 other = __shfl_up_sync(ALL_LANES, through, o);
      if (lane >= o) through += other;
    }
    const unsigned past = __ballot_sync(ALL_LANES, before + through > goal);
    if (past) return i + __ffs((int)past) - 1;
    before += __shfl_sync(ALL_LANES, through, 31);
  }
  return to - 1;
}

// The same for the whole block over [0, n): a part for each warp, then the part that has it again, then its lanes. `goal` of the total.
template <class Measure, class Goal>
__device__ int locate(Scratch& s, int n, Measure measure, Goal goal_of) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int from = 0, to = n;
  u64 goal = 0;
  for (int level = 0; level < 2; level++) {
    const int part = (to - from + WARPS * 32 - 1) / (WARPS * 32) * 32, begin = from + warp * part, end = min(begin + part, to);
    u64 sum = 0;
    for (int i = begin + lane; i < end; i += 32) sum += measure(i);
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, o);
    __syncthreads();
    if (lane == 0) s.sums[warp] = sum;
    __syncthreads();
    if (level == 0) {
      u64 total = 0;
      for (int w = 0; w < WARPS; w++) total += s.sums[w];
      goal = goal_of(total);
    }
    int w = 0;
    for (; w < WARPS - 1 && s.sums[w] <= goal; w++) goal -= s.sums[w];
    from += w * part;
    to = min(from + part, to);
  }
  __syncthreads();
  if (warp == 0) {
    const int at = locate_in_warp(from, to, measure, goal);
    if (lane == 0) s.n_found = at;
  }
  __syncthreads();
  const int at = s.n_found;
  __syncthreads();
  return at;
}

// Penalties and grammar mask, in the order of the definition. Biases come after, since they are few.
__device__ __forceinline__ float adjusted(float logit, int i, const Row& row, const u32* tally, const u32* mask) {
  if (tally) {
    const u32 seen = tally[i], generated = seen >> 1;
    if (seen) logit = logit > 0.f ? __fdiv_rn(logit, row.repetition_penalty) : logit * row.repetition_penalty;
    if (generated) logit -= (float)(generated * row.frequency_penalty + row.presence_penalty);
  }
  return mask && !(mask[i / 32] >> (i % 32) & 1) ? minus_infinity() : logit;
}

__device__ int draw(Scratch& s, const Row& row, const float* logits, float* work, const u32* tally, const u32* mask, const int* bias_ids,
                    const float* biases, int n) {
  const float* from = logits;
  Best best{minus_infinity(), NO_ID};
  if (tally || mask || row.bias_from < row.bias_to) {
    from = work;
    for (int i = threadIdx.x; i < n; i += THREADS) work[i] = adjusted(logits[i], i, row, tally, mask);
    __syncthreads();
    for (int i = row.bias_from + threadIdx.x; i < row.bias_to; i += THREADS) work[bias_ids[i]] += biases[i];
    __syncthreads();
  }
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (better({from[i], i}, best)) best = {from[i], i};
  best = block_best(s, best);
  if (fabsf(best.value) == -minus_infinity()) return -1;
  if (row.temperature == 0.f) return best.id;

  const float temperature = fmaxf(row.temperature, 1e-30f);
  for (int i = threadIdx.x; i < n; i += THREADS) work[i] = expf(__fdiv_rn(from[i] - best.value, temperature));
  __syncthreads();

  auto key = [&](int i) { return __float_as_uint(work[i]); };
  auto weight = [](u32 k) { return in_units(__uint_as_float(k)); };
  const u32 least = __float_as_uint(row.min_p);
  Cut cut{0, NO_ID, 0, 0};
  u64 n_equal = 0;  // of those at the cut how many are kept
  if (row.top_k > 0 && row.top_k < n) {
    cut = find_cut(s, n, key, [](u32) { return (u64)1; }, row.top_k);
    n_equal = row.top_k - cut.above;
  }
  if (row.top_p < 1.) {
    u64 total = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) total += key(i) > cut.key ? weight(key(i)) : 0;
    total = block_sum(s, total) + n_equal * weight(cut.key);
    const u64 goal = max(__double2ull_ru(row.top_p * (double)total), (u64)1);
    const Cut of_mass = find_cut(s, n, key, weight, min(goal, total));
    const u64 each = weight(of_mass.key), needed = (min(goal, total) - of_mass.above + each - 1) / each;
    if (of_mass.key > cut.key || n_equal == 0) {
      cut = {of_mass.key, NO_ID, of_mass.above, of_mass.at / each};
      n_equal = needed;
    } else {
      n_equal = min(n_equal, needed);
    }
  }
  if (n_equal && n_equal < cut.at)
    cut.last_id = locate(s, n, [&](int i) { return (u64)(key(i) == cut.key); }, [&](u64) { return n_equal - 1; });

  auto kept = [&](int i) {
    const u32 k = key(i);
    return k >= least && (k > cut.key || (k == cut.key && i <= cut.last_id)) ? weight(k) : 0;
  };
  const u64 random = mixed(mixed(mixed(row.seed) ^ row.choice) ^ row.position) >> 11;
  return locate(s, n, kept, [&](u64 total) { return __umul64hi(random << 11, total); });
}

// Log probabilities of the plain distribution: of `id`, and of the n_top best, best first.
__device__ void score(Scratch& s, const float* logits, int n, int id, int n_top, double* logprob, int* top_ids, double* top) {
  Best best{minus_infinity(), NO_ID};
  for (int i = threadIdx.x; i < n; i += THREADS)
    if (better({logits[i], i}, best)) best = {logits[i], i};
  best = block_best(s, best);
  u64 sum = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) sum += in_units(expf(logits[i] - best.value));
  const double log_total = log((double)block_sum(s, sum) / (double)UNITS);
  if (threadIdx.x == 0) *logprob = (double)logits[id] - (double)best.value - log_total;
  if (n_top <= 0) return;

  auto key = [&](int i) { return ordered(logits[i]); };
  Cut cut = find_cut(s, n, key, [](u32) { return (u64)1; }, n_top);
  if (n_top - cut.above < cut.at)
    cut.last_id = locate(s, n, [&](int i) { return (u64)(key(i) == cut.key); }, [&](u64) { return n_top - cut.above - 1; });
  if (threadIdx.x == 0) s.n_found = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const u32 k = key(i);
    if (k > cut.key || (k == cut.key && i <= cut.last_id)) {
      const int at = atomicAdd(&s.n_found, 1);
      s.top_keys[at] = k;
      s.top_ids[at] = i;
    }
  }
  __syncthreads();
  if (threadIdx.x < n_top) {
    const u32 k = s.top_keys[threadIdx.x];
    const int i = s.top_ids[threadIdx.x];
    int rank = 0;
    for (int j = 0; j < n_top; j++) rank += s.top_keys[j] > k || (s.top_keys[j] == k && s.top_ids[j] < i);
    top_ids[rank] = i;
    top[rank] = (double)logits[i] - (double)best.value - log_total;
  }
}
}  // namespace

KERNEL void __launch_bounds__(1024)
    sample_tokens(const float* __restrict__ logits, const Row* __restrict__ rows, u32* __restrict__ tallies, const u32* __restrict__ masks,
                  const int* __restrict__ bias_ids, const float* __restrict__ biases, float* __restrict__ work, int* __restrict__ ids,
                  double* __restrict__ logprobs, int* __restrict__ top_ids, double* __restrict__ top, int n, int n_mask_words) {
  SHARED(Scratch, scratch, [1]);
  const Row row = rows[blockIdx.x];
  const float* mine = logits + (i64)blockIdx.x * n;
  u32* tally = row.tally < 0 ? nullptr : tallies + (i64)row.tally * n;
  const u32* mask = row.mask < 0 ? nullptr : masks + (i64)row.mask * n_mask_words;
  int id = row.target;
  if (id < 0) id = draw(scratch[0], row, mine, work + (i64)blockIdx.x * n, tally, mask, bias_ids, biases, n);
  if (threadIdx.x == 0) {
    ids[blockIdx.x] = id;
    if (tally && id >= 0 && row.target < 0) tally[id] += 2;
  }
  if (row.n_top >= 0 && id >= 0) {
    const i64 at = (i64)blockIdx.x * MOST_TOP;
    score(scratch[0], mine, n, id, min(row.n_top, n), logprobs + blockIdx.x, top_ids + at, top + at);
  }
}

KERNEL void __launch_bounds__(1024)
    tally_tokens(const int* __restrict__ tokens, const int* __restrict__ begins, const int* __restrict__ n_prompt,
                 const int* __restrict__ slots, u32* __restrict__ tallies, int n) {
  u32* tally = tallies + (i64)slots[blockIdx.x] * n;
  for (int i = threadIdx.x; i < n; i += THREADS) tally[i] = 0;
  __syncthreads();
  const int begin = begins[blockIdx.x], end = begins[blockIdx.x + 1], generated = begin + n_prompt[blockIdx.x];
  for (int i = begin + threadIdx.x; i < end; i += THREADS) {
    if (i < generated)
      atomicOr(&tally[tokens[i]], 1u);
    else
      atomicAdd(&tally[tokens[i]], 2u);
  }
}
