"""Section `speed`: each kernel by itself, beside the rates measured in this section and what torch or FlashInfer has of it."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from relay.gpu_check.kernels_right import programs, random_rows
from relay.gpu_check.paged_kv import BLOCK, Paged, paged
from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage
from relay.kernels.exact_matmul import exact_matmul
from relay.kernels.kv_transfer import kv_transfer
from relay.kernels.paged_decode import paged_decode, workspace
from relay.kernels.paged_prefill import paged_prefill
from relay.kernels.quant_matvec import Format, quant_matvec
from relay.kernels.quant_packing import pack_gguf
from relay.kernels.rms_norm import rms_norm

DECODE_TARGET, PREFILL_TARGET, TRANSFER_TARGET = 3.3, 300.0, 3.7


def run(found: Found, rehearse: bool) -> None:
    stage = Stage(programs(), rehearse=rehearse)
    copy, product = stage.copy_rate(), stage.product_rate()
    with stage.runtime.computing():  # inputs are made on the stream that uses them
        _decode(stage, found, copy)
        _prefill(stage, found, product)
        _transfer(stage, found, copy)
        _matmul(stage, found, copy, product)
        _quantized(stage, found, copy)
        _norm(stage, found, copy)


def _decode(stage: Stage, found: Found, copy: float) -> None:
    shapes = [(64, 8192), (1, 32768), (16, 1024)] if not stage.rehearse else [(2, 300)]
    for n, length in shapes:
        kv = paged(stage, [length] * n, stage.size(8, 1), 128)
        sets = [kv] * (1 if kv.n_bytes > 1 << 29 else 4)
        if len(sets) > 1:
            sets = [paged(stage, [length] * n, stage.size(8, 1), 128) for _ in sets]
        q = stage.normal(n, stage.size(32, 4), 128)
        runs = [_one_decode(stage, q, each, length) for each in sets]
        rate = kv.n_bytes / stage.seconds(runs, repeats=4)
        target = DECODE_TARGET if n == 64 else None
        try:
            theirs, note = kv.n_bytes / stage.torch_seconds(flashinfer_decode(q, kv)), ""
        except Exception as error:  # a peer that is not there, or of another version, fails nothing
            theirs, note = None, f"FlashInfer: {error}".splitlines()[0][:200]
        found.rate(f"paged_decode, {n} x {length}", rate / 1e12, "TB/s", most=copy / 1e12, target=target, note=note)
        if theirs is not None:
            found.rate(f"FlashInfer's decode, {n} x {length}", theirs / 1e12, "TB/s", most=copy / 1e12)


def flashinfer_decode(q: Tensor, kv: Paged) -> Callable[[], object]:
    """The same attention over the same pages, planned once as it is meant to be. q: [n, n_heads, head_dim]. Raises what FlashInfer does,
    ImportError where there is none. Source: docs.flashinfer.ai/api/decode.html."""
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    room = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    planned = wrapper(room, "HND", use_tensor_cores=True)
    n_pages = -(-kv.lengths // BLOCK)
    ends = torch.zeros(len(kv.lengths) + 1, dtype=torch.int32, device=q.device)
    ends[1:] = n_pages.cumsum(0)
    pages = torch.cat([row[:n] for row, n in zip(kv.table, n_pages.tolist(), strict=True)])
    _, n_kv_heads, _, head_dim = kv.keys.shape
    last = kv.lengths - (n_pages - 1) * BLOCK
    planned.plan(ends, pages, last, q.shape[1], n_kv_heads, head_dim, BLOCK, pos_encoding_mode="NONE", data_type=q.dtype)
    return lambda: planned.run(q, (kv.keys, kv.values))


def _one_decode(stage: Stage, q: Tensor, kv: Paged, length: int) -> Callable[[], None]:
    out, work = torch.empty_like(q), workspace(len(q), q.shape[1], 128, length, stage.place)
    return lambda: paged_decode(q, kv.keys, kv.values, kv.table, kv.lengths, out, work, scale=128**-0.5, on=stage.on)


def _prefill(stage: Stage, found: Found, product: float) -> None:
    n, n_heads, n_kv_heads = stage.size(8192, 40), stage.size(32, 4), stage.size(8, 1)
    kv, q = paged(stage, [n], n_kv_heads, 128), stage.normal(n, n_heads, 128)
    out, starts = torch.empty_like(q), torch.tensor([0, n], dtype=torch.int32, device=stage.place)

    def one() -> None:
        paged_prefill(q, kv.keys, kv.values, kv.table, starts, kv.lengths, out, n_most=n, scale=128**-0.5, on=stage.on)

    operations = 4 * n_heads * 128 * n * (n + 1) / 2
    rate = operations / stage.seconds([one])
    found.rate(f"paged_prefill, {n} causal", rate / 1e12, "TFLOP/s", most=product / 1e12, target=PREFILL_TARGET)
    qs = stage.normal(1, n_heads, n, 128)
    ks, vs = (stage.normal(1, n_heads, n, 128) for _ in range(2))
    theirs = operations / stage.torch_seconds(lambda: scaled_dot_product_attention(qs, ks, vs, is_causal=True))
    found.rate(f"torch's attention, {n} causal, not paged", theirs / 1e12, "TFLOP/s", most=product / 1e12)


def _transfer(stage: Stage, found: Found, copy: float) -> None:
    layers, words, n = stage.size(32, 2), stage.size(8 * 16 * 128 * 2 // 8, 64), stage.size(256, 3)
    source, target = (torch.zeros(layers, 2, 2 * n, words, dtype=torch.int64, device=stage.place).random_() for _ in range(2))
    order = torch.randperm(2 * n)[:n].int().to(stage.place)
    sums = torch.zeros(layers, n, dtype=torch.int64, device=stage.place)
    n_bytes = 2 * n * words * 8 * layers
    for blocks in (16, 64):
        one = partial(kv_transfer, source, order, target, order, range(layers), sums, cuda_blocks=blocks, on=stage.on)
        seconds = stage.seconds([one])
        target_rate = TRANSFER_TARGET if blocks == 64 else None
        rate = 2 * n_bytes / seconds / 1e12
        found.rate(f"kv_transfer, {n_bytes >> 20} MiB, {blocks} CUDA blocks", rate, "TB/s", most=copy / 1e12, target=target_rate)


def _matmul(stage: Stage, found: Found, copy: float, product: float) -> None:
    """The widest matrix of an 8B model, and a square one, whose outputs make fewer tiles than the GPU has multiprocessors."""
    n_in = stage.size(4096, 64)
    shapes = ((14336, (1, 16, 64, 4096)), (4096, (32, 128))) if not stage.rehearse else ((64, (1, 20)), (32, (17,)))
    for n_out, counts in shapes:
        weights = [stage.normal(n_out, n_in) for _ in range(stage.size(4, 1))]
        for n in counts:
            x, out = stage.normal(n, n_in), torch.empty(n, n_out, dtype=torch.bfloat16, device=stage.place)
            seconds = stage.seconds([partial(exact_matmul, x, w, out, on=stage.on) for w in weights], repeats=2)
            theirs, name = stage.torch_seconds(partial(_all_linear, x, weights)) / len(weights), f"exact_matmul, {n} rows to {n_out}"
            if n <= 128:
                read = 2 * (n_out * n_in + n * (n_in + n_out))
                note = f"cuBLAS {read / theirs / 1e12:.2f}"
                found.rate(name, read / seconds / 1e12, "TB/s", most=copy / 1e12, note=note)
            else:
                operations, note = 2 * n * n_in * n_out, f"cuBLAS {2 * n * n_in * n_out / theirs / 1e12:.0f}"
                found.rate(name, operations / seconds / 1e12, "TFLOP/s", most=product / 1e12, note=note)


def _all_linear(x: Tensor, weights: Sequence[Tensor]) -> None:
    for w in weights:
        linear(x, w)


def _quantized(stage: Stage, found: Found, copy: float) -> None:
    n_out, n_in = stage.size(28672, 64), stage.size(4096, 256)
    for form in (Format.Q4_K, Format.Q8_0) if not stage.rehearse else (Format.Q4_K,):
        one = pack_gguf(form, random_rows(form, n_out, n_in, 1), n_in)
        sets = [one.to(stage.place) for _ in range(stage.size(4, 1))]
        if not stage.rehearse:  # `to` copies: each is memory of its own
            assert len({packed.codes.data_ptr() for packed in sets}) == len(sets)
        for n in (1, 8):
            x, out = stage.normal(n, n_in), torch.empty(n, n_out, dtype=torch.bfloat16, device=stage.place)
            seconds = stage.seconds([partial(quant_matvec, each, x, out, on=stage.on) for each in sets], repeats=4)
            found.rate(f"quant_matvec {form.value}, {n} rows", one.n_bytes / seconds / 1e12, "TB/s", most=copy / 1e12)


def _norm(stage: Stage, found: Found, copy: float) -> None:
    n, width = 64, stage.size(4096, 64)
    x, residual, weight, out = stage.normal(n, width), stage.normal(n, width), stage.normal(width), stage.normal(n, width)
    seconds = stage.seconds([lambda: rms_norm(x, residual, weight, out, eps=1e-5, on=stage.on)], repeats=20)
    found.time(f"rms_norm with residual, {n} rows", 1e6 * seconds, "us", least=1e6 * 4 * 2 * n * width / copy)
