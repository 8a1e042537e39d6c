"""What a step draws, as the kernel reads it (`relay.kernels.token_sampling`), and what it drew, as the engine does."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.engine.native.token_arrays import TokenArrays
from relay.engine.runner import Draw
from relay.kernels.token_sampling import Draw as CDraw
from relay.kernels.token_sampling import Drawn
from relay.messages import Logprobs

_DRAW: Final = struct.Struct("<dddd fff iii QqqQQQ ii")  # a tenth of the time that setting a ctypes structure's fields takes
_SEEN: Final = struct.Struct("<Qq")  # the part of it that changes while a step is prepared
_SEEN_AT: Final = struct.calcsize("<dddd fff iii")
_DRAWN: Final = np.dtype([("id", np.int32), ("unused", np.int32), ("logprob", np.float64), ("top_ids", np.uint64), ("top", np.uint64)])
assert _DRAW.size == ctypes.sizeof(CDraw)
assert _DRAWN.itemsize == ctypes.sizeof(Drawn)


class Draws:
    """Of one step. Keeps everything its addresses lead to. To be made at any time; `see` at the last moment."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        n = len(draws)
        self._penalized: list[tuple[int, list[int]]] = []
        self._n_top = [max(draw.top, 0) if draw.target >= 0 else draw.sampling.logprobs for draw in draws]
        self._draws = ctypes.create_string_buffer(max(n, 1) * _DRAW.size)
        self._drawn = np.zeros(n, _DRAWN)
        self._kept: list[NDArray[np.generic]] = []
        width = max(self._n_top, default=0)
        if width > 0:
            self._top_ids, self._tops = np.zeros((n, width), np.int32), np.zeros((n, width), np.float64)
            self._drawn["top_ids"] = self._top_ids.ctypes.data + np.arange(n, dtype=np.uint64) * np.uint64(4 * width)
            self._drawn["top"] = self._tops.ctypes.data + np.arange(n, dtype=np.uint64) * np.uint64(8 * width)
        for i, draw in enumerate(draws):
            sampling = draw.sampling
            if draw.target < 0 and sampling.penalizes:
                self._penalized.append((i, draw.tokens))
            bias_ids = biases = suppress = 0
            if sampling.logit_bias:
                ids, values = zip(*sampling.logit_bias, strict=True)
                bias_ids, biases = self._keep(np.array(ids, np.int32)), self._keep(np.array(values, np.float32))
            if draw.suppress:
                suppress = self._keep(np.array(draw.suppress, np.int32))
            _DRAW.pack_into(
                self._draws,
                i * _DRAW.size,
                draw.uniform,
                sampling.top_p,
                sampling.frequency_penalty,
                sampling.presence_penalty,
                sampling.temperature,
                sampling.min_p,
                sampling.repetition_penalty,
                sampling.top_k,
                draw.target,
                self._n_top[i],
                0,
                0,
                draw.n_prompt,
                bias_ids,
                biases,
                suppress,
                len(sampling.logit_bias),
                len(draw.suppress),
            )
        self.draws_pointer = ctypes.cast(self._draws, ctypes.POINTER(CDraw))
        self.drawn_pointer = ctypes.cast(self._drawn.ctypes.data, ctypes.POINTER(Drawn))

    def see(self, token_arrays: TokenArrays) -> None:
        """Penalties count the tokens that sequences have now."""
        self._token_arrays = token_arrays
        for i, tokens in self._penalized:
            _SEEN.pack_into(self._draws, i * _DRAW.size + _SEEN_AT, token_arrays.address(tokens), len(tokens))

    def ids(self) -> list[int]:
        found: list[int] = self._drawn["id"].tolist()
        return found

    def logprobs(self) -> list[Logprobs | None]:
        return [None if n_top < 0 else self._logprobs(i, n_top) for i, n_top in enumerate(self._n_top)]

    def _logprobs(self, i: int, n_top: int) -> Logprobs:
        chosen = float(self._drawn["logprob"][i])
        if n_top == 0:
            return Logprobs(chosen)
        return Logprobs(chosen, tuple(self._top_ids[i, :n_top].tolist()), tuple(self._tops[i, :n_top].tolist()))

    def _keep(self, array: NDArray[np.generic]) -> int:
        self._kept.append(array)
        return array.ctypes.data
