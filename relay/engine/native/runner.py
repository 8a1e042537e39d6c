"""The runner that computes on the CPU at the machine's own speed: a step is C++ (`relay.kernels.decoder_step`). Imports no torch.

In: a `Batch`. Out: drawn tokens, log probabilities, checksums of what was pushed. Owns its threads and their scratch; the pool is its
worker's, the packed weights are shared by all workers of the host. Its law is `Runner`'s: a row's bits depend on its own sequence alone,
whatever shares the batch, the chunk, or the cores.
"""

from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relay.engine.native.draws import Draws
from relay.engine.native.packed_model import read_header
from relay.engine.native.shared_mapping import SharedMapping
from relay.engine.native.token_arrays import TokenArrays
from relay.engine.runner import Batch, StepResult
from relay.errors import ModelError
from relay.kernels.block_checksum import block_checksums
from relay.kernels.decoder_step import Decoder, Layer, Model, Push, Step
from relay.kernels.packed_matmul import Format, Matrix, matrix_at
from relay.kernels.paged_attention import KV_TYPES, ORDER, PAGE_TOKENS, KVPool
from relay.kernels.thread_pool import ThreadCounters
from relay.kv.checksum import coefficients
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory, host_memory
from relay.model.spec import ModelSpec

Activations = Literal["a16", "a8"]

# With a8, matrices whose inputs have 8 bits. q, k and v are a sixth of the work and, narrow, cause half of the error (a KL divergence of
# 0.0069 with them, 0.0034 without, on SmolLM2): their inputs stay wide.
NARROW: Final = frozenset(("attn_out", "gate", "up", "down"))
SPIN_NS: Final = 40_000


def native_layout(spec: ModelSpec, dtype: str, n_blocks: int) -> KVLayout:
    """The layout of a pool that this runner computes on."""
    return KVLayout(
        n_layers=spec.n_layers,
        n_kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        block_tokens=PAGE_TOKENS,
        dtype=dtype,
        n_blocks=n_blocks,
        order=ORDER,
    )


class NativeRunner:
    """A `Runner` that `Launches`. With one thread, which is the caller's, nothing goes on beside it."""

    tile_rows = 1

    def __init__(
        self,
        memory: KVMemory,
        weights_fd: int,
        *,
        threads: int,
        activations: Activations = "a16",
        keep_logits: bool = False,
        spin_ns: int = SPIN_NS,
    ) -> None:
        """weights_fd: of a packed model (`relay.engine.native.pack`); the descriptor stays the caller's.

        Raises ModelError if the pool is not laid out for this model, KernelsUnavailable, OSError.
        """
        self.mapping = SharedMapping(weights_fd)
        self.contents = read_header(self.mapping.data)
        self.spec = spec = self.contents.spec
        self.activations = activations
        self.beside = threads > 1
        layout = memory.layout
        if layout.dtype not in KV_TYPES or layout != native_layout(spec, layout.dtype, layout.n_blocks):
            expected = native_layout(spec, "bfloat16", layout.n_blocks).layout_id
            raise ModelError(
                f"the KV pool is laid out as {layout.layout_id}; the native kernels need {expected}, or another type of theirs"
            )
        self.memory = memory
        memory.sums = block_checksums
        self.vocab_size = spec.vocab_size
        self.keep_logits = keep_logits
        self._frequencies = np.ascontiguousarray(spec.rope.frequencies(spec.head_dim), np.float64)
        self._narrow = NARROW if activations == "a8" else frozenset[str]()
        self._layers = (Layer * spec.n_layers)(*(self._layer(i) for i in range(spec.n_layers)))
        self._decoder = Decoder(
            self._model(),
            n_threads=threads,
            spin_ns=spin_ns,
            coefficients=coefficients(2 * (layout.page_bytes // 8)),
        )
        self._token_arrays = TokenArrays()
        self._prepared: _Prepared | None = None

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout

    @staticmethod
    def read_spec(weights_fd: int) -> ModelSpec:
        """Of the model packed there: what a pool for it is laid out by. Raises ModelError, OSError."""
        return read_header(SharedMapping(weights_fd).data).spec

    def counters(self) -> tuple[ThreadCounters, ...]:
        """Of each compute thread: one that stands still shows here, for the others do its work."""
        return self._decoder.counters()

    def close(self) -> None:
        """End the threads."""
        self._decoder.close()

    def step(self, batch: Batch) -> StepResult:
        """See `Runner.step`. Raises ValueError for arrays that lead outside of pool, table or vocabulary; nothing has been written then."""
        return self.launch(batch).result()

    def prepare(self, batch: Batch) -> None:
        """See `Launches.prepare`. Raises ValueError if its arrays are not of shapes that belong together."""
        self._prepared = self._prepare(batch)

    def launch(self, batch: Batch) -> "_Prepared":
        """See `Launches.launch`: all threads but the caller's begin. Raises as `step` does."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.batch is not batch:
            prepared = self._prepare(batch)
        prepared.draws.see(self._token_arrays)
        self._decoder.begin(prepared.step)
        return prepared

    def _prepare(self, batch: Batch) -> "_Prepared":
        step, n_logit_rows = Step(), len(batch.draws)
        arrays = [_indices(a) for a in (batch.tokens, batch.positions, batch.sequence, batch.block_table, batch.logit_rows)]
        tokens, positions, sequence, table, logit_rows = arrays
        if not len(tokens) == len(positions) == len(sequence) or table.ndim != 2 or len(logit_rows) != n_logit_rows:
            raise ValueError(
                "tokens, positions and sequence are of one length, the block table is [sequences, blocks], and each logit row has a draw"
            )
        step.n_rows, step.n_logit_rows = len(tokens), n_logit_rows
        step.n_sequences, step.table_width = table.shape
        step.tokens, step.positions, step.sequence, step.table, step.logit_rows = (a.ctypes.data for a in arrays)
        draws = Draws(batch.draws)
        step.draws, step.drawn = draws.draws_pointer, draws.drawn_pointer
        logits = np.empty((n_logit_rows, self.vocab_size), np.float32) if self.keep_logits else None
        step.logits = None if logits is None else logits.ctypes.data
        checksums, kept = self._add_pushes(step, batch)
        return _Prepared(self, batch, step, [*arrays, *kept], draws, checksums, logits)

    def _finish(self, launched: "_Prepared") -> StepResult:
        self._decoder.finish()
        self._token_arrays.end_step()
        if launched.step.abandoned:
            return StepResult([], [], [], abandoned=True)
        return StepResult(
            ids=launched.draws.ids(),
            logprobs=launched.draws.logprobs(),
            checksums=launched.checksums,
            logits=launched.logits,
            push_ns=launched.step.push_ns // self._decoder.n_threads,
        )

    def _add_pushes(self, step: Step, batch: Batch) -> tuple[list[NDArray[np.uint64]], list[NDArray[np.int32]]]:
        """The checksums to be, and what must live as long as the step."""
        step.n_pushes = len(batch.pushes)
        if not batch.pushes:
            return [], []
        layout, checksums, entries = self.layout, [], (Push * len(batch.pushes))()
        kept: list[NDArray[np.int32]] = []
        for entry, push in zip(entries, batch.pushes, strict=True):
            if push.target.layout.layout_id != layout.layout_id or len(push.blocks) != len(push.target_blocks):
                raise ValueError(
                    f"blocks of {layout.layout_id} cannot be pushed to {push.target.layout.layout_id}, or their numbers differ"
                )
            blocks, target_blocks = _indices(push.blocks), _indices(push.target_blocks)
            sums = np.empty((layout.n_layers, len(blocks)), np.uint64)
            target = host_memory(push.target)
            entry.target, entry.target_blocks_total, entry.n = target.pages.ctypes.data, target.layout.n_blocks, len(blocks)
            entry.blocks, entry.target_blocks, entry.checksums = blocks.ctypes.data, target_blocks.ctypes.data, sums.ctypes.data
            kept += [blocks, target_blocks]
            checksums.append(sums)
        step.pushes = entries
        return checksums, kept

    def _model(self) -> Model:
        spec, layout = self.spec, self.layout
        embedding = self._matrix("embedding")
        return Model(
            n_layers=spec.n_layers,
            hidden=spec.hidden,
            n_heads=spec.n_heads,
            n_kv_heads=spec.n_kv_heads,
            head_dim=spec.head_dim,
            ffn=spec.ffn,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            rms_eps=spec.rms_eps,
            rope_scale=spec.rope.magnitude,
            attn_scale=spec.attn_scale,
            inverse_frequencies=self._frequencies.ctypes.data,
            layers=self._layers,
            final_norm=self._vector("final_norm"),
            embedding=embedding,
            head=embedding if spec.tied_embeddings else self._matrix("head"),
            kv=KVPool(self.memory.pages.ctypes.data, layout.n_blocks, layout.n_kv_heads, layout.head_dim, KV_TYPES[layout.dtype]),
        )

    def _layer(self, i: int) -> Layer:
        matrices = {part: self._matrix(f"layers.{i}.{part}") for part in ("q", "k", "v", "attn_out", "gate", "up", "down")}
        vectors = {
            part: self._vector(f"layers.{i}.{part}") for part in ("attn_norm", "ffn_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
        }
        return Layer(**matrices, **vectors, window=self.spec.windows[i])

    def _matrix(self, name: str) -> Matrix:
        tensor = self.contents.tensors[name]
        narrow = name.rpartition(".")[2] in self._narrow
        return matrix_at(self.mapping.address + tensor.offset, Format(tensor.format), tensor.n_out, tensor.n_in, narrow=narrow)

    def _vector(self, name: str) -> int | None:
        tensor = self.contents.tensors.get(name)
        return None if tensor is None else self.mapping.address + tensor.offset


class _Prepared(NamedTuple):
    """A step, as threads read it, once it is launched `Pending`; keeps all that it leads to."""

    runner: NativeRunner
    batch: Batch
    step: Step
    arrays: list[NDArray[np.int32]]
    draws: Draws
    checksums: list[NDArray[np.uint64]]
    logits: NDArray[np.float32] | None

    def result(self) -> StepResult:
        """See `Pending.result`."""
        return self.runner._finish(self)

    def abandon(self) -> None:
        """See `Abandonable.abandon`: the phase that has begun is finished."""
        self.step.abandoned = 1


def _indices(values: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)
