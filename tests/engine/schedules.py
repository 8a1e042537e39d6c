"""Ways to compute the same tokens: random batches, chunks, orders, block numbers and table widths, in pools full of NaN."""

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray

from relay.engine.reference_runner import ReferenceRunner
from relay.engine.runner import Batch, Draw, Push
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.messages import Sampling
from relay.model.rope_spec import RopeSpec
from relay.model.spec import ModelSpec
from relay.model.weights import LayerWeights, NetworkWeights, Weights

BLOCK = 16
_DRAW = Draw(Sampling(temperature=0.0), 0.0, [], 0)

TINY = ModelSpec(
    architecture="llama",
    n_layers=2,
    hidden=64,
    n_heads=6,
    n_kv_heads=2,
    head_dim=32,
    ffn=112,
    vocab_size=300,
    rope=RopeSpec(theta=10000.0),
    rms_eps=1e-5,
    max_context=512,
    tied_embeddings=False,
    attn_scale=32**-0.5,
    windows=(0, 0),
)


def random_weights(spec: ModelSpec, seed: int = 0) -> Weights:
    """Large enough that attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=1 + normal(spec.hidden),
            qkv=normal(q_rows + 2 * kv_rows, spec.hidden),
            attn_out=normal(spec.hidden, q_rows),
            ffn_norm=1 + normal(spec.hidden),
            networks=(NetworkWeights(gate_up=normal(2 * spec.ffn, spec.hidden), down=normal(spec.hidden, spec.ffn)),),
        )
        for _ in range(spec.n_layers)
    )
    embedding, head = normal(spec.vocab_size, spec.hidden), normal(spec.vocab_size, spec.hidden)
    return Weights(spec, embedding, layers, 1 + normal(spec.hidden), head)


def random_tokens(spec: ModelSpec, rng: Generator, lengths: list[int]) -> list[NDArray[np.int32]]:
    return [rng.integers(0, spec.vocab_size, n, dtype=np.int32) for n in lengths]


class Pool:
    """A runner on a pool of NaN, and the blocks and progress of sequences in it. `rng` decides what the law says must not matter."""

    def __init__(self, weights: Weights, n_blocks: int, rng: Generator, dtype: str = "float32") -> None:
        spec = weights.spec
        layout = KVLayout(
            n_layers=spec.n_layers, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, block_tokens=BLOCK, dtype=dtype, n_blocks=n_blocks
        )
        self.memory = KVMemory(layout)
        self.memory.pages[:] = 2**64 - 1
        self.runner = ReferenceRunner(self.memory, weights, keep_logits=True)
        self.rng = rng
        self._free = [int(block) for block in rng.permutation(n_blocks)]

    def allocate(self, n_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(self.memory.layout.blocks_for(n_tokens))]

    def step(self, parts: list[tuple[NDArray[np.int32], int, int, list[int]]], pushes: tuple[Push, ...] = ()) -> list[NDArray[np.float32]]:
        """parts: (tokens of the sequence, first position, end, its blocks). Logits [end - first, vocab_size] of each."""
        width = max(len(blocks) for *_, blocks in parts) + int(self.rng.integers(0, 9))
        table = np.full((len(parts), width), -1, np.int32)
        for row, (*_, blocks) in zip(table, parts, strict=True):
            row[: len(blocks)] = blocks
        numbers = self.rng.permutation(len(parts)).astype(np.int32)  # sequences come in any order
        sizes = [end - first for _, first, end, _ in parts]
        n_rows = sum(sizes)
        batch = Batch(
            tokens=np.concatenate([tokens[first:end] for tokens, first, end, _ in parts]),
            positions=np.concatenate([np.arange(first, end, dtype=np.int32) for _, first, end, _ in parts]),
            sequence=np.repeat(numbers, sizes),
            block_table=table[np.argsort(numbers)],
            logit_rows=np.arange(n_rows, dtype=np.int32),
            draws=(_DRAW,) * n_rows,
            pushes=pushes,
        )
        logits = self.runner.step(batch).logits
        assert logits is not None
        return np.split(logits, np.cumsum(sizes)[:-1])

    def compute(self, sequences: list[NDArray[np.int32]], chunks: tuple[int, ...]) -> tuple[list[NDArray[np.float32]], list[list[int]]]:
        """Every token of every sequence, in steps of some of the sequences and chunks of the given sizes: logits and blocks of each."""
        blocks = [self.allocate(len(tokens)) for tokens in sequences]
        logits: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
        done = [0] * len(sequences)
        while left := [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]:
            joined = self.rng.permutation(left)[: self.rng.integers(1, len(left) + 1)].tolist()
            ends = [min(len(sequences[i]), done[i] + int(self.rng.choice(chunks))) for i in joined]
            found = self.step([(sequences[i], done[i], end, blocks[i]) for i, end in zip(joined, ends, strict=True)])
            for i, end, part in zip(joined, ends, found, strict=True):
                logits[i].append(part)
                done[i] = end
        return [np.concatenate(parts) for parts in logits], blocks

    def written(self, blocks: list[int], n_tokens: int) -> NDArray[np.generic]:
        """The bytes of K and V of a sequence: [n_layers, 2, n_kv_heads, n_tokens, bytes of a vector]."""
        layout = self.memory.layout
        pages = self.memory.pages[:, :, blocks].view(np.uint8)
        by_slot = pages.reshape(layout.n_layers, 2, len(blocks), layout.n_kv_heads, BLOCK, -1).swapaxes(2, 3)
        return by_slot.reshape(layout.n_layers, 2, layout.n_kv_heads, len(blocks) * BLOCK, -1)[:, :, :, :n_tokens]
