"""The reference sampler: one row of logits and its `Draw` in, one token id and its log probabilities out.

Rows are drawn one by one in numpy, on one thread, so that no row's token depends on the batch or on the number of threads. In order:

1. penalties: repetition (divide positive, multiply negative logits of every token seen), frequency and presence (generated tokens only)
2. logit_bias is added; `suppress` ids get -inf
3. temperature 0: the highest logit, the lowest id among equals
4. else weights w = exp((logit - highest) / temperature), in float32; then top_k, top_p (of what top_k left), min_p (of the highest)
5. the kept token, in order of id, whose cumulative weight (float64) first exceeds uniform * total

Equal logits at the edge of top_k or top_p: lower ids stay. Log probabilities are of the plain distribution, log_softmax of the raw logits:
exponentials in float32, their sum and the result in float64.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.engine.runner import Draw
from relay.messages import Logprobs, Sampling

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_FIRST_CANDIDATES: Final = 64
_GROWTH: Final = 16
_COLDEST: Final = 1e-30  # still a float32 above 0


def choose(logits: Floats, draw: Draw) -> tuple[int, Logprobs | None]:
    """logits: float32 [vocab_size], not changed. Draw a token, or score `draw.target`; -1 if the highest is no finite number."""
    if draw.target >= 0:
        return draw.target, _logprobs(logits, draw.target, draw.top)
    adjusted = _adjusted(logits, draw)
    if not -np.inf < adjusted.max() < np.inf:
        return -1, None
    token = _drawn(adjusted, draw)
    n_top = draw.sampling.logprobs
    return token, _logprobs(logits, token, n_top) if n_top >= 0 else None


def _logprobs(logits: Floats, token: int, n_top: int) -> Logprobs:
    highest = logits.max()
    log_total = np.log(np.exp(logits - highest).sum(dtype=np.float64))
    top = _highest(logits, n_top) if n_top > 0 else np.empty(0, np.intp)
    chosen, *others = (float(x) for x in logits[[token, *top]].astype(np.float64) - float(highest) - log_total)
    return Logprobs(chosen, tuple(top.tolist()), tuple(others))


def _adjusted(logits: Floats, draw: Draw) -> Floats:
    """Steps 1 and 2; the logits themselves if they ask for nothing."""
    sampling = draw.sampling
    if not sampling.penalizes and not sampling.logit_bias and not draw.suppress:
        return logits
    logits = logits.copy()
    if sampling.penalizes:
        _penalize(logits, draw)
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        np.add.at(logits, np.array(ids), np.array(biases, np.float32))
    logits[list(draw.suppress)] = -np.inf
    return logits


def _penalize(logits: Floats, draw: Draw) -> None:
    sampling = draw.sampling
    seen = np.unique(np.array(draw.tokens, np.intp))
    values = logits[seen]
    repetition = np.float32(sampling.repetition_penalty)
    logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    generated, counts = np.unique(np.array(draw.tokens[draw.n_prompt :], np.intp), return_counts=True)
    logits[generated] -= (counts * sampling.frequency_penalty + sampling.presence_penalty).astype(np.float32)


def _drawn(logits: Floats, draw: Draw) -> int:
    """Steps 3 to 5."""
    sampling = draw.sampling
    if sampling.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", under="ignore", divide="ignore"):
        weights = np.exp((logits - logits.max()) / np.float32(max(sampling.temperature, _COLDEST)))
    kept = _kept(weights, sampling)
    cumulative = (weights if kept is None else weights[kept]).cumsum(dtype=np.float64)
    # uniform is at most 1 - 2^-53, so the product stays below the total after rounding, and a token that exceeds it is there
    at = int(np.searchsorted(cumulative, draw.uniform * cumulative[-1], side="right"))
    return at if kept is None else int(kept[at])


def _kept(weights: Floats, sampling: Sampling) -> Ids | None:
    """Ids that may be drawn, ascending; None is all of them. The highest weight is 1."""
    kept = None
    if 0 < sampling.top_k < len(weights):
        kept = _highest(weights, sampling.top_k)
    if sampling.top_p < 1:
        kept = _nucleus(weights, sampling.top_p, kept)
    if sampling.min_p > 0:
        likely = np.flatnonzero(weights >= np.float32(sampling.min_p))
        kept = likely if kept is None else np.intersect1d(kept, likely)
    return None if kept is None else np.sort(kept)


def _nucleus(weights: Floats, top_p: float, kept: Ids | None) -> Ids:
    """The shortest head of `kept` (descending; None is all) with at least top_p of its weight; looked for among few candidates first."""
    if kept is not None:
        return _head(weights, top_p * weights[kept].sum(dtype=np.float64), kept)
    goal, n = top_p * weights.sum(dtype=np.float64), _FIRST_CANDIDATES
    while n < len(weights):
        head = _head(weights, goal, _highest(weights, n))
        if len(head) < n:
            return head
        n *= _GROWTH
    return _head(weights, goal, _highest(weights, len(weights)))


def _head(weights: Floats, goal: float, ids: Ids) -> Ids:
    """ids up to and including the one that brings the sum to the goal; all of them if none does."""
    return ids[: int(np.searchsorted(weights[ids].cumsum(dtype=np.float64), goal)) + 1]


def _highest(values: Floats, n: int) -> Ids:
    """Ids of the n highest values, descending; among equals the lower id comes first."""
    edge = np.partition(values, len(values) - n)[len(values) - n] if n < len(values) else -np.inf
    ids = np.flatnonzero(values >= edge)
    return np.asarray(ids[np.argsort(-values[ids], kind="stable")][:n])
