"""What a worker takes of its device's memory, part by part, before anything is allocated. No torch: the root plans with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Final

import msgspec

from relay.engine.cuda.matrix_types import device_bytes
from relay.engine.cuda.step_limits import StepLimits
from relay.errors import ConfigError
from relay.kv.layout import KVLayout
from relay.model.checkpoint import Checkpoint
from relay.model.spec import ModelSpec

ITSELF_BYTES: Final = 1 << 30  # set aside for a process's CUDA context, loaded kernels and graphs
FAR_BYTES: Final = 512 << 20  # set aside for the context of a process on a GPU that its own does not reach
_SPLIT: Final = 256  # keys of an attention split
_LACK: Final = ("out of memory", "allocate memory")  # as CUDA, torch and CuPy say it; as Linux does
_SHOWN: Final = 300


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. steps: what lies between kernels for the largest step; attention: parts of long contexts; draws: logits and tallies."""

    weights: int
    kv: int
    steps: int
    attention: int
    draws: int
    tables: int
    itself: int

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


def plan_memory(checkpoint: Checkpoint, layout: KVLayout, limits: StepLimits, *, itself: int = ITSELF_BYTES) -> DeviceMemory:
    """Of one worker. Raises ModelError for what is not served there."""
    spec = checkpoint.spec
    q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    widths = 3 * spec.hidden + (q_width + 2 * kv_width) + 2 * q_width + 3 * spec.ffn + max(q_width, spec.ffn)
    n_parts = limits.max_running * spec.n_heads * -(-limits.max_context // _SPLIT)
    return DeviceMemory(
        weights=weight_bytes(checkpoint),
        kv=layout.pool_bytes,
        steps=2 * limits.max_rows * widths,
        attention=4 * n_parts * (spec.head_dim + 2),
        draws=4 * 3 * limits.logit_rows * spec.vocab_size,
        tables=4 * (limits.max_context * spec.head_dim + limits.max_rows * limits.max_blocks(layout.block_tokens)),
        itself=itself,
    )


@contextmanager
def lack_explained() -> Iterator[None]:
    """Raises ConfigError with what to lower where what is loaded inside finds no memory: others may have taken it since the plan."""
    try:
        yield
    except Exception as error:  # each library has its own
        if not any(words in str(error).lower() for words in _LACK):
            raise
        raise ConfigError(
            f"the device has no memory left for what this worker takes ({str(error)[:_SHOWN].strip()}); lower engine.kv_memory_mib or "
            "engine.gpu_memory_share, engine.max_running, engine.max_chunk_tokens or model.max_context, or place fewer workers there: "
            "`relay check` shows what each part takes"
        ) from error


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Matrices as the kernels read them; embeddings once more to look up in, unless they are dense already."""
    spec = checkpoint.spec
    total = 0
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        if len(shape) == 1 or name == "embedding":
            total += 2 * prod(shape)
        else:
            total += device_bytes(checkpoint.type(name), *shape)
    return total + _tied_head(checkpoint, spec)


def _tied_head(checkpoint: Checkpoint, spec: ModelSpec) -> int:
    if not spec.tied_embeddings:
        return 0
    shape = checkpoint.shape("embedding")
    packed = device_bytes(checkpoint.type("embedding"), *shape)
    return packed if packed != 2 * prod(shape) else 0
