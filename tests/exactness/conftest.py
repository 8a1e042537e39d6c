"""Runners on the real model: the native one at every number of threads, and the reference."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from relay.engine.native.pack import pack_into, packed_size
from relay.engine.native.runner import NativeRunner, native_layout
from relay.engine.reference_runner import ReferenceRunner
from relay.engine.runner import Runner
from relay.kv.layout import KVLayout
from relay.kv.memory import KVMemory
from relay.model.load import load, open_checkpoint, read_spec

Make = Callable[..., Runner]


@pytest.fixture(scope="session")
def packed(smollm2_path: Path) -> Iterator[int]:
    """A memfd of the packed model."""
    import numpy as np

    checkpoint = open_checkpoint(smollm2_path)
    data = np.zeros(packed_size(checkpoint), np.uint8)
    pack_into(checkpoint, data, threads=2)
    fd = os.memfd_create("weights")
    os.write(fd, data.tobytes())
    yield fd
    os.close(fd)


@pytest.fixture(scope="session")
def native(smollm2_path: Path, packed: int) -> Make:
    spec = read_spec(smollm2_path)

    def make(n_blocks: int = 200, threads: int = 2) -> Runner:
        return NativeRunner(KVMemory(native_layout(spec, "bfloat16", n_blocks)), packed, threads=threads)

    return make


@pytest.fixture(scope="session")
def reference(smollm2_path: Path) -> Make:
    torch.set_num_threads(2)
    weights = load(smollm2_path)
    spec = weights.spec

    def make(n_blocks: int = 200, threads: int = 2) -> Runner:
        torch.set_num_threads(threads)
        layout = KVLayout(
            n_layers=spec.n_layers, n_kv_heads=spec.n_kv_heads, head_dim=spec.head_dim, block_tokens=16, dtype="float32", n_blocks=n_blocks
        )
        return ReferenceRunner(KVMemory(layout), weights)

    return make
