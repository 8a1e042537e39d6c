"""Section `kernels`: every kernel against its float64 reference, and rows that keep their bits whatever shares the call."""

import numpy as np
import torch
from torch import Tensor

from relay.gpu_check.paged_kv import Paged, paged
from relay.gpu_check.report import Found
from relay.gpu_check.stage import Stage, relative_error, same_bits
from relay.kernels import exact_matmul, kv_scatter_rope, kv_transfer, paged_decode, paged_prefill, quant_matvec, rms_norm, silu_mul
from relay.kernels.cuda_compiler import Program
from relay.kernels.paged_decode import workspace
from relay.kernels.quant_matvec import Format
from relay.kernels.quant_packing import pack_gguf

TOLERANCE = 6e-3  # of bfloat16 results, in the norm
FLOAT_TOLERANCE = 2e-5
_SCALES = {Format.Q4_0: ((0, 2),), Format.Q4_1: ((0, 2), (2, 4)), Format.Q4_K: ((0, 2), (2, 4)), Format.Q8_0: ((0, 2),)}
_BLOCKS = {Format.Q4_0: (32, 18), Format.Q4_1: (32, 20), Format.Q4_K: (256, 144), Format.Q8_0: (32, 34)}
FORMATS = tuple(_BLOCKS)


def programs() -> tuple[Program, ...]:
    modules = (exact_matmul, kv_scatter_rope, kv_transfer, paged_decode, paged_prefill, quant_matvec, rms_norm, silu_mul)
    every = [program for module in modules for program in module.PROGRAMS]
    wanted = {"ELEMENT": ("bf16",), "HEAD_DIM": ("64", "128"), "FORMAT": tuple(form.value for form in FORMATS), "ACTIVATION": ("silu",)}
    return tuple(program for program in every if all(name not in wanted or value in wanted[name] for name, value in program.macros))


def run(found: Found, rehearse: bool) -> None:
    stage = Stage(programs(), rehearse=rehearse)
    with stage.runtime.computing():
        _matmul(stage, found)
        for form in FORMATS:
            _quantized(stage, found, form)
        for head_dim in (64, 128):
            _attention(stage, found, head_dim)
        _scatter(stage, found)
        _transfer(stage, found)
        _rows(stage, found)


def row_counts(stage: Stage) -> tuple[int, ...]:
    return (1, 7, 17) if stage.rehearse else (1, 2, 7, 8, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 256, 300, 512)


def _right(found: Found, name: str, error: float, limit: float) -> None:
    found.holds(name, error < limit, f"error {error:.1e}")


def _matmul(stage: Stage, found: Found) -> None:
    n_rows, n_out, n_in = stage.size(512, 20), stage.size(1024, 40), stage.size(4096, 72)
    x, w, bias = stage.normal(n_rows, n_in), stage.normal(n_out, n_in), stage.normal(n_out)
    whole = torch.full((n_rows, n_out), torch.nan, device=stage.place)
    exact_matmul.exact_matmul(x, w, whole, bias=bias, on=stage.on)
    stage.runtime.finish()
    _right(found, "exact_matmul", relative_error(whole, exact_matmul.reference(x.cpu(), w.cpu(), bias.cpu())), FLOAT_TOLERANCE)
    same = True
    for n in row_counts(stage):
        some = torch.full((n, n_out), torch.nan, device=stage.place)
        exact_matmul.exact_matmul(x[:n], w, some, bias=bias, on=stage.on)
        stage.runtime.finish()
        same = same and same_bits(some, whole[:n])
    found.holds("exact_matmul: rows keep their bits", same)


def random_rows(form: Format, n_out: int, n_in: int, seed: int) -> np.ndarray:
    """As a file has them: random codes, scales near 1 / 64."""
    inputs, n_bytes = _BLOCKS[form]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n_out, n_in // inputs, n_bytes), dtype=np.uint8)
    for begin, end in _SCALES[form]:
        scales = (rng.random((n_out, n_in // inputs, 1)) / 64 + 1e-3).astype(np.float16)
        blocks[..., begin:end] = scales.view(np.uint8)
    return blocks.reshape(n_out, -1)


def _quantized(stage: Stage, found: Found, form: Format) -> None:
    n_rows, n_out, n_in = stage.size(64, 9), stage.size(1024, 40), stage.size(4096, 256)
    packed = pack_gguf(form, random_rows(form, n_out, n_in, 3), n_in)
    x = stage.normal(n_rows, n_in)
    whole = torch.full((n_rows, n_out), torch.nan, device=stage.place)
    there = packed.to(stage.place)
    quant_matvec.quant_matvec(there, x, whole, on=stage.on)
    stage.runtime.finish()
    _right(found, f"quant_matvec {form.value}", relative_error(whole, quant_matvec.reference(packed, x.cpu())), 3e-3)
    same = True
    for n in row_counts(stage):
        if n <= n_rows:
            some = torch.full((n, n_out), torch.nan, device=stage.place)
            quant_matvec.quant_matvec(there, x[:n], some, on=stage.on)
            stage.runtime.finish()
            same = same and same_bits(some, whole[:n])
    found.holds(f"quant_matvec {form.value}: rows keep their bits", same)


def _attention(stage: Stage, found: Found, head_dim: int) -> None:
    lengths = [1, 33, 300] if stage.rehearse else [1, 33, 300, 1000, 4097]
    kv, n_heads = paged(stage, lengths, 2, head_dim), 8
    q = stage.normal(len(lengths), n_heads, head_dim)
    got = _decode(stage, q, kv)
    there = kv.to_cpu()
    want = paged_decode.reference(q.cpu(), there.keys, there.values, there.table, there.lengths, scale=head_dim**-0.5)
    _right(found, f"paged_decode, heads of {head_dim}", relative_error(got, want), TOLERANCE)
    same = all(same_bits(_decode(stage, q[i : i + 1].clone(), kv.only(i))[0], got[i]) for i in range(len(lengths)))
    found.holds(f"paged_decode, heads of {head_dim}: rows keep their bits", same)
    n = 40  # rows of the longest sequence's end, as a chunk
    rows = stage.normal(n, n_heads, head_dim)
    one = kv.only(len(lengths) - 1)
    chunk = torch.full_like(rows, torch.nan)
    starts = torch.tensor([0, n], dtype=torch.int32, device=stage.place)
    scale = head_dim**-0.5
    paged_prefill.paged_prefill(rows, kv.keys, kv.values, one.table, starts, one.lengths, chunk, n_most=n, scale=scale, on=stage.on)
    stage.runtime.finish()
    want = paged_prefill.reference(
        rows.cpu(), there.keys, there.values, there.table[-1:], starts.cpu(), there.lengths[-1:], scale=head_dim**-0.5
    )
    _right(found, f"paged_prefill, heads of {head_dim}", relative_error(chunk, want), TOLERANCE)
    as_rows = Paged(
        kv.keys,
        kv.values,
        one.table.expand(n, -1).contiguous(),
        (int(one.lengths[0]) - n + 1 + torch.arange(n, dtype=torch.int32)).to(stage.place),
    )
    found.holds(f"paged_prefill, heads of {head_dim}: the bits of paged_decode", same_bits(chunk, _decode(stage, rows, as_rows)))


def _decode(stage: Stage, q: Tensor, kv: Paged) -> Tensor:
    out = torch.full_like(q, torch.nan)
    work = workspace(len(q), q.shape[1], q.shape[2], int(kv.lengths.max()), stage.place)
    paged_decode.paged_decode(q, kv.keys, kv.values, kv.table, kv.lengths, out, work, scale=q.shape[2] ** -0.5, on=stage.on)
    stage.runtime.finish()
    return out


def _scatter(stage: Stage, found: Found) -> None:
    n, n_heads, n_kv_heads, head_dim = stage.size(64, 5), 4, 2, 128
    qkv = stage.normal(n, (n_heads + 2 * n_kv_heads) * head_dim)
    angles = torch.rand(n, head_dim // 2, generator=torch.Generator().manual_seed(2)) * 6
    cos, sin = angles.cos().to(stage.place), angles.sin().to(stage.place)
    positions, sequence = (torch.arange(n, dtype=torch.int32, device=stage.place), torch.zeros(n, dtype=torch.int32, device=stage.place))
    sequence[-1] = -1
    table = torch.arange(-(-n // 16) + 1, dtype=torch.int32, device=stage.place)[None].flip(1).contiguous()
    got, want = ([tensor.bfloat16() for tensor in _outputs(n, n_heads, n_kv_heads, table.shape[1] + 1)] for _ in range(2))
    q, keys, values = (tensor.to(stage.place) for tensor in got)
    kv_scatter_rope.kv_scatter_rope(qkv, cos, sin, positions, sequence, table, q, keys, values, on=stage.on)
    stage.runtime.finish()
    kv_scatter_rope.reference(qkv.cpu(), cos.cpu(), sin.cpu(), positions.cpu(), sequence.cpu(), table.cpu(), *want)
    found.holds("kv_scatter_rope: the reference's bits", all(same_bits(a.cpu(), b) for a, b in zip((q, keys, values), want, strict=True)))


def _outputs(n: int, n_heads: int, n_kv_heads: int, n_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = (torch.zeros(n_blocks, n_kv_heads, 16, 128) for _ in range(2))
    return torch.zeros(n, n_heads, 128), keys, values


def _transfer(stage: Stage, found: Found) -> None:
    words = stage.size(16384, 64)
    generator = torch.Generator().manual_seed(4)
    source, target = (torch.randint(-(2**62), 2**62, (2, 2, n, words), generator=generator) for n in (6, 5))
    blocks, to = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([5, 0, 3], [1, 4, 0]))
    there = [tensor.to(stage.place) for tensor in (source, blocks, target, to)]
    sums = torch.zeros(2, 3, dtype=torch.int64, device=stage.place)
    kv_transfer.kv_transfer(there[0], there[1], there[2], there[3], range(2), sums, on=stage.on)
    stage.runtime.finish()
    want = kv_transfer.reference(source, blocks, target, to, range(2))
    right = np.array_equal(sums.cpu().numpy().view(np.uint64), want) and torch.equal(there[2].cpu(), target)
    found.holds("kv_transfer: blocks and checksums", right)


def _rows(stage: Stage, found: Found) -> None:
    n, width = stage.size(512, 9), stage.size(4096, 72)
    x, residual, weight = stage.normal(n, width), stage.normal(n, width), stage.normal(width)
    want, summed = rms_norm.reference(x.cpu(), residual.cpu(), weight.cpu(), eps=1e-5)
    out = torch.full_like(x, torch.nan)
    rms_norm.rms_norm(x, residual, weight, out, eps=1e-5, on=stage.on)
    gate_up = stage.normal(n, 2 * width)
    gated = torch.full((n, width), torch.nan, dtype=torch.bfloat16, device=stage.place)
    silu_mul.silu_mul(gate_up, gated, on=stage.on)
    stage.runtime.finish()
    _right(found, "rms_norm", relative_error(out, want), TOLERANCE)
    found.holds("rms_norm: the residual's bits", same_bits(residual.cpu(), summed))
    _right(found, "silu_mul", relative_error(gated, silu_mul.reference(gate_up.cpu())), TOLERANCE)
