"""Draws of a step on the device: `relay.kernels.sample_tokens` with its inputs packed, uploaded and its results read."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from relay.engine.runner import Draw
from relay.kernels.device_runtime import Runtime
from relay.kernels.sample_tokens import ROW, DrawRow, drawn, pack, sample_tokens, tally_tokens
from relay.messages import Logprobs

_BIASES_AT_FIRST: Final = 1024


class DeviceSampler:
    """For up to `max_rows` rows at a time."""

    def __init__(self, max_rows: int, vocab_size: int, runtime: Runtime) -> None:
        self.max_rows = max_rows
        self._runtime, self._place = runtime, runtime.place
        self._drawn = drawn(max_rows, vocab_size, runtime.place)
        self._tallies = torch.zeros(max_rows, vocab_size, dtype=torch.int32, device=runtime.place)
        self._rows = torch.zeros(max_rows, ROW.itemsize, dtype=torch.uint8, device=runtime.place)
        self._host_rows = runtime.staging(max_rows * ROW.itemsize).view(max_rows, ROW.itemsize)
        self._make_biases(_BIASES_AT_FIRST)

    def launch(self, logits: Tensor, draws: Sequence[Draw]) -> Callable[[], tuple[list[int], list[Logprobs | None]]]:
        """logits: float32 [len(draws), vocab_size]. What it returns waits for the device, and reads ids and log probabilities; it must be
        called before the next launch."""
        n = len(draws)
        tallied = [i for i, draw in enumerate(draws) if draw.target < 0 and draw.sampling.penalizes]
        slots = {row: slot for slot, row in enumerate(tallied)}
        if tallied:
            self._tally([draws[i] for i in tallied])
        packed = pack(
            [
                DrawRow(draw.sampling, len(draw.tokens), slots.get(i, -1), -1, draw.suppress, draw.target, draw.top)
                for i, draw in enumerate(draws)
            ]
        )
        self._host_rows[:n].copy_(torch.from_numpy(packed.rows))
        self._rows[:n].copy_(self._host_rows[:n], non_blocking=True)
        n_biases = len(packed.bias_ids)
        if n_biases > len(self._bias_ids):
            self._make_biases(2 * n_biases)
        if n_biases:
            self._bias_ids[:n_biases].copy_(torch.from_numpy(packed.bias_ids))
            self._biases[:n_biases].copy_(torch.from_numpy(packed.biases))
        sample_tokens(
            logits,
            self._rows[:n],
            self._bias_ids,
            self._biases,
            self._drawn,
            tallies=self._tallies if tallied else None,
            on=self._runtime.on,
        )
        n_top = [max(draw.top, 0) if draw.target >= 0 else draw.sampling.logprobs for draw in draws]

        def read() -> tuple[list[int], list[Logprobs | None]]:
            self._runtime.finish()
            ids: list[int] = self._drawn.ids[:n].tolist()
            return ids, self._logprobs(n_top) if max(n_top) >= 0 else [None] * n

        return read

    def _logprobs(self, n_top: list[int]) -> list[Logprobs | None]:
        n, width = len(n_top), max(n_top)
        chosen: list[float] = self._drawn.logprobs[:n].tolist()
        top_ids: list[list[int]] = self._drawn.top_ids[:n, :width].tolist()
        tops: list[list[float]] = self._drawn.top[:n, :width].tolist()
        return [
            None if k < 0 else Logprobs(chosen[i], tuple(top_ids[i][:k]), tuple(tops[i][:k])) if k else Logprobs(chosen[i])
            for i, k in enumerate(n_top)
        ]

    def _tally(self, draws: list[Draw]) -> None:
        """Counted anew at each step: what a sequence has is what its list says, however it came here."""
        begins = np.cumsum([0, *(len(draw.tokens) for draw in draws)])

        def there(numbers: Sequence[int] | np.ndarray) -> Tensor:
            return torch.tensor(np.asarray(numbers, np.int32), device=self._place)

        tokens = there(np.concatenate([np.asarray(draw.tokens, np.int32) for draw in draws]))
        n_prompt, slots = there([draw.n_prompt for draw in draws]), there(range(len(draws)))
        tally_tokens(tokens, there(begins), n_prompt, slots, self._tallies, on=self._runtime.on)

    def _make_biases(self, n: int) -> None:
        self._bias_ids = torch.zeros(n, dtype=torch.int32, device=self._place)
        self._biases = torch.zeros(n, dtype=torch.float32, device=self._place)
