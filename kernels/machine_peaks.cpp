// What this machine can do at best: how fast its threads read memory together, and how many products they accumulate. See machine_peaks.py.
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "export.h"
#include "simd.h"
#include "thread_pool.h"

namespace relay {
namespace {

constexpr int64_t SPIN_NS = 100000;
constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr int READ_CHUNKS = 128;
constexpr int DOT_ROUNDS = 20000, DOT_SUMS = wide_registers ? 16 : 5;

double seconds() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

struct Job {
    const uint8_t* data;
    size_t bytes;
    std::atomic<int32_t> sink{0};  // so that nothing is left out as useless
};

void read_chunk(void* context, int, int chunk, int) {
    Job& job = *static_cast<Job*>(context);
    const size_t begin = job.bytes / READ_CHUNKS * static_cast<size_t>(chunk), n = job.bytes / READ_CHUNKS / 256 * 256;
    Ints sums[4] = {no_ints(), no_ints(), no_ints(), no_ints()};
    for (size_t i = begin; i < begin + n; i += 256) {
        prefetch(job.data + i + 16384, 256);
        for (size_t j = 0; j < 4; j++) sums[j] = add(sums[j], load_ints(job.data + i + 64 * j));
    }
    job.sink += sum_of_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

template <bool BYTES> void dot_chunk(void* context, int, int chunk, int) {
    Ints sums[DOT_SUMS], w = all(0x01010101), x = all(chunk);
    for (Ints& sum : sums) sum = no_ints();
    for (int i = 0; i < DOT_ROUNDS; i++) {
#pragma GCC unroll 16
        for (int s = 0; s < DOT_SUMS; s++) {
            sums[s] = BYTES ? dot_bytes(sums[s], w, x) : dot_shorts(sums[s], w, x);
            forget(w);  // or one product would serve all sums
        }
    }
    Ints total = no_ints();
    for (const Ints& sum : sums) total = add(total, sum);
    static_cast<Job*>(context)->sink += sum_of_lanes(total);
}

double best_of(int times, ThreadPool& pool, int n_chunks, ThreadPool::Work work, Job& job) {
    const int32_t chunks = n_chunks;
    double best = 1e9;
    for (int i = 0; i < times; i++) {
        const double began = seconds();
        pool.begin(&chunks, 1, work, &job);
        pool.finish();
        best = std::min(best, seconds() - began);
    }
    return best;
}

}  // namespace
}  // namespace relay

// Bytes a second that `n_threads` read from `bytes` of memory in huge pages, as far as there are any; 0 if there is no such memory.
RELAY_EXPORT double relay_read_rate(int n_threads, int64_t bytes, int times) {
    using namespace relay;
    const size_t n = static_cast<size_t>(bytes), room = n + HUGE_PAGE;
    void* reserved = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (reserved == MAP_FAILED) return 0.0;
    const uintptr_t aligned = (reinterpret_cast<uintptr_t>(reserved) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    uint8_t* data = reinterpret_cast<uint8_t*>(aligned);
    madvise(data, n, MADV_HUGEPAGE);
    std::memset(data, 1, n);
    ThreadPool pool(n_threads, SPIN_NS);
    Job job{data, n};
    const double took = best_of(times, pool, READ_CHUNKS, read_chunk, job);
    munmap(reserved, room);
    return static_cast<double>(n / READ_CHUNKS / 256 * 256 * READ_CHUNKS) / took;
}

// Multiplications and additions a second, two for each product, of int16 pairs or (narrow) of bytes.
RELAY_EXPORT double relay_dot_rate(int n_threads, int narrow, int times) {
    using namespace relay;
    ThreadPool pool(n_threads, SPIN_NS);
    Job job{nullptr, 0};
    const int n_chunks = 8 * n_threads;
    const double took = best_of(times, pool, n_chunks, narrow ? dot_chunk<true> : dot_chunk<false>, job);
    return 2.0 * (narrow ? 64 : 32) * DOT_SUMS * DOT_ROUNDS * n_chunks / took;
}
