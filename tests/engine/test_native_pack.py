"""Packed models: planned, packed by a process of its own into a memfd, mapped by others, and believed in nothing."""

import fcntl
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from relay.engine.native.pack import NOT_COVERED, pack_into, packed_size
from relay.engine.native.packed_model import MAGIC, plan_contents, read_header
from relay.engine.native.shared_mapping import HUGE, SharedMapping
from relay.errors import KernelsUnavailable, ModelError
from relay.kernels.machine_peaks import peaks
from relay.kernels.packed_matmul import Format, read_row
from relay.model.load import open_checkpoint
from tests.engine.native_models import SMALL, checkpoint_of, packed_fd, variant

ROOT = Path(__file__).parent.parent.parent
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def run_packer(path: Path, fd: int) -> "subprocess.CompletedProcess[str]":
    command = (sys.executable, "-m", "relay.engine.native.pack", str(path), str(fd), "2")
    return subprocess.run(command, cwd=ROOT, pass_fds=(fd,), capture_output=True, text=True, check=False)


def memfd() -> int:
    return os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def test_a_process_packs_a_model_and_the_result_can_be_sealed_and_shared(smollm2_path: Path) -> None:
    fd = memfd()
    done = run_packer(smollm2_path, fd)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("packed 96.6 MB")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    checkpoint = open_checkpoint(smollm2_path)
    mapping = SharedMapping(fd)
    contents = read_header(mapping.data)
    assert contents.spec == checkpoint.spec
    assert contents == plan_contents(checkpoint)
    tensor = contents.tensors["layers.7.down"]
    packed = mapping.data[tensor.offset : tensor.offset + tensor.n_bytes]
    expected = np.zeros(packed_size(checkpoint), np.uint8)
    pack_into(checkpoint, expected, threads=1)
    assert np.array_equal(mapping.data[: len(expected)], expected)
    assert len(read_row(packed, Format(tensor.format), tensor.n_out, tensor.n_in, 3)) == 1536
    with pytest.raises(ValueError, match="read-only"):
        mapping.data[0] = 0
    os.close(fd)


def test_a_mapping_lies_where_huge_pages_can(smollm2_path: Path) -> None:
    fd = packed_fd(open_checkpoint(smollm2_path))
    first, second = SharedMapping(fd, writable=True), SharedMapping(fd)
    assert first.address % HUGE == second.address % HUGE == 0
    first.make_huge()
    assert 0 <= first.huge_bytes() <= first.size
    assert first.huge_bytes() % HUGE == 0
    os.close(fd)


def test_the_packer_says_why_it_cannot(tmp_path: Path) -> None:
    fd = memfd()
    missing = run_packer(tmp_path / "none.gguf", fd)
    assert missing.returncode == 1
    assert "none.gguf" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert subprocess.run((sys.executable, "-m", "relay.engine.native.pack"), cwd=ROOT, capture_output=True, check=False).returncode == 2
    os.close(fd)


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"architecture": "mixtral", "n_experts": 2, "n_used": 1}, "Q8_0", "experts"),
        ({"head_dim": 24, "n_heads": 4}, "Q8_0", "heads of width 24"),
        ({"n_heads": 98, "n_kv_heads": 2}, "Q8_0", "49 query heads"),
        ({}, "Q5_K", "is Q5_K"),
    ],
)
def test_what_the_kernels_do_not_cover_is_named(changes: dict[str, object], kind: str, reason: str) -> None:
    checkpoint = checkpoint_of(variant(**{"hidden": 256, **changes}), kind)
    with pytest.raises(KernelsUnavailable, match=reason):
        plan_contents(checkpoint)
    assert NOT_COVERED not in (0, 1, 2)


def test_headers_are_checked_against_their_bytes() -> None:
    checkpoint = checkpoint_of(SMALL, "F16")
    data = np.zeros(packed_size(checkpoint), np.uint8)
    pack_into(checkpoint, data, threads=1)
    assert read_header(data) == plan_contents(checkpoint)
    for wrong in (data[:10], np.zeros(5000, np.uint8), data[: len(data) // 2], np.frombuffer(MAGIC + b"\xff" * 100, np.uint8)):
        with pytest.raises(ModelError, match="pack"):
            read_header(wrong)


def test_tied_heads_are_packed_once() -> None:
    tied = plan_contents(checkpoint_of(variant(tied_embeddings=True), "Q8_0"))
    apart = plan_contents(checkpoint_of(SMALL, "Q8_0"))
    assert "head" not in tied.tensors
    assert apart.n_bytes - tied.n_bytes >= apart.tensors["head"].n_bytes
    ends = sorted((t.offset, t.offset + t.n_bytes) for t in apart.tensors.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(apart), type=type(apart)) == apart


def test_nothing_of_the_native_path_imports_torch() -> None:
    program = (
        "import sys, relay.engine.native.runner, relay.engine.native.pack, relay.kernels.machine_peaks\n"
        "assert 'torch' not in sys.modules and 'trio' not in sys.modules, [name for name in sys.modules if name.count('.') == 0]"
    )
    done = subprocess.run((sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_peaks_are_rates_of_a_machine() -> None:
    found = peaks(threads=1, times=1)
    assert 1e8 < found.bytes_per_s < 1e13
    assert 1e9 < found.wide_ops_per_s < 1e13
    assert 1e9 < found.narrow_ops_per_s < 1e13
