"""Packs a model for the native kernels into a memfd, once for all workers of a host:

    python -m relay.engine.native.pack MODEL_PATH FD [THREADS]

FD is an empty memfd, inherited and open for writing; it is given its size, filled, and left unsealed: whoever made it seals it once this
process has ended (a seal against writing needs that nobody maps it to write). Ends with status 0, or with one line on standard error and
status 1 (a model that is not sound) or 3 (one that the kernels do not cover: the reference can serve it).

The pages are made huge where the kernel allows it: asked for before they are filled, and collapsed afterwards.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.engine.native.packed_model import Contents, plan_contents, write_header
from relay.engine.native.shared_mapping import SharedMapping
from relay.errors import KernelsUnavailable, RelayError
from relay.kernels.packed_matmul import GROUP, Format
from relay.kernels.weight_packing import pack
from relay.model.checkpoint import Checkpoint
from relay.model.load import open_checkpoint

NOT_COVERED: Final = 3
_GROUPS_AT_ONCE: Final = 64


def packed_size(checkpoint: Checkpoint) -> int:
    """Bytes of the packed model. Raises KernelsUnavailable."""
    return plan_contents(checkpoint).n_bytes


def pack_into(checkpoint: Checkpoint, to: NDArray[np.uint8], *, threads: int) -> None:
    """to: uint8 [packed_size], zeros. Raises KernelsUnavailable."""
    contents = plan_contents(checkpoint)
    write_header(contents, to)
    with ThreadPoolExecutor(threads) as several:
        for _ in several.map(lambda job: job(), _jobs(checkpoint, contents, to)):
            pass


def _jobs(checkpoint: Checkpoint, contents: Contents, to: NDArray[np.uint8]) -> Iterator["_Job"]:
    for name, tensor in contents.tensors.items():
        place = to[tensor.offset : tensor.offset + tensor.n_bytes]
        if tensor.format < 0:
            place.view(np.float32)[: tensor.n_out] = checkpoint.vector(name)
            continue
        matrix = checkpoint.matrix(name)
        rows = np.ascontiguousarray(matrix.rows)
        n_groups = -(-tensor.n_out // GROUP)
        for first in range(0, n_groups, _GROUPS_AT_ONCE):
            yield _Job(Format(tensor.format), rows, tensor.n_in, place, first, min(_GROUPS_AT_ONCE, n_groups - first))


class _Job:
    """Some groups of one matrix."""

    def __init__(self, kind: Format, rows: NDArray[np.uint8], n_in: int, place: NDArray[np.uint8], first: int, n: int) -> None:
        self._kind, self._rows, self._n_in, self._place, self._first, self._n = kind, rows, n_in, place, first, n

    def __call__(self) -> None:
        pack(self._kind, self._rows, self._n_in, self._place, first=self._first, n=self._n)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    path, fd = Path(arguments[0]), int(arguments[1])
    threads = int(arguments[2]) if len(arguments) == 3 else len(os.sched_getaffinity(0))
    try:
        checkpoint = open_checkpoint(path)
        size = packed_size(checkpoint)
        os.ftruncate(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        mapping = SharedMapping(fd, writable=True)
        pack_into(checkpoint, mapping.data[:size], threads=threads)
        mapping.make_huge()
        print(f"packed {size / 1e6:.1f} MB, {mapping.huge_bytes() / 1e6:.1f} MB of it in huge pages")
    except KernelsUnavailable as error:
        print(error, file=sys.stderr)
        return NOT_COVERED
    except (RelayError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
