// One block at a time: its fibers, its shared memory, its barrier, the order in which threads run, and what is reported when they misuse
// it.
#pragma once
#include <cstdio>
#include <string>
#include <utility>

#include "fiber.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulator {

constexpr size_t MOST_DYNAMIC = 227 * 1024, MOST_STATIC = 48 * 1024;

struct StaticShared {
  const void* key;
  void* memory;
};

struct Block {
  std::vector<Fiber> fibers;
  int n = 0, live = 0;
  dim3 size, grid;
  Index number{};
  Fiber* current = nullptr;
  Fiber host;
  void (*invoke)(void*) = nullptr;
  void* context = nullptr;
  char* dynamic = nullptr;
  std::vector<StaticShared> statics;
  size_t static_bytes = 0;
  std::vector<uint32_t> arrived, ended;  // lanes, by warp
  std::vector<char> warp_tags;
  int n_waiting = 0, n_true = 0, outcome = 0;
  char barrier_tag = 0;
  std::string error;
  uint64_t random = 0;  // 0: threads take turns
  const void* host_stack = nullptr;
  size_t host_stack_size = 0;
};
inline Block block;

inline void switch_to(Fiber* from, Fiber* to, [[maybe_unused]] bool for_good = false) {
  {
    Unwatched unwatched;
    block.current = to;
  }
#if defined(__SANITIZE_ADDRESS__)
  const bool home = to == &block.host;
  __sanitizer_start_switch_fiber(for_good ? nullptr : &from->asan_frames, home ? block.host_stack : to->stack,
                                 home ? block.host_stack_size : STACK);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  emulator_switch(&from->stack_pointer, to->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from->asan_frames, nullptr, nullptr);
#endif
}

// Give up the grid. Kernels own nothing, so their fibers are simply left.
[[noreturn]] inline void fail(const std::string& what) {
  Unwatched unwatched;
  const Fiber& f = *block.current;
  char where[160];
  snprintf(where, sizeof where, " [block %u,%u,%u thread %u,%u,%u]", block.number.x, block.number.y, block.number.z, f.thread.x, f.thread.y,
           f.thread.z);
  block.error = what + where;
  switch_to(block.current, &block.host, true);
  abort();
}

inline Fiber* next() {
  const int n = block.n;
  int from = block.current == &block.host ? n - 1 : block.current->number;
  if (block.random) {
    block.random = block.random * 6364136223846793005ull + 1442695040888963407ull;
    from = int((block.random >> 33) % n);
  }
  for (int i = 1; i <= n; i++) {
    Fiber& fiber = block.fibers[(from + i) % n];
    if (fiber.state == State::running) return &fiber;
  }
  return nullptr;
}

inline std::string who_waits() {
  std::string text = "deadlock: no thread can run;";
  int shown = 0;
  for (int i = 0; i < block.n && shown < 6; i++) {
    const Fiber& f = block.fibers[i];
    if (f.state == State::ended) continue;
    shown++;
    text += " t" + std::to_string(i) + (f.state == State::at_barrier ? " at the barrier of line " : " in the warp operation of line ") +
            std::to_string(f.line) + ";";
  }
  return text;
}

inline void wait() {
  Fiber *me = block.current, *to = next();
  if (!to) fail(who_waits());
  if (to != me) switch_to(me, to);
}

inline void open_barrier_if_all_there() {
  if (block.n_waiting == 0 || block.n_waiting < block.live) return;
  block.outcome = block.n_true;
  block.n_waiting = block.n_true = 0;
  int line = -1;
  for (int i = 0; i < block.n; i++) {
    Fiber& fiber = block.fibers[i];
    if (fiber.state != State::at_barrier) continue;
    if (line < 0) line = fiber.line;
    if (line != fiber.line) fail("barrier reached at different lines, " + std::to_string(line) + " and " + std::to_string(fiber.line));
    fiber.state = State::running;
  }
}

// Returns for how many threads `value` was true.
inline int barrier(bool value, int line) {
  release(&block.barrier_tag);
  int result;
  {
    Unwatched unwatched;
    Fiber* me = block.current;
    me->state = State::at_barrier;
    me->line = line;
    block.n_waiting++;
    block.n_true += value;
    open_barrier_if_all_there();
    if (me->state != State::running) wait();
    result = block.outcome;
  }
  acquire(&block.barrier_tag);
  return result;
}

void leave_warp(Fiber& me);  // in warp.h

inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (!block.host_stack) {
    block.host_stack = bottom;
    block.host_stack_size = size;
  }
#endif
  block.invoke(block.context);
  release(&block.host);
  Fiber* to;
  Fiber* me;
  {
    Unwatched unwatched;
    me = block.current;
    if (!me->open.empty() || !me->groups.empty()) fail("a thread ends with copies in flight");
    leave_warp(*me);
    me->state = State::ended;
    block.live--;
    if (block.live) open_barrier_if_all_there();
    to = block.live ? next() : &block.host;
    if (!to) fail(who_waits());
  }
  switch_to(me, to, true);
  abort();
}

inline void run_block() {
  for (int i = 0; i < block.n; i++) {
    Fiber& fiber = block.fibers[i];
    prepare(fiber, entry);
    fiber.number = i;
    fiber.thread = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    fiber.state = State::running;
  }
  const size_t warps = (block.n + 31) / 32;
  block.live = block.n;
  block.n_waiting = block.n_true = 0;
  block.warp_tags.assign(warps, 0);
  block.arrived.assign(warps, 0);
  block.ended.assign(warps, 0);
  block.current = &block.host;
  switch_to(&block.host, next());
  for (int i = 0; i < block.n; i++) dispose(block.fibers[i]);
}

// Shared memory has its exact size, so that an overrun is one, and is full of NaN, so that what was not written shows.
inline char* poisoned(size_t bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 128, bytes ? bytes : 1)) abort();
  memset(p, 0xff, bytes);
  return (char*)p;
}

template <class T>
T& static_shared(const void* key) {
  Unwatched unwatched;
  for (auto& s : block.statics)
    if (s.key == key) return *(T*)s.memory;
  block.static_bytes += sizeof(T);
  if (block.static_bytes > MOST_STATIC) fail("more than 48 KiB of static shared memory");
  block.statics.push_back({key, poisoned(sizeof(T))});
  return *(T*)block.statics.back().memory;
}

inline std::string refused(dim3 grid, size_t shared) {
  if (block.n < 1 || block.n > 1024) return "a block has 1 to 1024 threads";
  if (shared > MOST_DYNAMIC) return "more than 227 KiB of dynamic shared memory";
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return "the grid is empty, or over 65535 in y or z";
  return "";
}

// `seed`: 0 runs threads and blocks in turn; others shuffle the threads, and odd ones run the last block first.
inline const char* run_grid(void (*invoke)(void*), void* context, dim3 grid, dim3 size, size_t shared, uint64_t seed) {
  Unwatched unwatched;
  block.invoke = invoke;
  block.context = context;
  block.grid = grid;
  block.size = size;
  block.n = int(size.x * size.y * size.z);
  block.error = refused(grid, shared);
  block.random = seed ? seed * 2654435761u + 1 : 0;
  if (block.error.empty()) block.fibers.resize(1024);
#if defined(__SANITIZE_THREAD__)
  block.host.tsan = __tsan_get_current_fiber();
#endif
  const uint64_t total = (uint64_t)grid.x * grid.y * grid.z;
  for (uint64_t i = 0; i < total && block.error.empty(); i++) {
    const uint64_t j = seed % 2 ? total - 1 - i : i;
    block.number = {unsigned(j % grid.x), unsigned(j / grid.x % grid.y), unsigned(j / ((uint64_t)grid.x * grid.y))};
    block.dynamic = poisoned(shared);
    run_block();
    free(block.dynamic);
    for (auto& s : block.statics) free(s.memory);
    block.statics.clear();
    block.static_bytes = 0;
  }
  acquire(&block.host);
  return block.error.empty() ? nullptr : block.error.c_str();
}

template <class... A>
struct Launch {
  void (*kernel)(A...);
  void** arguments;
  template <size_t... I>
  void call(std::index_sequence<I...>) {
    kernel(*(std::remove_const_t<std::remove_reference_t<A>>*)arguments[I]...);
  }
  static void invoke(void* self) { ((Launch*)self)->call(std::index_sequence_for<A...>{}); }
};

template <class... A>
const char* launch(void (*kernel)(A...), size_t n, dim3 grid, dim3 size, size_t shared, void** arguments, uint64_t seed) {
  if (n != sizeof...(A)) return "the kernel takes another number of arguments";
  static Launch<A...> all;
  all = {kernel, arguments};
  return run_grid(&Launch<A...>::invoke, &all, grid, size, shared, seed);
}

}  // namespace emulator

#define threadIdx (emulator::block.current->thread)
#define blockIdx (emulator::block.number)
#define blockDim (emulator::block.size)
#define gridDim (emulator::block.grid)
