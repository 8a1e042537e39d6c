// A fiber for each CUDA thread, switched by hand on one thread of the system, and known to the sanitizers.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#if !defined(__x86_64__)
#error "the emulator switches stacks in x86-64 assembly"
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
void __tsan_java_init(unsigned long, unsigned long);
void __tsan_java_alloc(unsigned long, unsigned long);
}
#endif

extern "C" void emulator_switch(void** save, void* to);
asm(".text\n.local emulator_switch\n.type emulator_switch,@function\nemulator_switch:\n"
    " pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    " movq %rsp,(%rdi)\n movq %rsi,%rsp\n"
    " popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n.size emulator_switch,.-emulator_switch\n");

namespace emulator {

struct WarpRequest;
struct AsyncCopy {
  void* dst;
  const void* src;
  bool there;
};
enum class State : uint8_t { running, at_barrier, in_warp, ended };
struct Index {
  unsigned x, y, z;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Index thread{};
  int number = 0, line = 0;
  State state = State::ended;
  WarpRequest* request = nullptr;
  std::vector<std::vector<AsyncCopy>> groups;  // committed, oldest first
  std::vector<AsyncCopy> open;
  void* asan_frames = nullptr;
  void* tsan = nullptr;
};

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t GUARD = 4096;

// The emulator's own bookkeeping is not part of the kernel: races in it are none. Begins and ends on one fiber.
struct Unwatched {
#if defined(__SANITIZE_THREAD__)
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, 0);
    AnnotateIgnoreWritesBegin(__FILE__, 0);
  }
  ~Unwatched() {
    AnnotateIgnoreReadsEnd(__FILE__, 0);
    AnnotateIgnoreWritesEnd(__FILE__, 0);
  }
#else
  Unwatched() {}
#endif
};

// What came before a release on one fiber comes before what follows the acquire on another. Barriers do both; nothing else orders.
inline void release([[maybe_unused]] void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(tag);
#endif
}
inline void acquire([[maybe_unused]] void* tag) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(tag);
#endif
}

inline void prepare(Fiber& fiber, void (*entry)()) {
  if (!fiber.stack) {
    char* p = (char*)mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    mprotect(p, GUARD, PROT_NONE);
    fiber.stack = p + GUARD;
  }
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, STACK);  // frames that the previous block left
#endif
  fiber.request = nullptr;
  fiber.open.clear();
  fiber.groups.clear();
  fiber.asan_frames = nullptr;
  void** top = (void**)(fiber.stack + STACK);
  *--top = nullptr;
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;  // the registers that a switch restores
  fiber.stack_pointer = top;
#if defined(__SANITIZE_THREAD__)
  fiber.tsan = __tsan_create_fiber(0);  // a new one in each block: races between blocks show as well
#endif
}

inline void dispose([[maybe_unused]] Fiber& fiber) {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(fiber.tsan);
  munmap(fiber.stack - GUARD, STACK + GUARD);
  fiber.stack = nullptr;
#endif
}

}  // namespace emulator
