"""`python -m tests.exactness.more COUNT FIRST`: the long form of the random schedules."""

import os
import sys

import numpy as np
from rich.progress import track

from relay.engine.native.pack import pack_into, packed_size
from relay.engine.native.runner import NativeRunner, native_layout
from relay.kv.memory import KVMemory
from relay.model.load import open_checkpoint, read_spec
from relay.model.source import resolve
from tests.conftest import SMOLLM2, SMOLLM2_SHA256
from tests.exactness.harness import Worker, alone, cases, random_schedule


def main(count: int, first: int) -> None:
    path = resolve(SMOLLM2, sha256=SMOLLM2_SHA256)
    checkpoint, spec, every = open_checkpoint(path), read_spec(path), cases()
    data = np.zeros(packed_size(checkpoint), np.uint8)
    pack_into(checkpoint, data, threads=2)
    fd = os.memfd_create("weights")
    os.write(fd, data.tobytes())

    def make(n_blocks: int = 200, threads: int = 2) -> NativeRunner:
        return NativeRunner(KVMemory(native_layout(spec, "bfloat16", n_blocks)), fd, threads=threads)

    right = alone(make, every)
    pairs = [(Worker(make(n_blocks=120, threads=threads)), Worker(make(n_blocks=90, threads=threads))) for threads in (1, 2)]
    for seed in track(range(first, first + count), description="schedules"):
        random_schedule(seed, pairs, right, every)
    sys.stdout.write(f"{count} random schedules from seed {first}: all bits as alone\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
