// Threads that share the chunks of a sequence of phases, and wait for nobody who holds none. See thread_pool.py.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace relay {

constexpr int MAX_CHUNKS = 65535;  // of one phase
constexpr int MAX_THREADS = 256;

// What one thread has done since the pool began. Written by that thread only.
struct ThreadCounters {
    int64_t chunks, stolen, sleeps;
};

// Not copied; `begin` and `finish` are called in turn, by one thread at a time. The threads are made by the first `begin`, so that they inherit
// the caller's niceness (which one that is, and why: thread_pool.py).
class ThreadPool {
  public:
    // work(context, phase, chunk, thread): called once for each chunk of each phase; phase p + 1 begins when all chunks of p have returned.
    using Work = void (*)(void* context, int phase, int chunk, int thread);

    // 1 to MAX_THREADS threads, the caller being one of them. `spin_ns`: how long a thread waits awake before it sleeps.
    ThreadPool(int n_threads, int64_t spin_ns);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int n_threads() const { return n_threads_; }
    // Let the other threads start; the caller takes part from `finish` on, which returns when all is done. n_chunks: of each phase, 1 to MAX_CHUNKS.
    // abandoned: once anybody has stored something else than 0 there, no further phase begins, and the job is over.
    void begin(const int32_t* n_chunks, int n_phases, Work work, void* context, const int32_t* abandoned = nullptr);
    void finish();
    ThreadCounters counters(int thread) const;

  private:
    // One thread's part of the running phase: phase << 32 | next chunk << 16 | end. Whoever moves `next` owns the chunk.
    struct alignas(64) Share {
        std::atomic<uint64_t> word{0};
        std::atomic<int64_t> chunks{0}, stolen{0}, sleeps{0};
        int hurry = 0;  // so many more waits are short: the last long one was in vain
    };

    void open(uint32_t phase);
    void publish(uint32_t phase);
    int claim(uint32_t phase, int thread);
    void take_part(int thread, bool until_done);
    void wait_beyond(uint32_t phase, Share& own);
    void serve(int thread);

    const int n_threads_;
    const int64_t spin_ns_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> threads_;
    // Written by `begin` while no chunk is owned, read by owners of chunks only.
    const int32_t* n_chunks_ = nullptr;
    int n_phases_ = 0;
    uint32_t first_ = 0;
    Work work_ = nullptr;
    void* context_ = nullptr;
    const int32_t* abandoned_ = nullptr;

    alignas(64) std::atomic<uint32_t> phase_{0};  // of which chunks may be claimed; a futex
    alignas(64) std::atomic<int32_t> n_done_{0};
    alignas(64) std::atomic<int32_t> n_asleep_{0};
    std::atomic<uint32_t> resting_{0};  // the phase after the last of the latest job: waiting in it is not waiting for anybody
    std::atomic<bool> ending_{false};
};

}  // namespace relay
