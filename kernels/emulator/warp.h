// Warp operations: the lanes of a mask meet, the last one to come does the work for all. Masks and lines of code must agree.
#pragma once
#include <type_traits>

#include "block.h"

namespace emulator {

enum class Op { shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, all, any, sync, add, greatest, least, fragment };

struct WarpRequest {
  Op op;
  uint32_t mask;
  int line;
  uint64_t value = 0;
  int argument = 0;
  void* fragment = nullptr;
  void (*work)(WarpRequest**) = nullptr;
  uint64_t result = 0;
  bool outside = false;
};

inline void work(WarpRequest** lanes, uint32_t mask) {
  const WarpRequest& first = *lanes[__builtin_ctz(mask)];
  if (first.op == Op::fragment) return first.work(lanes);
  uint64_t sum = 0, greatest = 0, least = ~0ull;
  uint32_t votes = 0;
  for (int i = 0; i < 32; i++)
    if (lanes[i]) {
      const uint64_t v = lanes[i]->value;
      votes |= uint32_t(v != 0) << i;
      sum += v;
      greatest = v > greatest ? v : greatest;
      least = v < least ? v : least;
    }
  for (int i = 0; i < 32; i++) {
    if (!lanes[i]) continue;
    WarpRequest& q = *lanes[i];
    int source = i;
    switch (q.op) {
      case Op::shuffle: source = q.argument & 31; break;
      case Op::shuffle_up: source = i < q.argument ? i : i - q.argument; break;
      case Op::shuffle_down: source = i + q.argument > 31 ? i : i + q.argument; break;
      case Op::shuffle_xor: source = i ^ q.argument; break;
      case Op::ballot: q.result = votes; continue;
      case Op::any: q.result = votes != 0; continue;
      case Op::all: q.result = votes == mask; continue;
      case Op::add: q.result = sum; continue;
      case Op::greatest: q.result = greatest; continue;
      case Op::least: q.result = least; continue;
      default: continue;
    }
    q.outside = !lanes[source];
    if (!q.outside) q.result = lanes[source]->value;
  }
}

inline uint64_t meet(WarpRequest& q) {
  Unwatched unwatched;
  Fiber* me = block.current;
  const int lane = me->number & 31, warp = me->number >> 5, first = me->number & ~31, present = block.n - first < 32 ? block.n - first : 32;
  const std::string at = " (line " + std::to_string(q.line) + ")";
  if (present < 32) q.mask &= (1u << present) - 1;
  if (!((q.mask >> lane) & 1)) fail("a lane is not in its own mask" + at);
  me->request = &q;
  me->line = q.line;
  me->state = State::in_warp;
  block.arrived[warp] |= 1u << lane;
  if (block.ended[warp] & q.mask) fail("a warp operation names a lane that has ended" + at);
  bool all = (block.arrived[warp] & q.mask) == q.mask;
  WarpRequest* lanes[32] = {};
  for (int i = 0; all && i < present; i++)
    if ((q.mask >> i) & 1) {
      lanes[i] = block.fibers[first + i].request;
      all = lanes[i]->mask == q.mask;
    }
  if (all) {
    for (auto* other : lanes)
      if (other && (other->op != q.op || other->line != q.line))
        fail("lanes meet in different operations, lines " + std::to_string(q.line) + " and " + std::to_string(other->line));
    work(lanes, q.mask);
    block.arrived[warp] &= ~q.mask;
    for (int i = 0; i < 32; i++)
      if (lanes[i]) block.fibers[first + i].state = State::running;
  } else {
    wait();
  }
  me->request = nullptr;
  if (q.outside) fail("a shuffle reads a lane outside its mask" + at);
  return q.result;
}

inline void leave_warp(Fiber& me) {
  const int warp = me.number >> 5, lane = me.number & 31;
  block.ended[warp] |= 1u << lane;
  for (uint32_t left = block.arrived[warp]; left; left &= left - 1) {
    const WarpRequest* r = block.fibers[(warp << 5) + __builtin_ctz(left)].request;
    if ((r->mask >> lane) & 1) fail("a thread ends while the warp operation of line " + std::to_string(r->line) + " waits for it");
  }
}

template <class To, class From>
To bits_of(From from) {
  static_assert(sizeof(To) >= sizeof(From) || sizeof(To) == sizeof(From));
  To to{};
  memcpy(&to, &from, sizeof from);
  return to;
}
template <class T>
T from_bits(uint64_t bits) {
  T t;
  memcpy(&t, &bits, sizeof t);
  return t;
}
template <class T>
T shuffle(Op op, unsigned mask, T value, int argument, int line) {
  WarpRequest q{op, mask, line, bits_of<uint64_t>(value), argument};
  return from_bits<T>(meet(q));
}
inline uint64_t vote(Op op, unsigned mask, uint64_t value, int line) {
  WarpRequest q{op, mask, line, value};
  return meet(q);
}
// The whole warp; each lane's `fragment` is what `work` reads and writes.
inline void with_fragments(void* fragment, void (*work)(WarpRequest**), int line) {
  WarpRequest q{Op::fragment, ~0u, line, 0, 0, fragment, work};
  meet(q);
}

}  // namespace emulator

#define EMULATED_LINE int line = __builtin_LINE()
inline void __syncthreads(EMULATED_LINE) {
  emulator::barrier(false, line);
}
inline int __syncthreads_count(int p, EMULATED_LINE) {
  return emulator::barrier(p, line);
}
inline int __syncthreads_or(int p, EMULATED_LINE) {
  return emulator::barrier(p, line) > 0;
}
inline void __syncwarp(unsigned mask = ~0u, EMULATED_LINE) {
  void* tag = &emulator::block.warp_tags[emulator::block.current->number / 32];
  emulator::release(tag);
  emulator::vote(emulator::Op::sync, mask, 0, line);
  emulator::acquire(tag);
}
template <class T>
T __shfl_sync(unsigned m, T v, int lane, EMULATED_LINE) {
  return emulator::shuffle(emulator::Op::shuffle, m, v, lane, line);
}
template <class T>
T __shfl_up_sync(unsigned m, T v, int by, EMULATED_LINE) {
  return emulator::shuffle(emulator::Op::shuffle_up, m, v, by, line);
}
template <class T>
T __shfl_down_sync(unsigned m, T v, int by, EMULATED_LINE) {
  return emulator::shuffle(emulator::Op::shuffle_down, m, v, by, line);
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int by, EMULATED_LINE) {
  return emulator::shuffle(emulator::Op::shuffle_xor, m, v, by, line);
}
inline unsigned __ballot_sync(unsigned m, int p, EMULATED_LINE) {
  return (unsigned)emulator::vote(emulator::Op::ballot, m, p != 0, line);
}
inline int __all_sync(unsigned m, int p, EMULATED_LINE) {
  return (int)emulator::vote(emulator::Op::all, m, p != 0, line);
}
inline int __any_sync(unsigned m, int p, EMULATED_LINE) {
  return (int)emulator::vote(emulator::Op::any, m, p != 0, line);
}
inline unsigned __reduce_add_sync(unsigned m, unsigned v, EMULATED_LINE) {
  return (unsigned)emulator::vote(emulator::Op::add, m, v, line);
}
inline unsigned __reduce_max_sync(unsigned m, unsigned v, EMULATED_LINE) {
  return (unsigned)emulator::vote(emulator::Op::greatest, m, v, line);
}
inline unsigned __reduce_min_sync(unsigned m, unsigned v, EMULATED_LINE) {
  return (unsigned)emulator::vote(emulator::Op::least, m, v, line);
}
