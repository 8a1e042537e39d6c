"""Threads that share the chunks of a sequence of phases, and wait for nobody who holds none: documentation, and what each has done.

A step is some 150 phases; the chunks of one may run in any order and on any thread, and the next begins when all have returned. A barrier
of all threads would make each phase as slow as the thread that the kernel took off its core. Here a thread that holds no chunk is not
needed: each phase is cut into one share of consecutive chunks a thread, whoever runs out of its own takes from others, and whoever returns
from the last chunk opens the next phase. A share is one word that names its phase, so what a late thread claims is gone (thread_pool.cpp).

A thread without work looks for it for `spin_ns`, then sleeps on a futex: an idle pool uses no core. If a wait inside a job took over a
millisecond, others have the cores too, and the next 256 waits give way after 4 microseconds. Threads take no signals.

They are made by the first job, with the niceness of the thread that gives it: in a worker the main thread, which warms up, so 0, while the
compute thread has 5 (`relay.runtime.compute`). With 5 for all, on two shared cores, the loop's wake-ups had a p90 of 0.5 ms in place of
1.3, no better median, and steps took 5 % longer. Each token waits for a step; for the loop an answer waits at its first and its last one.

Since others do a missing thread's work, a dead one would not show but in time: `ThreadCounters` says what each has done.
"""

import ctypes
from typing import NamedTuple


class CThreadCounters(ctypes.Structure):
    """As in thread_pool.h."""

    _fields_ = (("chunks", ctypes.c_int64), ("stolen", ctypes.c_int64), ("sleeps", ctypes.c_int64))


class ThreadCounters(NamedTuple):
    """Of one thread since its pool was made: chunks taken, of these from another's share, and times it went to sleep."""

    chunks: int
    stolen: int
    sleeps: int
