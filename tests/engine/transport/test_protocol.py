"""One protocol over every transport between processes: what is pushed lands, what is stale is refused, and who dies takes nobody along.

An owner and a writer, each a process: through memfds that the root gives, and through handles of device memory, emulated here and of a GPU
where there is one; also where neither reaches the memory of the other, and everything passes through the host.
"""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from relay.engine.cuda.pool import SEAL_BYTES
from relay.kernels.device_runtime import HANDLE_BYTES
from relay.kv.book import BlockBook
from relay.kv.memory import create
from tests.engine.transport.peer import LAYOUT
from tests.running import ROOT

EPOCHS = range(1, 12)
BACKENDS: list[Any] = ["memfd", "emulated", "emulated_far", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda_far"))]


class Process:
    """A peer and what it is told. `fds`: of the memfds that the root made for each epoch."""

    def __init__(self, backend: str, fds: dict[int, int]) -> None:
        command = [sys.executable, "-m", "tests.engine.transport.peer", backend]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, pass_fds=tuple(fds.values())
        )
        self._fds = fds

    def tell(self, do: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if do in ("create", "open"):
            more["fd"] = self._fds.get(more["epoch"], -1)
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the peer ended with {self._process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["answer"]

    def kill(self) -> None:
        """And reap: from here on it is known dead."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Pair:
    """An owner, and a writer with a pool full of numbers."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.fds = {epoch: create(f"pool-{epoch}", LAYOUT.pool_bytes) for epoch in EPOCHS} if backend == "memfd" else {}
        self.owner, self.writer = self.start(), self.new_writer()
        self.epoch = 0

    @property
    def is_emulated(self) -> bool:
        return self.backend.startswith("emulated")

    def start(self) -> Process:
        return Process(self.backend, self.fds)

    def new_writer(self) -> Process:
        writer = self.start()
        writer.tell("create", epoch=99, seed=7)
        return writer

    def new_life(self, owner: Process | None = None) -> dict[str, Any]:
        """The owner's next pool: what a writer needs to open it."""
        self.epoch += 1
        return {"epoch": self.epoch, "handle": (owner or self.owner).tell("create", epoch=self.epoch)}

    def end(self) -> None:
        for process in (self.owner, self.writer):
            process.end()
        for fd in self.fds.values():
            os.close(fd)


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.end()


def test_what_is_pushed_lands_where_it_was_leased_and_its_checksums_agree(pair: Pair) -> None:
    assert pair.writer.tell("open", **pair.new_life()) == "opened"
    before = pair.owner.tell("sums", blocks=[0, 1, 3])
    sums = pair.writer.tell("push", blocks=[5, 0], to=[2, 4])
    assert sums == pair.writer.tell("sums", blocks=[5, 0])
    assert sums == pair.owner.tell("sums", blocks=[2, 4])
    assert pair.owner.tell("sums", blocks=[0, 1, 3]) == before
    assert pair.writer.tell("push", blocks=[], to=[]) == [[]] * LAYOUT.n_layers


def test_more_than_there_is_room_for_on_the_way_arrives_whole(pair: Pair) -> None:
    """Twice over: what was there before is not lost, nor taken for what comes."""
    pair.writer.tell("open", **pair.new_life())
    for blocks, to in (([0, 1, 2, 3, 4, 5, 6], [11, 9, 7, 5, 3, 1, 0]), ([7, 8, 9, 10, 11], [2, 4, 6, 8, 10])):
        sums = pair.writer.tell("push", blocks=blocks, to=to)
        assert sums == pair.writer.tell("sums", blocks=blocks) == pair.owner.tell("sums", blocks=to)
        assert len({value for row in sums for value in row}) == LAYOUT.n_layers * len(blocks)


def test_a_pool_is_opened_once_and_closed_when_its_life_ends(pair: Pair) -> None:
    life = pair.new_life()
    assert pair.writer.tell("open", **life) == "opened"
    assert pair.writer.tell("open", **life) == "the same"
    pair.writer.tell("close", epoch=life["epoch"])
    assert pair.writer.tell("open", **life) == "opened"
    assert pair.writer.tell("open_own", epoch=99)


def test_a_push_of_an_old_life_lands_where_nobody_reads(pair: Pair) -> None:
    old = pair.new_life()
    pair.writer.tell("open", **old)
    new = pair.new_life()
    before = pair.owner.tell("sums", blocks=list(range(LAYOUT.n_blocks)))
    pair.writer.tell("push", blocks=[1], to=[1])
    assert pair.owner.tell("sums", blocks=list(range(LAYOUT.n_blocks))) == before
    assert pair.writer.tell("open", **new) == "opened"
    assert pair.writer.tell("push", blocks=[1], to=[1]) == pair.owner.tell("sums", blocks=[1])


def test_a_bit_that_flips_in_the_owners_pool_is_found(pair: Pair) -> None:
    pair.writer.tell("open", **pair.new_life())
    sums = pair.writer.tell("push", blocks=[2, 3], to=[6, 7])
    pair.owner.tell("flip", block=7)
    found = pair.owner.tell("sums", blocks=[6, 7])
    assert [row[0] for row in found] == [row[0] for row in sums]
    assert found[0][1] != sums[0][1]
    assert [row[1] for row in found[1:]] == [row[1] for row in sums[1:]]


def test_a_writer_that_dies_midway_leaves_its_lease_in_quarantine_until_it_is_known_dead(pair: Pair) -> None:
    life, book = pair.new_life(), BlockBook(LAYOUT.n_blocks)
    lease = book.lease(10)
    assert lease is not None
    doomed = pair.new_writer()
    doomed.tell("open", **life)
    whole = doomed.tell("sums", blocks=[1, 2])
    assert doomed.tell("push", blocks=[1, 2], to=lease[:2], layers=2) is None
    book.quarantine(lease)
    assert book.lease(3) is None
    assert pair.owner.tell("sums", blocks=lease[:2]) != whole
    doomed.kill()
    book.free(lease)
    again = book.lease(12)
    assert again is not None
    pair.writer.tell("open", **life)
    assert pair.writer.tell("push", blocks=[3, 4], to=again[:2]) == pair.owner.tell("sums", blocks=again[:2])
    assert book.counts().audit() == ""


def test_a_writer_outlives_the_owner_of_what_it_has_open(pair: Pair) -> None:
    owner = pair.start()
    life = pair.new_life(owner)
    pair.writer.tell("open", **life)
    pair.writer.tell("push", blocks=[0], to=[0])
    owner.kill()
    pair.writer.tell("push", blocks=[1], to=[1])  # before it hears of it
    pair.writer.tell("close", epoch=life["epoch"])
    if pair.backend != "memfd":  # whose descriptor the root has
        assert pair.writer.tell("open", **life) == "refused"
    next_life = pair.new_life()
    assert pair.writer.tell("open", **next_life) == "opened"
    assert pair.writer.tell("push", blocks=[1], to=[1]) == pair.owner.tell("sums", blocks=[1])


# --- what holds for handles only


with_handles = pytest.mark.parametrize("pair", BACKENDS[1:], indirect=True)


@with_handles
def test_a_handle_of_another_epoch_is_refused_and_so_is_one_that_lies_about_it(pair: Pair) -> None:
    life = pair.new_life()
    handle, offset, n_bytes, epoch, nonce, _ = life["handle"]
    assert pair.writer.tell("open", epoch=epoch + 1, handle=life["handle"]) == "refused"
    assert pair.writer.tell("open", epoch=epoch + 1, handle=[handle, offset, n_bytes, epoch + 1, nonce]) == "refused"
    assert pair.writer.tell("open", epoch=epoch, handle=[handle, offset, n_bytes, epoch, nonce + 1]) == "refused"
    assert pair.writer.tell("open", epoch=epoch, handle=None) == "refused"
    assert pair.writer.tell("open", **life) == "opened"


@with_handles
def test_a_handle_names_the_whole_allocation_and_where_the_pool_begins_is_told_beside_it(pair: Pair) -> None:
    handle, offset, n_bytes, *_ = pair.new_life()["handle"]
    assert len(base64.b64decode(handle)) == HANDLE_BYTES
    assert (offset, n_bytes) == (SEAL_BYTES, LAYOUT.pool_bytes)
    with pytest.raises(ValueError, match="does not hold blocks"):
        pair.writer.tell("open", epoch=pair.epoch, handle=[handle, 0, n_bytes, pair.epoch, 0])


@with_handles
def test_what_was_freed_opens_no_more_and_emulated_is_garbage_where_it_is_still_mapped(pair: Pair) -> None:
    life = pair.new_life()
    pair.writer.tell("open", **life)
    pair.owner.tell("free")
    if pair.is_emulated:
        assert pair.writer.tell("word") == hex((1 << 64) - 1)
    pair.writer.tell("close", epoch=life["epoch"])
    assert pair.writer.tell("open", **life) == "refused"


@with_handles
def test_a_process_does_not_open_its_own_handles(pair: Pair) -> None:
    life = pair.new_life()
    if pair.is_emulated:
        with pytest.raises(ValueError, match="of this process"):
            pair.owner.tell("open", **life)
    else:
        assert pair.owner.tell("open", **life) == "refused"


@with_handles
def test_bytes_that_are_no_handle_are_refused(pair: Pair) -> None:
    wrong = base64.b64encode(bytes(HANDLE_BYTES)).decode()
    given = {"epoch": 77, "handle": [wrong, SEAL_BYTES, LAYOUT.pool_bytes, 77, 0]}
    if pair.is_emulated:
        with pytest.raises(ValueError, match="no handle"):
            pair.writer.tell("open", **given)
    else:
        assert pair.writer.tell("open", **given) == "refused"


@pytest.mark.parametrize("pair", ["emulated_far"], indirect=True)
def test_what_is_out_of_reach_is_touched_from_its_own_device_only(pair: Pair) -> None:
    """Or the emulator would not show that a GPU without peer access takes the way round."""
    pair.writer.tell("open", **pair.new_life())
    with pytest.raises(ValueError, match="memory of a device that its own does not reach"):
        pair.writer.tell("push_straight", blocks=[1], to=[1])
    assert pair.writer.tell("push", blocks=[1], to=[1]) == pair.owner.tell("sums", blocks=[1])
