"""One attempt of one request inside an engine."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relay.engine.drafter import Drafter
from relay.kv.pool import KVPool
from relay.kv.prefix import BlockKey, next_key
from relay.messages import FinishReason, Key, Logprobs, Sampling, Stopping

Side = Literal["prefill", "decode"]
SequenceId = int  # unique in its engine; (request_id, attempt) is not: two decode workers may ask for one


@dataclass(slots=True)
class Target:
    """Where a prefill sequence's KV goes as it is computed: leased blocks of a decode worker's pool, from token `n_present` on."""

    memory: KVPool
    blocks: tuple[int, ...]
    n_present: int


@dataclass(slots=True)
class Sequence:
    """Owned by the engine from Add or Join until it is reported as gone; by its actor before and after.

    tokens: prompt, earlier attempts' tokens and what is generated. blocks: its block table, empty until the engine finds some.
    n_computed: tokens whose KV is there. root: the namespace of its block keys. n_cached: tokens found in the cache at its start.
    A `prefill` sequence leaves with its first token; a `decode` one stays until it finishes. target: where its KV is pushed, None for
    nowhere. lone: it shares no step with others until it has gained tokens in two steps here: the first one's token is lost
    with the worker if the second kills before it is sent. borrowed: its blocks are a lease of this pool, so not its own to publish.
    """

    id: SequenceId
    side: Side
    request_id: str
    attempt: int
    tokens: list[int]
    n_prompt: int
    sampling: Sampling
    stopping: Stopping
    blocks: list[int]
    root: BlockKey = b""
    priority: int = 0
    n_computed: int = 0
    prompt_logprobs: int = -1
    target: Target | None = None
    borrowed: bool = False
    lone: bool = False
    keys: list[BlockKey] = field(default_factory=list)
    n_published: int = 0
    n_cached: int = 0
    checksums: list[NDArray[np.uint64]] = field(default_factory=list)  # [n_layers, n] of each push, in order
    scores: list[Logprobs] = field(default_factory=list)  # of the prompt's tokens but the first
    n_pushed: int = 0  # blocks of the target that are written
    preempted: bool = False
    started: bool = False  # some of it has been computed here
    has_gained: bool = False  # a token here
    lacked_blocks: bool = False
    trail: list[tuple[int, int]] = field(default_factory=list)
    drafter: Drafter | None = None  # from its first decode step on that has room for guesses
    undraftable: bool = False

    @property
    def key(self) -> Key:
        return self.request_id, self.attempt

    def keys_until(self, n_blocks: int, block_tokens: int) -> list[BlockKey]:
        """Keys of its first `n_blocks` blocks, all full."""
        while len(self.keys) < n_blocks:
            at = len(self.keys) * block_tokens
            self.keys.append(next_key(self.keys[-1] if self.keys else self.root, self.tokens[at : at + block_tokens]))
        return self.keys[:n_blocks]

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.n_prompt

    def pushed_checksums(self) -> bytes:
        """uint64 [n_layers, blocks pushed], as `Prefilled` carries them; empty if it computed in place."""
        return np.concatenate(self.checksums, axis=1).tobytes() if self.checksums else b""

    def finish_after(self, token: int) -> FinishReason | None:
        """Whether `token`, about to be appended, is the last one."""
        if token in self.stopping.stop_ids and self.n_generated >= self.stopping.min_tokens:
            return "stop"
        if self.n_generated + 1 >= self.stopping.max_tokens:
            return "length"
        return None

    def suppressed(self, n_more: int = 0) -> tuple[int, ...]:
        """Ids that may not be drawn once it has `n_more` tokens more."""
        return self.stopping.stop_ids if self.n_generated + n_more < self.stopping.min_tokens else ()
