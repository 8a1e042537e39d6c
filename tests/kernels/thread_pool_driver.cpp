// Runs jobs on pools of 1 to 5 threads and checks that every chunk of every phase ran once, and after all chunks of the phase before it. The
// chunks write plain memory that the next phase reads: the thread sanitizer sees whether phases are ordered. Some threads are held up. Some
// jobs are abandoned on the way, by a chunk or from outside: then the phases that ran are whole, and none behind them has begun.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace {

struct Job {
    std::vector<int32_t> n_chunks;
    std::vector<std::vector<int>> written;  // [phase][chunk]: how often it ran, plus what it found in the phase before
    unsigned slow;                          // one chunk in so many sleeps; 0: none
    int abandons_in;                        // this phase's first chunk abandons the job; -1: none
    int32_t abandoned = 0;
};

void work(void* context, int phase, int chunk, int thread) {
    Job& job = *static_cast<Job*>(context);
    const auto p = static_cast<size_t>(phase), c = static_cast<size_t>(chunk);
    int before = 0;
    if (phase > 0)
        for (const int value : job.written[p - 1]) before += value;
    if (job.slow != 0 && (p * 7919 + c * 104729 + static_cast<size_t>(thread)) % job.slow == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    if (phase == job.abandons_in && chunk == 0) __atomic_store_n(&job.abandoned, 1, __ATOMIC_RELAXED);
    const int expected = phase > 0 ? job.n_chunks[p - 1] : 0;
    job.written[p][c] += before == expected ? 1 : 1000;
}

}  // namespace

int main(int, char** arguments) {
    std::mt19937 random(static_cast<unsigned>(std::atoi(arguments[1])));
    const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); };
    for (int round = 0; round < 12; round++) {
        const int n_threads = 1 + round % 5;
        relay::ThreadPool pool(n_threads, pick(0, 2) * 20000);
        for (int i = 0; i < 60; i++) {
            Job job;
            for (int p = pick(1, 12); p > 0; p--) job.n_chunks.push_back(pick(0, 9) == 0 ? pick(1, 700) : pick(1, 2 * n_threads));
            for (const int32_t n : job.n_chunks) job.written.emplace_back(static_cast<size_t>(n), 0);
            job.slow = pick(0, 2) == 0 ? 50 : 0;
            const int n_phases = static_cast<int>(job.n_chunks.size());
            job.abandons_in = pick(0, 3) == 0 ? pick(0, n_phases - 1) : -1;
            const bool from_outside = pick(0, 7) == 0;
            pool.begin(job.n_chunks.data(), n_phases, work, &job, &job.abandoned);
            if (pick(0, 3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(pick(0, 500)));  // the others have begun, or are through
            if (from_outside) __atomic_store_n(&job.abandoned, 1, __ATOMIC_RELAXED);
            pool.finish();
            int n_whole = 0;
            while (n_whole < n_phases && job.written[static_cast<size_t>(n_whole)][0] != 0) n_whole++;
            const bool is_right = from_outside ? (n_threads > 1 ? n_whole > 0 : n_whole == 1) : n_whole == (job.abandons_in < 0 ? n_phases : job.abandons_in + 1);
            for (int p = 0; p < n_phases; p++)
                for (const int value : job.written[static_cast<size_t>(p)])
                    if (value != (p < n_whole ? 1 : 0) || !is_right) {
                        std::fprintf(stderr, "a chunk ran %d times, or before the phase before it ended, or though the job was abandoned\n", value);
                        return 1;
                    }
            if (i % 20 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        int64_t total = 0;
        for (int t = 0; t < n_threads; t++) total += pool.counters(t).chunks;
        if (total <= 0) return 1;
    }
    return 0;
}
