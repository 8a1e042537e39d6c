"""A batch of logits into tokens and log probabilities on the device: what `relay.engine.sampler` defines, row by row.

    1. repetition penalty of all tokens seen, frequency and presence penalties of generated ones; grammar mask; bias (suppressed: -inf)
    2. temperature 0: the highest logit, the lowest id among equals
    3. else w = exp((logit - highest) / temperature); top_k, top_p of what it left, min_p; equals at an edge: lower ids stay
    4. the kept token, in order of id, whose running sum first exceeds uniform(seed, choice, position) * total

    logits          [n_rows, vocab_size]                               float32, not changed
    rows            [n_rows, ROW.itemsize]                             uint8, what `Rows` packs
    bias_ids        [n_biases]         biases [n_biases]               int32, float32: a row names its part of them
    tallies         [n_slots, vocab_size]                              int32, 2 * times generated + (1 if in the prompt); `tally_tokens`
    masks           [n_masks, ceil(vocab_size / 32)]                   int32, bit i % 32 of word i / 32: may be drawn
    ids             [n_rows]                                           int32, out; -1 where the highest logit is not finite
    logprobs        [n_rows]           top_ids, top [n_rows, MOST_TOP] float64, int32 and float64, out where asked for

Weights are summed as integers, in units of 2^-44 of the highest, so a row's token depends on no order of summation; a weight below 2^-45 is
never drawn (the definition's float64 sums would draw it once in 10^13). Ids agree with the definition's but where a float32 exponential
that differs in its last places decides. The random number is `relay.engine.keyed_random`'s, made on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relay.kernels.cuda_compiler import Program
from relay.kernels.cuda_library import CUDA, Device, Launch
from relay.kernels.tensor_check import expect
from relay.messages import Sampling

PROGRAMS: Final = (Program("sample_tokens"),)
MOST_TOP: Final = 32  # alternatives of one row
MOST_VOCAB: Final = 1 << 19  # so that a sum of weights fits into 64 bits
_SAMPLE: Final = Launch(PROGRAMS[0], "sample_tokens")
_TALLY: Final = Launch(PROGRAMS[0], "tally_tokens")
_THREADS: Final = 1024
_MASK: Final = (1 << 64) - 1

ROW: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("seed", "choice", "position")),
        *((name, np.float64) for name in ("top_p", "frequency_penalty", "presence_penalty")),
        *((name, np.float32) for name in ("temperature", "min_p", "repetition_penalty")),
        *((name, np.int32) for name in ("top_k", "target", "n_top", "tally", "mask", "bias_from", "bias_to")),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class DrawRow:
    """What to do with one row. position: of the drawn token, the key of its random number. tally, mask: rows of those tables, -1 none.

    suppress: ids that cannot be drawn. target >= 0: nothing is drawn, it is scored; top: how many alternatives with it.
    """

    sampling: Sampling
    position: int
    tally: int = -1
    mask: int = -1
    suppress: tuple[int, ...] = ()
    target: int = -1
    top: int = -1


@dataclass(frozen=True, slots=True)
class Rows:
    """As the kernel takes them, to be copied to the device as they are."""

    rows: NDArray[np.uint8]
    bias_ids: NDArray[np.int32]
    biases: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Where results go: made once for the largest batch."""

    ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top: Tensor
    work: Tensor


def drawn(n_rows: int, vocab_size: int, device: torch.device) -> Drawn:
    """For batches of up to `n_rows`."""
    return Drawn(
        ids=torch.empty(n_rows, dtype=torch.int32, device=device),
        logprobs=torch.empty(n_rows, dtype=torch.float64, device=device),
        top_ids=torch.empty(n_rows, MOST_TOP, dtype=torch.int32, device=device),
        top=torch.empty(n_rows, MOST_TOP, dtype=torch.float64, device=device),
        work=torch.empty(n_rows, vocab_size, dtype=torch.float32, device=device),
    )


def pack(draws: Sequence[DrawRow]) -> Rows:
    """Raises ValueError for more alternatives than MOST_TOP."""
    rows = np.zeros(len(draws), ROW)
    ids: list[int] = []
    biases: list[float] = []
    for row, draw in zip(rows, draws, strict=True):
        sampling, n_top = draw.sampling, max(draw.top, 0) if draw.target >= 0 else draw.sampling.logprobs
        if n_top > MOST_TOP:
            raise ValueError(f"{n_top} alternatives asked for; expected at most {MOST_TOP}")
        begin = len(ids)
        merged = _merged(draw)
        ids += merged
        biases += merged.values()
        row["seed"], row["choice"], row["position"] = sampling.seed & _MASK, sampling.choice & _MASK, draw.position & _MASK
        for name in ("top_p", "frequency_penalty", "presence_penalty", "temperature", "min_p", "repetition_penalty", "top_k"):
            row[name] = getattr(sampling, name)
        row["target"], row["n_top"], row["tally"], row["mask"] = draw.target, n_top, draw.tally, draw.mask
        row["bias_from"], row["bias_to"] = begin, len(ids)
    return Rows(rows.view(np.uint8).reshape(len(draws), ROW.itemsize), np.array(ids, np.int32), np.array(biases, np.float32))


def _merged(draw: DrawRow) -> dict[int, float]:
    """One bias for each id: the kernel adds them in no order."""
    merged: dict[int, float] = {}
    for token, bias in draw.sampling.logit_bias:
        merged[token] = merged.get(token, 0.0) + bias
    return merged | dict.fromkeys(draw.suppress, -math.inf)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    to: Drawn,
    *,
    tallies: Tensor | None = None,
    masks: Tensor | None = None,
    on: Device = CUDA,
) -> None:
    """Writes the first rows of `to`, and counts drawn tokens in `tallies`. Raises ValueError; what rows name is the caller's promise."""
    expect("logits", logits, (None, None), torch.float32, on)
    n_rows, vocab_size = logits.shape
    expect("rows", rows, (n_rows, ROW.itemsize), torch.uint8, on)
    expect("bias_ids", bias_ids, (None,), torch.int32, on)
    expect("biases", biases, bias_ids.shape, torch.float32, on)
    n_words = -(-vocab_size // 32)
    if tallies is not None:
        expect("tallies", tallies, (None, vocab_size), torch.int32, on)
    if masks is not None:
        expect("masks", masks, (None, n_words), torch.int32, on)
    n_most = len(to.ids)
    expect("to.ids", to.ids, (n_most,), torch.int32, on)
    expect("to.logprobs", to.logprobs, (n_most,), torch.float64, on)
    expect("to.top_ids", to.top_ids, (n_most, MOST_TOP), torch.int32, on)
    expect("to.top", to.top, (n_most, MOST_TOP), torch.float64, on)
    expect("to.work", to.work, (n_most, vocab_size), torch.float32, on)
    if not 1 <= vocab_size <= MOST_VOCAB or n_rows > n_most:
        raise ValueError(f"{n_rows} rows of {vocab_size} logits; expected at most {n_most} rows, and 1 to {MOST_VOCAB} logits")
    if n_rows:
        out = (to.work, to.ids, to.logprobs, to.top_ids, to.top, np.int32(vocab_size), np.int32(n_words))
        on.launch(_SAMPLE, (n_rows, 1, 1), _THREADS, (logits, rows, tallies, masks, bias_ids, biases, *out))


def tally_tokens(tokens: Tensor, begins: Tensor, n_prompt: Tensor, slots: Tensor, tallies: Tensor, *, on: Device = CUDA) -> None:
    """Count anew: sequence i has tokens[begins[i]] to tokens[begins[i + 1] - 1], n_prompt[i] of them its prompt, and goes to row slots[i].

    All int32; begins: [n + 1]. Raises ValueError for tensors that do not fit.
    """
    n = len(slots)
    expect("slots", slots, (n,), torch.int32, on)
    expect("tokens", tokens, (None,), torch.int32, on)
    expect("begins", begins, (n + 1,), torch.int32, on)
    expect("n_prompt", n_prompt, (n,), torch.int32, on)
    expect("tallies", tallies, (None, None), torch.int32, on)
    if n:
        on.launch(_TALLY, (n, 1, 1), _THREADS, (tokens, begins, n_prompt, slots, tallies, np.int32(tallies.shape[1])))


def reference(logits: Tensor, draw: DrawRow, *, tally: Tensor | None = None, mask: Tensor | None = None) -> tuple[int, Tensor]:
    """One row by sorting, in float64. logits: [vocab_size]; tally: its row; mask: bool [vocab_size], may be drawn.

    Returns the token (or the target), and float64 [vocab_size]: each id's log probability under the plain distribution.
    """
    logprobs = torch.log_softmax(logits.double(), -1)
    return (draw.target if draw.target >= 0 else _drawn(logits.clone(), draw, tally, mask)), logprobs


def _drawn(logits: Tensor, draw: DrawRow, tally: Tensor | None, mask: Tensor | None) -> int:
    sampling = draw.sampling
    if tally is not None:
        seen, generated = tally != 0, tally >> 1
        repeated = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(seen, repeated, logits)
        fines = (generated.double() * sampling.frequency_penalty + sampling.presence_penalty).float()
        logits = torch.where(generated > 0, logits - fines, logits)
    if mask is not None:
        logits = torch.where(mask, logits, -torch.inf)
    for token, bias in _merged(draw).items():
        logits[token] += bias
    if not -torch.inf < float(logits.max()) < torch.inf:
        return -1
    if sampling.temperature == 0:
        return int(logits.argmax())
    weights = ((logits - logits.max()) / max(sampling.temperature, 1e-30)).exp().double()
    order = torch.argsort(weights, descending=True, stable=True)
    if 0 < sampling.top_k < len(order):
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        running = weights[order].cumsum(0)
        order = order[: int(torch.searchsorted(running, sampling.top_p * running[-1])) + 1]
    order = order[weights[order] >= np.float32(sampling.min_p)].sort().values
    running = weights[order].cumsum(0)
    return int(order[int(torch.searchsorted(running, _uniform(sampling, draw.position) * running[-1], right=True))])


def _uniform(sampling: Sampling, position: int) -> float:
    z = 0
    for part in (sampling.seed, sampling.choice, position):
        z = ((z ^ (part & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) * 2.0**-53
