"""The runner on a device: our kernels over a paged pool, decode steps as replays of captured graphs, chunks launched one by one.

In: a `Batch`. Out: drawn tokens, log probabilities, checksums of what was pushed. Everything that a step writes lies in buffers made once,
for the largest step; the device is waited for once, when the tokens are read, and the host is free until then. Its law is `Runner`'s: no
kernel's result for a row depends on the other rows of a call, on its grid, or on whether the row decodes or is part of a chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from relay.engine.cuda.decode_graphs import Bucket, DecodeGraphs
from relay.engine.cuda.device_sampler import DeviceSampler
from relay.engine.cuda.pool import TYPES, DevicePool
from relay.engine.cuda.pusher import DevicePusher
from relay.engine.cuda.step_inputs import Shape, StepInputs
from relay.engine.cuda.step_limits import StepLimits
from relay.engine.cuda.weights import DeviceLayer, DeviceWeights
from relay.engine.runner import Batch, Draw, StepResult
from relay.errors import ModelError
from relay.kernels.device_runtime import Graph, Runtime
from relay.kernels.kv_scatter_rope import kv_scatter_rope
from relay.kernels.paged_decode import SPLIT, Workspace, paged_decode
from relay.kernels.paged_prefill import paged_prefill, torch_prefill
from relay.kernels.rms_norm import rms_norm
from relay.kernels.silu_mul import silu_mul
from relay.kv.layout import KVLayout
from relay.messages import Logprobs


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Of one device, for `max_rows` rows: [max_rows, width] each in the step's type; logits: float32 [logit rows, vocab_size]."""

    residual: Tensor
    delta: Tensor
    normed: Tensor
    qkv: Tensor
    q: Tensor
    mixed: Tensor
    gate_up: Tensor
    gated: Tensor
    picked_residual: Tensor
    picked_delta: Tensor
    logits: Tensor
    part_o: Tensor
    part_ml: Tensor


class PendingStep:
    """What was launched and not yet read. Rows are drawn some at a time, where there are more than the sampler takes."""

    def __init__(self, runtime: Runtime, pusher: DevicePusher, vocab_size: int, *, keep_logits: bool) -> None:
        self._runtime, self._pusher, self._vocab_size, self._keep_logits = runtime, pusher, vocab_size, keep_logits
        self._ids: list[int] = []
        self._logprobs: list[Logprobs | None] = []
        self._kept: list[Tensor] = []
        self._drawing: Callable[[], None] | None = None

    def draw(self, sampler: DeviceSampler, logits: Tensor, draws: Sequence[Draw]) -> None:
        """logits: float32 [len(draws), vocab_size], in a buffer that is free again after `read`."""
        drawing = sampler.launch(logits, draws)

        def read_these() -> None:
            ids, logprobs = drawing()
            self._ids += ids
            self._logprobs += logprobs
            if self._keep_logits:
                self._kept.append(logits.cpu().clone())

        self._drawing = read_these

    def read(self) -> None:
        """Wait for what is being drawn, if something is."""
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            drawing()

    def result(self) -> StepResult:
        with self._runtime.computing():
            self.read()
            checksums, push_ns = self._pusher.finish()
        logits = None
        if self._keep_logits:
            logits = np.concatenate([part.numpy() for part in self._kept]) if self._kept else np.empty((0, self._vocab_size), np.float32)
        return StepResult(self._ids, self._logprobs, checksums, logits, push_ns)

    def abandon(self) -> None:
        """See `Abandonable.abandon`: what a device has been given it computes."""


class CudaRunner:
    """A `Runner` that `Launches`. The pool is its worker's; weights may be shared by runners of one process."""

    tile_rows = 16

    def __init__(
        self,
        memory: DevicePool,
        weights: DeviceWeights,
        runtime: Runtime,
        limits: StepLimits,
        *,
        graphs: bool = True,
        keep_logits: bool = False,
        torch_attention: bool = False,
    ) -> None:
        """graphs: capture now. torch_attention: chunks by torch's own. Raises ModelError if the pool is not laid out for this model."""
        spec, layout = weights.spec, memory.layout
        found = (layout.n_layers, layout.n_kv_heads, layout.head_dim, TYPES[layout.dtype])
        wanted = (spec.n_layers, spec.n_kv_heads, spec.head_dim, weights.dtype)
        if found != wanted:
            raise ModelError(f"the KV pool has (layers, K/V heads, head width, type) {found}; the model needs {wanted}")
        self.memory, self.vocab_size, self.keep_logits = memory, spec.vocab_size, keep_logits
        self._weights, self._runtime, self._limits, self._on = weights, runtime, limits, runtime.on
        self._torch_attention = torch_attention
        self._inputs = StepInputs(limits, layout, spec.vocab_size, runtime)
        self._buffers = self._make_buffers()
        self._sampler = DeviceSampler(limits.logit_rows, spec.vocab_size, runtime)
        self._pusher = DevicePusher(memory, runtime)
        self.graphs = DecodeGraphs(limits.max_running, limits.max_context)
        self.n_eager = 0
        runtime.settle()
        if graphs:
            with runtime.computing():
                self.graphs.capture_all(self._capture)
                runtime.finish()

    @property
    def layout(self) -> KVLayout:
        return self.memory.layout

    def step(self, batch: Batch) -> StepResult:
        """See `Runner.step`. Raises ValueError for arrays that lead outside of pool, table or vocabulary; nothing has been written then."""
        return self.launch(batch).result()

    beside = True

    def prepare(self, batch: Batch) -> None:
        """See `Launches.prepare`: the step under way reads the inputs' memory, so nothing is."""

    def launch(self, batch: Batch) -> PendingStep:
        """See `Launches.launch`. Raises as `step` does."""
        with self._runtime.computing():
            self._pusher.start(batch.pushes)
            bucket = None
            if not batch.pushes and len(batch.tokens) == len(batch.draws) == len(batch.block_table):
                bucket = self.graphs.bucket_for(len(batch.tokens), int(batch.positions.max(initial=0)) + 1)
            shape = self._inputs.load(batch, 0 if bucket is None else bucket.n_rows)
            step = PendingStep(self._runtime, self._pusher, self.vocab_size, keep_logits=self.keep_logits)
            if bucket is not None and not shape.chunks and shape.in_order and self.graphs.replay(bucket):
                step.draw(self._sampler, self._buffers.logits[: shape.n_rows], batch.draws)
            else:
                self.n_eager += 1
                self._layers(shape)
                for begin in range(0, len(batch.draws), self._limits.logit_rows):
                    end = min(begin + self._limits.logit_rows, len(batch.draws))
                    step.read()
                    step.draw(self._sampler, self._logits_of(begin, end), batch.draws[begin:end])
        return step

    def replay(self, bucket: Bucket) -> None:
        """The device's part of a decode step once more, on whatever its inputs are, for measuring. Waits."""
        with self._runtime.computing():
            self.graphs.replay(bucket)
            self._runtime.finish()

    def _capture(self, bucket: Bucket) -> Graph:
        """Run once on padding, so that everything is loaded, then capture."""
        n, inputs = bucket.n_rows, self._inputs
        inputs.pad(n)
        shape = Shape(n_rows=n, n_single=n, chunks=(), context=bucket.context, in_order=True)

        def run() -> None:
            self._layers(shape)
            self._head(self._buffers.delta[:n], self._buffers.residual[:n])

        run()
        self._runtime.finish()
        return self._runtime.capture(run)

    def _layers(self, shape: Shape) -> None:
        """Up to the last layer's change, which is in `delta` and not yet part of `residual`."""
        weights, b, n, on = self._weights, self._buffers, shape.n_rows, self._on
        spec, inputs = weights.spec, self._inputs
        residual, delta, normed, qkv = b.residual[:n], b.delta[:n], b.normed[:n], b.qkv[:n]
        q, mixed, gate_up, gated = b.q[:n], b.mixed[:n], b.gate_up[:n], b.gated[:n]
        tokens = inputs.tokens[:n]
        self._runtime.call(lambda: torch.index_select(weights.embedding, 0, tokens, out=residual))
        for i, layer in enumerate(weights.layers):
            change, into = (delta, residual) if i else (residual, None)
            rms_norm(change, into, layer.attn_norm, normed, eps=spec.rms_eps, on=on)
            self._multiply_qkv(layer, normed, qkv)
            keys, values = self.memory.keys[i], self.memory.values[i]
            positions, sequence = inputs.positions[:n], inputs.sequence[:n]
            kv_scatter_rope(qkv, weights.cos, weights.sin, positions, sequence, inputs.table, q, keys, values, on=on)
            self._pusher.layer(i)
            self._attend(shape, i, q, mixed)
            layer.attn_out.multiply(mixed.view(n, -1), delta)
            rms_norm(delta, residual, layer.ffn_norm, normed, eps=spec.rms_eps, on=on)
            layer.gate_up.multiply(normed, gate_up)
            silu_mul(gate_up, gated, activation=spec.traits.activation, on=on)
            layer.down.multiply(gated, delta)

    def _multiply_qkv(self, layer: DeviceLayer, x: Tensor, qkv: Tensor) -> None:
        if layer.q_norm is None or layer.k_norm is None:
            layer.qkv.multiply(x, qkv)
            return
        spec, n, begin = self._weights.spec, len(x), 0
        for part, norm in zip(layer.qkv.parts, (layer.q_norm, layer.k_norm, None), strict=True):
            width = part.n_out
            raw = self._buffers.mixed.view(-1)[: n * width].view(n, width)
            part.multiply(x, raw)
            out = raw
            if norm is not None:
                out = self._buffers.q.view(-1)[: n * width].view(n, width)
                heads = (n * width // spec.head_dim, spec.head_dim)
                rms_norm(raw.view(heads), None, norm, out.view(heads), eps=spec.rms_eps, on=self._on)
            layer.qkv.place(out, qkv[:, begin : begin + width])
            begin += width

    def _attend(self, shape: Shape, i: int, q: Tensor, mixed: Tensor) -> None:
        spec, inputs, on, n = self._weights.spec, self._inputs, self._on, shape.n_single
        keys, values = self.memory.keys[i], self.memory.values[i]
        scale, cap, window = spec.attn_scale, spec.attn_softcap, spec.windows[i]
        if n:
            work = self._workspace(n, shape.context)
            table, lengths = inputs.table[:n], inputs.lengths[:n]
            paged_decode(q[:n], keys, values, table, lengths, mixed[:n], work, scale=scale, cap=cap, window=window, on=on)
        if shape.chunks:
            chunks, table = len(shape.chunks), inputs.table[n : n + len(shape.chunks)]
            if self._torch_attention and not cap:
                torch_prefill(q[n:], keys, values, table, shape.chunks, mixed[n:], scale=scale, window=window)
                return
            starts, lengths, n_most = inputs.starts[: chunks + 1], inputs.chunk_lengths[:chunks], max(n_rows for n_rows, _ in shape.chunks)
            paged_prefill(q[n:], keys, values, table, starts, lengths, mixed[n:], n_most=n_most, scale=scale, cap=cap, window=window, on=on)

    def _workspace(self, n: int, context: int) -> Workspace:
        spec, n_splits = self._weights.spec, -(-context // SPLIT)
        shape = (n, spec.n_heads, n_splits)
        n_parts = n * spec.n_heads * n_splits
        part_o = self._buffers.part_o[: n_parts * spec.head_dim].view(*shape, spec.head_dim)
        return Workspace(part_o, self._buffers.part_ml[: 2 * n_parts].view(*shape, 2))

    def _logits_of(self, begin: int, end: int) -> Tensor:
        """float32 [end - begin, vocab_size] of these logit rows."""
        b, rows = self._buffers, self._inputs.logit_rows[begin:end]
        delta, residual = b.picked_delta[: end - begin], b.picked_residual[: end - begin]
        torch.index_select(b.delta, 0, rows, out=delta)
        torch.index_select(b.residual, 0, rows, out=residual)
        return self._head(delta, residual)

    def _head(self, delta: Tensor, residual: Tensor) -> Tensor:
        b, n = self._buffers, len(delta)
        rms_norm(delta, residual, self._weights.final_norm, b.normed[:n], eps=self._weights.spec.rms_eps, on=self._on)
        self._weights.head.multiply(b.normed[:n], b.logits[:n])
        return b.logits[:n]

    def _make_buffers(self) -> _Buffers:
        spec, limits, dtype = self._weights.spec, self._limits, self._weights.dtype
        q_width, kv_width = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        n_parts = limits.max_running * spec.n_heads * -(-limits.max_context // SPLIT)

        def rows(*width: int, n: int = limits.max_rows) -> Tensor:
            return torch.zeros(n, *width, dtype=dtype, device=self._runtime.place)

        def floats(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float32, device=self._runtime.place)

        return _Buffers(
            residual=rows(spec.hidden),
            delta=rows(spec.hidden),
            normed=rows(spec.hidden),
            qkv=rows(q_width + 2 * kv_width),
            q=rows(spec.n_heads, spec.head_dim),
            mixed=rows(spec.n_heads, spec.head_dim),
            gate_up=rows(2 * spec.ffn),
            gated=rows(spec.ffn),
            picked_residual=rows(spec.hidden, n=limits.logit_rows),
            picked_delta=rows(spec.hidden, n=limits.logit_rows),
            logits=floats(limits.logit_rows, spec.vocab_size),
            part_o=floats(n_parts * spec.head_dim),
            part_ml=floats(2 * n_parts),
        )
