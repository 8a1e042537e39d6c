"""A row of logits and what to do with it become a token, by selection: nothing longer than a few hundred numbers is sorted.

The definition is `relay.engine.sampler`'s, in its order: penalties, bias, suppression; temperature 0 is the highest logit, the lowest id
among equals; else weights exp((logit - highest) / temperature) in float32, top_k, top_p of what top_k left, min_p of the highest; then the
kept token, in order of id, whose running sum (float64) first exceeds uniform times the total. Ids are the same as the reference's but where
a float32 exponential that differs in its last places decides: about one draw in ten million. Log probabilities are of the plain
distribution and within 1e-6 of the reference's.
"""

import ctypes

import numpy as np
from numpy.typing import NDArray

from relay.kernels.cpp_library import library


class Draw(ctypes.Structure):
    """As in token_sampling.h."""

    _fields_ = (
        ("uniform", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("frequency_penalty", ctypes.c_double),
        ("presence_penalty", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("target", ctypes.c_int32),
        ("n_top", ctypes.c_int32),
        ("tokens", ctypes.c_void_p),
        ("n_tokens", ctypes.c_int64),
        ("n_prompt", ctypes.c_int64),
        ("bias_ids", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("suppress", ctypes.c_void_p),
        ("n_biases", ctypes.c_int32),
        ("n_suppress", ctypes.c_int32),
    )


class Drawn(ctypes.Structure):
    """As in token_sampling.h."""

    _fields_ = (
        ("id", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("logprob", ctypes.c_double),
        ("top_ids", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
    )


def draw_rows(logits: NDArray[np.float32], draws: "ctypes._Pointer[Draw]", drawn: "ctypes._Pointer[Drawn]") -> None:
    """logits: float32 [rows, vocab_size], not changed; draws and drawn have as many entries. Token ids are not checked here."""
    n_rows, vocab_size = logits.shape
    rows = np.ascontiguousarray(logits, np.float32)
    library().relay_draw_rows(ctypes.c_void_p(rows.ctypes.data), n_rows, vocab_size, draws, drawn)
