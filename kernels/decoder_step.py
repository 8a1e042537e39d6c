"""A whole step of a decoder that holds no GIL: prefill chunks and decode rows, mixed, from token ids to drawn tokens.

A layer is, for all rows at once, and in phases whose chunks `thread_pool` shares out:

    norm            h = x / sqrt(mean(x^2) + eps) * weight, rounded as `packed_matmul` reads it
    q, k, v         a head a unit: matrix, bias, norm of the head, rope; q is kept (times the attention scale), k and v go into the pool
    attention       `paged_attention`; blocks to push are copied and summed in the same phase (`block_push`)
    output          x += W o
    norm
    gate, up        32 outputs a unit: silu(g) * u, rounded as the next matrix reads it
    down            x += W (silu(g) * u)

then, for up to 32 logit rows at a time, the final norm, the head, and `token_sampling`. With one or two rows each thread norms for itself.
Rope: (a, b) at position p -> (a cos t - b sin t, b cos t + a sin t), b half a head behind a, t = p * frequency in float64, cos and sin
rounded to float32, then times the magnitude.

Threads share outputs, rows and heads, never a sum: a row's logits have the same bits alone, in any batch, in any chunk, on any number of
threads. Every index is checked before anything is written: `Decoder.begin` raises ValueError.

`begin` lets the pool's other threads start, `finish` joins them: what the caller does in between costs the step no more than its own share
of the work, which the others take over.
"""

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library
from relay.kernels.packed_matmul import Matrix
from relay.kernels.paged_attention import KVPool
from relay.kernels.thread_pool import CThreadCounters, ThreadCounters
from relay.kernels.token_sampling import Draw, Drawn

MAX_THREADS: Final = 256


class Layer(ctypes.Structure):
    """As in decoder_step.h. Addresses of float32; None where a model has no such thing. Norms of `hidden` are padded to 32 with zeros."""

    _fields_ = (
        ("q", Matrix),
        ("k", Matrix),
        ("v", Matrix),
        ("attn_out", Matrix),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("attn_norm", ctypes.c_void_p),
        ("ffn_norm", ctypes.c_void_p),
        ("q_bias", ctypes.c_void_p),
        ("k_bias", ctypes.c_void_p),
        ("v_bias", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("window", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Model(ctypes.Structure):
    """As in decoder_step.h."""

    _fields_ = (
        ("n_layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("n_heads", ctypes.c_int32),
        ("n_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("ffn", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("max_context", ctypes.c_int32),
        ("rms_eps", ctypes.c_float),
        ("rope_scale", ctypes.c_float),
        ("attn_scale", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("inverse_frequencies", ctypes.c_void_p),
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", ctypes.c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("kv", KVPool),
    )


class Push(ctypes.Structure):
    """As in decoder_step.h."""

    _fields_ = (
        ("target", ctypes.c_void_p),
        ("target_blocks_total", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("blocks", ctypes.c_void_p),
        ("target_blocks", ctypes.c_void_p),
        ("checksums", ctypes.c_void_p),
    )


class Step(ctypes.Structure):
    """As in decoder_step.h."""

    _fields_ = (
        ("n_rows", ctypes.c_int32),
        ("n_sequences", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("n_logit_rows", ctypes.c_int32),
        ("n_pushes", ctypes.c_int32),
        ("abandoned", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequence", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("draws", ctypes.POINTER(Draw)),
        ("drawn", ctypes.POINTER(Drawn)),
        ("pushes", ctypes.POINTER(Push)),
        ("logits", ctypes.c_void_p),
        ("push_ns", ctypes.c_int64),
    )


class _Refusal(ctypes.Structure):
    _fields_ = (("fault", ctypes.c_int32), ("index", ctypes.c_int32), ("value", ctypes.c_int64))


_MIRRORED: Final = (Matrix, KVPool, Layer, Model, Push, Draw, Drawn, Step, _Refusal, CThreadCounters)
_FAULTS: Final = (
    "",
    "tokens[{index}] is {value}, which is not in the vocabulary",
    "positions[{index}] is {value}, which is not in the context or not in the block table",
    "sequence[{index}] is {value}, which is not in the block table",
    "positions[{index}] is {value}: rows of a sequence are consecutive and ascend",
    "the block table of sequence {index} has {value} where a row needs a block of the pool",
    "logit_rows[{index}] is {value}, which is not a row",
    "pushes[{index}] names block {value}, which is not in the pool",
    "pushes[{index}] names block {value} of the target, which is not in its pool",
    "draws[{index}] names token {value}, which is not in the vocabulary",
    "there is no memory for a step of so many rows",
)


class Decoder:
    """Owns its threads and scratch; the model's weights and pool are its maker's to keep. Steps are made by one thread at a time."""

    def __init__(self, model: Model, *, n_threads: int, spin_ns: int, coefficients: NDArray[np.uint64]) -> None:
        """spin_ns: how long a thread waits awake. coefficients: of the checksum, of K's words and then V's; kept."""
        if not 1 <= n_threads <= MAX_THREADS:
            raise ValueError(f"{n_threads} threads; expected 1 to {MAX_THREADS}")
        self._library = library()
        _check_structs(self._library)
        self._kept: tuple[Any, ...] = (model, coefficients)
        self.n_threads = n_threads
        create = self._library.relay_decoder_create
        create.restype = ctypes.c_void_p
        create.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p)
        self._begin, self._finish = self._library.relay_decoder_begin, self._library.relay_decoder_finish
        self._begin.restype = self._finish.restype = None
        self._begin.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._finish.argtypes = (ctypes.c_void_p,)
        self._refusal = _Refusal()
        self._handle = create(ctypes.byref(model), n_threads, spin_ns, coefficients.ctypes.data)
        if not self._handle:
            raise MemoryError("there is no memory for a decoder")

    def begin(self, step: Step) -> None:
        """`finish` must follow; until then `step`, and all that it leads to, is the threads'.

        Raises ValueError, before anything is written, if an index leads nowhere: then nothing has begun.
        """
        self._begin(self._handle, ctypes.byref(step), ctypes.byref(self._refusal))
        if self._refusal.fault:
            raise ValueError(_FAULTS[self._refusal.fault].format(index=self._refusal.index, value=self._refusal.value))

    def finish(self) -> None:
        """Take part in the step that has begun; return when it is computed, or, with `abandoned` set, what is begun of it."""
        self._finish(self._handle)

    def counters(self) -> tuple[ThreadCounters, ...]:
        """One for each thread; the caller's own is the first."""
        found, out = [], CThreadCounters()
        for thread in range(self.n_threads):
            self._library.relay_decoder_counters(ctypes.c_void_p(self._handle), thread, ctypes.byref(out))
            found.append(ThreadCounters(out.chunks, out.stolen, out.sleeps))
        return tuple(found)

    def close(self) -> None:
        """End its threads. Not to be called during a step."""
        if self._handle:
            self._library.relay_decoder_destroy(ctypes.c_void_p(self._handle))
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _check_structs(loaded: ctypes.CDLL) -> None:
    sizes = (ctypes.c_int32 * len(_MIRRORED))()
    loaded.relay_struct_bytes(sizes)
    assert list(sizes) == [ctypes.sizeof(struct) for struct in _MIRRORED], "a struct differs between decoder_step.h and Python"
