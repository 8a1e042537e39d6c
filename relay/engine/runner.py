"""What an engine asks of whatever computes: one call, flat arrays in, tokens out; in two halves where it goes on beside the host.

Runners differ in device and speed, never in meaning. The law of exactness binds them all: the logits of a row depend on the tokens at and
before it in its own sequence and on nothing else; not on what shares the batch, on chunk sizes, on block numbers, on which worker computed
the KV, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from relay.kv.layout import KVLayout
from relay.kv.pool import KVPool
from relay.messages import Logprobs, Sampling


@dataclass(frozen=True, slots=True)
class Draw:
    """What to do with one row of logits: draw the next token, or score a given one.

    `uniform` in [0, 1) is the row's random number. `tokens` are all of the sequence up to and including the row (read only), of which
    `n_prompt` are the prompt: penalties count them. `suppress` ids cannot be drawn. `target` >= 0: nothing is drawn, the target's log
    probability under the plain distribution is returned (for the log probabilities of a prompt); `top` says how many alternatives.
    """

    sampling: Sampling
    uniform: float
    tokens: list[int]
    n_prompt: int
    suppress: tuple[int, ...] = ()
    target: int = -1
    top: int = -1


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks to copy, layer by layer as each is computed, into another worker's pool."""

    target: KVPool
    blocks: NDArray[np.int32]
    target_blocks: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows of one sequence are consecutive and ascend in position; sequences come in any order.

    tokens, positions, sequence: int32 [T]; `sequence` is an index into `block_table`: int32 [S, max_blocks], unused entries -1.
    A row's KV is written to slot `positions % block_tokens` of block `block_table[sequence, positions // block_tokens]`, and it attends
    to positions 0 to its own. logit_rows: int32 [R], ascending, one Draw each.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequence: NDArray[np.int32]
    block_table: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    draws: tuple[Draw, ...]
    pushes: tuple[Push, ...] = ()


@dataclass(slots=True)
class StepResult:
    """ids: [R] drawn; the target where scored, -1 where the highest logit is not finite. logprobs: [R], None where not asked, or not drawn.
    checksums: one uint64 [n_layers, n] per push.

    `logits`: float32 [R, vocab] copy for tests, when the runner's `keep_logits` is set. `push_ns`: time in which the step did nothing but
    wait for pushes. `abandoned`: there is no more to it than that it is over.
    """

    ids: list[int]
    logprobs: list[Logprobs | None]
    checksums: list[NDArray[np.uint64]]
    logits: NDArray[np.float32] | None = None
    push_ns: int = 0
    abandoned: bool = False


class Runner(Protocol):
    """Computes steps on one pool. Called from one thread only."""

    vocab_size: int
    tile_rows: int  # rows come in multiples of this at no further cost
    keep_logits: bool

    @property
    def memory(self) -> KVPool: ...

    @property
    def layout(self) -> KVLayout: ...

    def step(self, batch: Batch) -> StepResult:
        """Compute all rows, write their KV, draw the tokens. Raises only for a defect: the worker then ends."""
        ...


class Abandonable(Protocol):
    """A step that is being computed."""

    def abandon(self) -> None:
        """From any thread, at any time: nobody wants the result. A step that can then ends early; blocks may hold anything afterwards."""
        ...


class Pending(Abandonable, Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Wait for it; once. Raises what `Runner.step` would."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was over when it was launched."""

    computed: StepResult

    def result(self) -> StepResult:
        return self.computed

    def abandon(self) -> None:
        """See `Abandonable.abandon`."""


@runtime_checkable
class Launches(Protocol):
    """A `Runner` that can begin a step and leave it. `step` is `launch` and `result`. `beside`: whether the step then goes on by itself."""

    beside: bool

    def prepare(self, batch: Batch) -> None:
        """While a step is under way: the next one may be of this batch, or of another.

        If it is, its array of tokens will hold others by then, and its draws' lists of tokens will have grown. All else can be made ready.
        """
        ...

    def launch(self, batch: Batch) -> Pending:
        """Begin a step. The batch is not changed before its result is there; no other is launched before that."""
        ...


def beside_host(runner: Runner) -> Launches | None:
    """The same, if its steps run beside the host."""
    return runner if isinstance(runner, Launches) and runner.beside else None


def launching(runner: Runner) -> Callable[[Batch], Pending]:
    """What begins a step, or, where a runner cannot do that, computes it. Raises as `Runner.step` does."""
    return runner.launch if isinstance(runner, Launches) else lambda batch: Done(runner.step(batch))
