"""Section `sampling`: a batch of draws on the device against the reference, and its time over a large vocabulary. Needs msgspec."""

from functools import partial

import torch
from torch import Tensor

from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage
from relay.kernels.sample_tokens import PROGRAMS, DrawRow, drawn, pack, reference, sample_tokens
from relay.messages import Sampling

GREEDY_US, NUCLEUS_US = 30.0, 60.0  # targets for 64 rows of 128k
_KINDS = {
    "greedy": Sampling(temperature=0.0, logprobs=-1),
    "top-k and top-p": Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=3),
    "min-p": Sampling(temperature=1.0, min_p=0.02, seed=4),
    "temperature": Sampling(temperature=1.0, seed=5),
}


def run(found: Found, rehearse: bool) -> None:
    stage = Stage(PROGRAMS, rehearse=rehearse)
    copy = stage.copy_rate()
    with stage.runtime.computing():  # inputs are made on the stream that uses them
        _draws(stage, found, copy)


def _draws(stage: Stage, found: Found, copy: float) -> None:
    n, vocab_size = stage.size(64, 3), stage.size(128256, 500)
    logits = stage.normal(n, vocab_size, dtype=torch.float32, scale=3.0)
    there, none = logits.cpu(), torch.zeros(4, dtype=torch.int32, device=stage.place)
    to, nothing = drawn(n, vocab_size, stage.place), torch.zeros(4, device=stage.place)
    least = 1e6 * 4 * n * vocab_size / copy
    for name, sampling in _KINDS.items():
        draws = [DrawRow(sampling, 100 + i) for i in range(n)]
        rows = torch.from_numpy(pack(draws).rows).to(stage.place)
        sample_tokens(logits, rows, none, nothing, to, on=stage.on)
        stage.runtime.finish()
        ids: list[int] = to.ids[:n].tolist()
        checked = range(min(n, 8))
        right = [reference(there[i], draws[i])[0] == ids[i] for i in checked]
        found.holds(f"{name}: the reference's ids", sum(right) >= len(right) - (sampling.temperature > 0), f"{sum(right)} of {len(right)}")
        found.holds(f"{name}: a row alone", _alone(stage, logits, rows, none, nothing) == ids[:1])
        seconds = stage.seconds([partial(sample_tokens, logits, rows, none, nothing, to, on=stage.on)], repeats=10)
        most = {"greedy": GREEDY_US, "top-k and top-p": NUCLEUS_US}.get(name)
        found.time(f"{name}, {n} rows of {vocab_size}", 1e6 * seconds, "us", least=least, most=most)


def _alone(stage: Stage, logits: Tensor, rows: Tensor, none: Tensor, nothing: Tensor) -> list[int]:
    to = drawn(1, logits.shape[1], stage.place)
    sample_tokens(logits[:1], rows[:1], none, nothing, to, on=stage.on)
    stage.runtime.finish()
    found: list[int] = to.ids.tolist()
    return found
