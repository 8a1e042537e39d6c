// How chunks are claimed. A phase is cut into one share of consecutive chunks for each thread (so that a thread streams through consecutive
// memory); a thread takes chunks from its own share, then from others'. A share is one word that names its phase, so a thread that slept
// through phases cannot claim: its compare-and-swap fails. Whoever returns from the last chunk of a phase opens the next. So a thread
// that the kernel took off its core delays the one chunk it holds, or nothing. What a job says is read only by owners of chunks: nobody else
// can be behind, and `finish` returns without counting heads.
#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace relay {
namespace {

constexpr int64_t LONG_WAIT_NS = 1000000;  // a wait that long: the cores are shared with others
constexpr int64_t SHORT_SPIN_NS = 4000;
constexpr int SHORT_WAITS = 256;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

void relax() { __builtin_ia32_pause(); }

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    return syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

uint64_t share_word(uint32_t phase, uint32_t next, uint32_t end) { return static_cast<uint64_t>(phase) << 32 | next << 16 | end; }

}  // namespace

ThreadPool::ThreadPool(int n_threads, int64_t spin_ns) : n_threads_(n_threads), spin_ns_(spin_ns), shares_(new Share[n_threads]) {}

ThreadPool::~ThreadPool() {
    ending_.store(true);
    publish(phase_.load() + 1);
    for (std::thread& thread : threads_) thread.join();
}

ThreadCounters ThreadPool::counters(int thread) const {
    const Share& share = shares_[thread];
    return {share.chunks.load(std::memory_order_relaxed), share.stolen.load(std::memory_order_relaxed), share.sleeps.load(std::memory_order_relaxed)};
}

void ThreadPool::begin(const int32_t* n_chunks, int n_phases, Work work, void* context, const int32_t* abandoned) {
    n_phases_ = n_phases;
    if (n_phases == 0) return;
    if (threads_.empty() && n_threads_ > 1) {
        sigset_t all, before;  // signals are for the interpreter's thread
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 1; i < n_threads_; i++) threads_.emplace_back([this, i] { serve(i); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    first_ = phase_.load() + 1;
    n_chunks_ = n_chunks;
    work_ = work;
    context_ = context;
    abandoned_ = abandoned;
    resting_.store(first_ + static_cast<uint32_t>(n_phases), std::memory_order_relaxed);
    open(first_);
}

void ThreadPool::finish() {
    if (n_phases_ > 0) take_part(0, true);
}

// Make the chunks of a phase claimable. Only the one thread that knows all chunks before it to be done gets here.
void ThreadPool::open(uint32_t phase) {
    const int64_t n = n_chunks_[phase - first_];
    n_done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < n_threads_; i++) {
        const auto begin = static_cast<uint32_t>(n * i / n_threads_), end = static_cast<uint32_t>(n * (i + 1) / n_threads_);
        shares_[i].word.store(share_word(phase, begin, end), std::memory_order_release);
    }
    publish(phase);
}

void ThreadPool::publish(uint32_t phase) {
    phase_.store(phase);
    if (n_asleep_.load() > 0) futex(&phase_, FUTEX_WAKE, INT32_MAX);
}

// A chunk of the phase, or -1: none is left, or the phase is over.
int ThreadPool::claim(uint32_t phase, int thread) {
    for (int i = 0; i < n_threads_; i++) {
        Share& share = shares_[(thread + i) % n_threads_];
        uint64_t word = share.word.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t next = word >> 16 & 0xffff, end = word & 0xffff;
            if (static_cast<uint32_t>(word >> 32) != phase || next == end) break;
            if (share.word.compare_exchange_weak(word, word + (1 << 16), std::memory_order_acquire, std::memory_order_relaxed)) {
                Share& own = shares_[thread];
                own.chunks.store(own.chunks.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
                if (i != 0) own.stolen.store(own.stolen.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
                return static_cast<int>(next);
            }
        }
    }
    return -1;
}

void ThreadPool::take_part(int thread, bool until_done) {
    // The job of a caller is its own to read; a worker reads nothing of it without a chunk.
    const uint32_t last = until_done ? first_ + static_cast<uint32_t>(n_phases_) : 0;
    for (;;) {
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (until_done ? phase == last : ending_.load(std::memory_order_relaxed)) return;
        const int chunk = claim(phase, thread);
        if (chunk < 0) {
            wait_beyond(phase, shares_[thread]);
            continue;
        }
        const uint32_t index = phase - first_;
        const int32_t n_chunks = n_chunks_[index];
        const uint32_t end = first_ + static_cast<uint32_t>(n_phases_);
        work_(context_, static_cast<int>(index), chunk, thread);
        if (n_done_.fetch_add(1, std::memory_order_acq_rel) + 1 < n_chunks) continue;
        const bool is_over = phase + 1 == end || (abandoned_ != nullptr && __atomic_load_n(abandoned_, __ATOMIC_RELAXED) != 0);
        if (is_over) publish(end);
        else open(phase + 1);
    }
}

void ThreadPool::wait_beyond(uint32_t phase, Share& own) {
    const int64_t began = now_ns(), limit = own.hurry > 0 ? SHORT_SPIN_NS : spin_ns_;
    const bool rests = phase == resting_.load(std::memory_order_relaxed);
    if (own.hurry > 0) own.hurry--;
    do {
        for (int i = 0; i < 16; i++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            relax();
        }
    } while (now_ns() - began < limit);
    n_asleep_.fetch_add(1);
    if (phase_.load() == phase) {
        own.sleeps.store(own.sleeps.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        futex(&phase_, FUTEX_WAIT, phase);
    }
    n_asleep_.fetch_sub(1);
    if (!rests && now_ns() - began > LONG_WAIT_NS) own.hurry = SHORT_WAITS;
}

void ThreadPool::serve(int thread) { take_part(thread, false); }

}  // namespace relay
