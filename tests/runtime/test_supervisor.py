"""Real processes: deaths are seen, restarted, fenced; questions get one answer; nothing is left behind, whoever dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from relay.config import RuntimeConfig
from relay.errors import StartError, TooManyRestarts
from relay.runtime.asks import Handler
from relay.runtime.frames import Answers
from relay.runtime.peers import socket_name
from relay.runtime.run_directory import run_directory
from relay.runtime.supervisor import Supervisor, WorkerSpec

HERE = Path(__file__).parent
COMMAND = [sys.executable, str(HERE / "hosted.py")]
Value = str | int | float


class Server:
    """A running supervisor, what it told of itself, and questions to its workers."""

    def __init__(self, run_dir: Path, specs: list[WorkerSpec], settings: RuntimeConfig, on_ask: Handler | None) -> None:
        self.run_dir = run_dir
        self.supervisor = Supervisor(run_dir, specs, settings, COMMAND, self._on_event, on_ask)
        self.events: list[dict[str, Value]] = []
        self._changed = trio.Event()
        self.tasks: trio.Nursery
        self.at_event: Callable[[Path, dict[str, Value]], None] = lambda run_dir, event: None

    def _on_event(self, name: str, /, **fields: Value) -> None:
        self.events.append({"event": name, **fields})
        self.at_event(self.run_dir, self.events[-1])
        self._changed.set()
        self._changed = trio.Event()

    async def changed(self) -> None:
        """Until the next event."""
        await self._changed.wait()

    async def event(self, **fields: Value) -> dict[str, Value]:
        """The first event with these fields, past or to come."""
        while True:
            for event in self.events:
                if fields.items() <= event.items():
                    return event
            await self.changed()

    async def tell(self, worker: str, kind: str, argument: str = "") -> str:
        """What that one worker says; raises KeyError if it was silent."""
        answers = await self.supervisor.ask(kind, f"{worker} {argument}".encode(), 20.0)
        return answers.answers[worker].decode()

    def pid(self, worker: str) -> int:
        (pid,) = [row.pid for row in self.supervisor.table() if row.worker == worker]
        assert pid is not None
        return pid

    def epochs(self) -> dict[str, int]:
        return {row.worker: row.epoch for row in self.supervisor.table()}


def serve(
    parent: Path,
    specs: list[WorkerSpec],
    scenario: Callable[[Server], Awaitable[None]] | None,
    *,
    on_ask: Handler | None = None,
    silent_s: float = 60.0,
    hang_s: float = 60.0,
    link_deadline_s: float = 60.0,
    max_restarts: int = 10,
    at_event: Callable[[Path, dict[str, Value]], None] | None = None,
) -> Server:
    """Run a scenario on a server that is up, then drain it; without a scenario, until the server ends."""
    settings = RuntimeConfig(
        heartbeat_s=0.05,
        silent_s=silent_s,
        hang_s=hang_s,
        link_deadline_s=link_deadline_s,
        max_restarts=max_restarts,
        first_backoff_s=0.01,
    )

    async def main() -> Server:
        with trio.fail_after(30), run_directory(parent) as run_dir:
            server = Server(run_dir, specs, settings, on_ask)
            server.at_event = at_event or server.at_event
            if scenario is None:
                await server.supervisor.run()
            else:
                async with trio.open_nursery() as nursery:
                    await nursery.start(server.supervisor.run)
                    server.tasks = nursery
                    await scenario(server)
                    await server.supervisor.drain(10.0)
                ended = {row.worker: (row.state, row.last_death) for row in server.supervisor.table()}
                assert list(ended.values()) == [("ended", "drained")] * len(specs)
            return server

    server = trio.run(main)
    assert not list(parent.iterdir())
    return server


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def names(*workers: str) -> list[WorkerSpec]:
    return [WorkerSpec(worker) for worker in workers]


def test_workers_hear_of_each_other_and_exchange_messages(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        for me, other in (("a", "b"), ("b", "a")):
            assert f"up probe/{other}@1" in await server.tell(me, "saw", f"up probe/{other}@1")
            await server.tell(me, "post", f"probe/{other}@1")
            await server.tell(me, "saw", f"returned probe/{other}@1")
        for garbage in (b"\xff\xff\xff\xff", b"\x05\x00\x00\x00hello", b"\x00\x00\x00\x00"):
            assert await bytes_of_answer(server.run_dir, socket_name("b", 1), garbage) == b"", "the connection is closed"
        await server.tell("b", "post", "probe/b@1")
        await server.tell("b", "saw", "returned probe/b@1")
        for number in (signal.SIGTERM, signal.SIGINT):  # a service manager sends it to all; the root alone knows the order
            os.kill(server.pid("b"), number)
        await server.tell("b", "post", "probe/b@1")
        assert server.epochs() == {"a": 1, "b": 1}, "neither garbage nor a signal ends a worker"

    serve(tmp_path, names("a", "b"), scenario)


async def bytes_of_answer(folder: Path, name: str, garbage: bytes) -> bytes | bytearray:
    folder_fd = os.open(folder, os.O_PATH)
    async with await trio.open_unix_socket(f"/proc/self/fd/{folder_fd}/{name}") as stream:
        os.close(folder_fd)
        await stream.send_all(garbage)
        with trio.fail_after(60):
            return await stream.receive_some()


def test_a_killed_worker_is_back_with_the_next_epoch_and_everyone_knows(tmp_path: Path) -> None:
    kills = 2

    async def scenario(server: Server) -> None:
        for epoch in range(1, kills + 1):
            await server.tell("a", "saw", f"up probe/b@{epoch}")
            os.kill(server.pid("b"), signal.SIGKILL)
            await server.tell("a", "saw", f"down probe/b@{epoch} SIGKILL")
            await server.event(event="worker_ready", worker="b", epoch=epoch + 1)
        await server.tell("b", "saw", "up probe/a@1")
        await server.tell("b", "post", "probe/a@1")
        await server.tell("b", "saw", "returned probe/a@1")
        assert server.epochs() == {"a": 1, "b": kills + 1}
        assert len([event for event in server.events if event["event"] == "worker_died"]) == kills

    serve(tmp_path, names("a", "b"), scenario)


def test_an_announced_kill_does_not_count_towards_the_intensity(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        assert server.supervisor.kill("a", "chaos")
        await server.event(event="worker_died", worker="a", epoch=1, reason="chaos")
        assert not server.supervisor.kill("a")
        assert not server.supervisor.kill("nobody")
        await server.event(event="worker_ready", worker="a", epoch=2)

    serve(tmp_path, names("a"), scenario, max_restarts=0)


def test_a_worker_that_was_never_ready_is_not_tried_for_ever(tmp_path: Path) -> None:
    """However many restarts the config allows."""
    with pytest.raises(StartError, match=r"worker a died 4 times before it was ever ready; the last time: ValueError: boom while loading"):
        serve(tmp_path, [WorkerSpec("a", b"crash")], None, max_restarts=100_000)


def test_a_recycled_worker_comes_back_and_holds_up_no_end(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        assert server.supervisor.recycle("a", 1000.0)
        await server.event(event="worker_died", worker="a", epoch=1, reason="drained")
        await server.event(event="worker_ready", worker="a", epoch=2)

    serve(tmp_path, names("a", "b"), scenario)  # fails if it takes 30 s


def test_a_stopped_worker_is_killed_after_its_silence(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        os.kill(server.pid("a"), signal.SIGSTOP)
        died = await server.event(event="worker_died", epoch=1)
        assert str(died["reason"]).startswith("silent for ")
        await server.event(event="worker_ready", epoch=2)

    serve(tmp_path, names("a"), scenario, silent_s=1.0)


def test_a_worker_that_computes_is_not_killed_for_its_silence_unless_it_never_ends(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        assert await server.tell("a", "spin", "2.5") == "done"
        assert server.epochs() == {"a": 1}
        server.tasks.start_soon(server.supervisor.ask, "spin", b"a 600", 20.0)
        died = await server.event(event="worker_died", epoch=1)
        assert str(died["reason"]).startswith("silent for "), died
        await server.event(event="worker_ready", epoch=2)

    serve(tmp_path, names("a"), scenario, silent_s=0.6)


@pytest.mark.parametrize("takes_long_to_exit", [False, True])
def test_an_actors_exception_is_the_reason_its_watchers_are_told(tmp_path: Path, takes_long_to_exit: bool) -> None:
    """A process that has said its last words and does not exit is killed by us: not by somebody, nor for want of memory."""

    async def scenario(server: Server) -> None:
        await server.tell("a", "saw", "up probe/b@1")
        if takes_long_to_exit:
            await server.tell("b", "linger")
        await server.supervisor.ask("crash", b"b a negative number", 20.0)  # whether it still says "done" is left to chance
        assert "down probe/b@1 ValueError: a negative number" in (await server.tell("a", "saw", "down")).splitlines()
        await server.event(event="worker_ready", worker="b", epoch=2)
        assert server.epochs() == {"a": 1, "b": 2}

    serve(tmp_path, names("a", "b"), scenario)


def test_a_step_that_does_not_end_is_a_hang_though_heartbeats_go_on(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.tell("a", "hang")
        died = await server.event(event="worker_died", epoch=1)
        assert str(died["reason"]).startswith("hung: the step after 17 ")
        await server.event(event="worker_ready", epoch=2)

    serve(tmp_path, names("a"), scenario, hang_s=5.0)


def board_of(*requests: str, lone: bool = True) -> Callable[[], tuple[tuple[str, ...], bool]]:
    return lambda: (requests, lone)


def test_whoever_was_in_a_step_that_hung_is_suspected_and_alone_convicted(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        await server.tell("a", "hang")
        assert "suspects r1 alone" in await server.tell("b", "saw", "down probe/a@1 hung")
        await server.event(event="worker_ready", worker="a", epoch=2)

    serve(tmp_path, [WorkerSpec("a", suspects=board_of("r1")), WorkerSpec("b")], scenario, hang_s=5.0)


def test_a_silent_worker_makes_suspects_and_convicts_nobody_at_once(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        os.kill(server.pid("a"), signal.SIGSTOP)
        seen = await server.tell("b", "saw", "down probe/a@1 silent")
        assert "suspects r1" in seen
        assert "alone" not in seen
        await server.event(event="worker_ready", worker="a", epoch=2)

    serve(tmp_path, [WorkerSpec("a", suspects=board_of("r1")), WorkerSpec("b")], scenario, silent_s=5.0)


@pytest.mark.parametrize(("number", "convicts"), [(signal.SIGKILL, 3), (signal.SIGABRT, 1)])
def test_only_the_third_kill_from_outside_convicts_but_the_first_crash(tmp_path: Path, number: signal.Signals, convicts: int) -> None:
    async def scenario(server: Server) -> None:
        for epoch in range(1, convicts + 1):
            await server.event(event="worker_ready", worker="a", epoch=epoch)
            os.kill(server.pid("a"), number)
            seen = await server.tell("b", "saw", f"down probe/a@{epoch}")
            (line,) = [line for line in seen.splitlines() if line.startswith(f"down probe/a@{epoch} ")]
            assert line.endswith("suspects r1 alone" if epoch == convicts else "suspects r1"), line
        await server.event(event="worker_ready", worker="a", epoch=convicts + 1)

    serve(tmp_path, [WorkerSpec("a", suspects=board_of("r1")), WorkerSpec("b")], scenario)


def test_a_death_that_was_asked_for_makes_no_suspects(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        assert server.supervisor.kill("a", "chaos")
        assert "suspects" not in await server.tell("b", "saw", "down probe/a@1 chaos")
        await server.event(event="worker_ready", worker="a", epoch=2)

    serve(tmp_path, [WorkerSpec("a", suspects=board_of("r1")), WorkerSpec("b")], scenario)


def test_a_worker_that_keeps_dying_fails_the_server_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TooManyRestarts, match=r"worker a died 2 times .* ValueError: boom while loading"):
        serve(tmp_path, [WorkerSpec("a", b"crash")], None, max_restarts=1)
    assert not list(tmp_path.iterdir())


def test_a_worker_that_keeps_dying_rests_while_another_has_its_role_in_reserve(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        os.kill(server.pid("a"), signal.SIGKILL)
        rests = await server.event(event="worker_rests", worker="a")
        assert "worker a died 1 times in 60 s, the last time of: SIGKILL" in str(rests["reason"])
        assert server.supervisor.resting() == ("a",)
        assert [(row.worker, row.state) for row in server.supervisor.table()] == [("a", "resting"), ("b", "up")]
        await server.event(event="worker_ready", worker="a", epoch=2)
        assert server.supervisor.resting() == ()

    serve(tmp_path, [WorkerSpec("a", roles=("x",)), WorkerSpec("b", roles=("y",), reserve=("x",))], scenario, max_restarts=0)


def test_the_server_ends_when_a_role_is_left_to_nobody_and_lets_streams_end_first(tmp_path: Path) -> None:
    """`a` rests, so that `b` was the only one with the role; the one that drains first is told to cut short what it has."""

    async def scenario(server: Server) -> None:
        os.kill(server.pid("a"), signal.SIGKILL)
        await server.event(event="worker_rests", worker="a")
        os.kill(server.pid("b"), signal.SIGKILL)
        await trio.sleep_forever()

    specs = [WorkerSpec("a", roles=("x",), drain_rank=1), WorkerSpec("b", roles=("x",), drain_rank=1), WorkerSpec("gate", b"hurried")]
    events: list[dict[str, Value]] = []
    with pytest.RaisesGroup(pytest.RaisesExc(TooManyRestarts, match="worker b died 1 times"), flatten_subgroups=True, allow_unwrapped=True):
        serve(tmp_path, specs, scenario, max_restarts=0, at_event=lambda run_dir, event: events.append(event))
    assert [event["reason"] for event in events if event["event"] == "worker_died" and event["worker"] == "gate"] == ["drained"]


def test_a_worker_that_can_never_start_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="worker a cannot start: the model is not one that is served") as caught:
        serve(tmp_path, [WorkerSpec("a", b"refuse")], None, max_restarts=10)
    assert not isinstance(caught.value, TooManyRestarts)


def start_root(parent: Path, *workers: str) -> tuple["subprocess.Popen[str]", list[int]]:
    root = subprocess.Popen([sys.executable, str(HERE / "root.py"), str(parent), *workers], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    lines = [root.stdout.readline() for _ in range(1 + workers.count("block"))]
    (pids,) = [line for line in lines if line != "blocked\n"]
    return root, [int(pid) for pid in pids.split()]


def test_no_orphans_when_the_root_is_killed_even_of_workers_that_cannot_notice(tmp_path: Path) -> None:
    root, pids = start_root(tmp_path, "block", "stay")
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGSTOP)
    root.kill()
    root.wait()  # not communicate: an orphan would keep the pipe open
    assert root.stdout is not None
    root.stdout.close()

    async def all_gone() -> None:
        with trio.fail_after(60):
            while not all(map(gone, pids)):
                await trio.sleep(0.01)

    try:
        trio.run(all_gone)
    finally:
        for pid in pids:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
    with run_directory(tmp_path) as run_dir:
        assert list(tmp_path.iterdir()) == [run_dir], "the killed root's directory is swept at the next start"
    assert not list(tmp_path.iterdir())


def test_sigterm_drains_and_leaves_nothing(tmp_path: Path) -> None:
    root, pids = start_root(tmp_path, "a")
    root.terminate()
    assert root.communicate(timeout=120)[0] == "draining\n"
    assert root.returncode == 0
    assert len(pids) == 1
    assert all(map(gone, pids))
    assert not list(tmp_path.iterdir())


def test_a_second_signal_does_not_wait_for_the_drain(tmp_path: Path) -> None:
    root, pids = start_root(tmp_path, "stay")
    root.terminate()
    assert root.stdout is not None
    assert root.stdout.readline() == "draining\n"
    root.terminate()
    root.communicate(timeout=120)
    assert root.returncode == 0
    assert len(pids) == 1
    assert all(map(gone, pids))
    assert not list(tmp_path.iterdir())


def test_ranks_drain_in_order_with_their_last_words_and_who_stays_is_killed_at_the_deadline(tmp_path: Path) -> None:
    specs = [WorkerSpec("engine", b"stay", drain_rank=1), WorkerSpec("gateway", b"bye probe/engine@1", drain_rank=0)]

    async def main() -> list[dict[str, Value]]:
        with trio.fail_after(30), run_directory(tmp_path) as run_dir:
            server = Server(run_dir, specs, RuntimeConfig(silent_s=60.0), None)
            async with trio.open_nursery() as nursery:
                await nursery.start(server.supervisor.run)
                await server.tell("gateway", "saw", "up probe/engine@1")
                nursery.start_soon(server.supervisor.drain, 4.0)
                await server.event(event="worker_died", worker="gateway")
                await server.tell("engine", "saw", "revoke")
            return server.events

    died = [(event["worker"], event["reason"]) for event in trio.run(main) if event["event"] == "worker_died"]
    assert died == [("gateway", "drained"), ("engine", "did not drain in time")]


def test_a_rank_that_does_not_drain_yet_is_restarted_still(tmp_path: Path) -> None:
    specs = [WorkerSpec("gateway", b"stay", drain_rank=0), WorkerSpec("engine", drain_rank=1)]

    async def main() -> Server:
        with trio.fail_after(30), run_directory(tmp_path) as run_dir:
            server = Server(run_dir, specs, RuntimeConfig(silent_s=60.0), None)
            async with trio.open_nursery() as nursery:
                await nursery.start(server.supervisor.run)
                nursery.start_soon(server.supervisor.drain, 20.0)
                await server.event(event="draining", workers="gateway")
                os.kill(server.pid("engine"), signal.SIGKILL)
                await server.event(event="worker_ready", worker="engine", epoch=2)
                os.kill(server.pid("gateway"), signal.SIGKILL)
            return server

    assert trio.run(main).epochs() == {"gateway": 1, "engine": 2}


def test_descriptors_reach_the_worker_and_its_peers_anew_with_each_epoch(tmp_path: Path) -> None:
    fds: dict[int, int] = {}

    def pool(epoch: int) -> dict[str, int]:
        fds[epoch] = os.memfd_create(f"pool {epoch}")
        os.write(fds[epoch], f"pool {epoch}".encode())
        return {"pool": fds[epoch], "private": fds[epoch]}

    async def scenario(server: Server) -> None:
        for epoch in (1, 2):
            assert await server.tell("b", "fd", "pool") == f"['pool', 'private'] pool {epoch}"
            await server.tell("a", "saw", f"up probe/b@{epoch}")
            assert await server.tell("a", "fd", f"probe/b@{epoch} pool") == f"['pool'] pool {epoch}"
            server.supervisor.kill("b")
            await server.tell("a", "saw", f"down probe/b@{epoch}")
            assert await server.tell("a", "fd", f"probe/b@{epoch} pool") == "[] "
            await server.event(event="worker_ready", worker="b", epoch=epoch + 1)
        held = [os.readlink(path) for path in Path(f"/proc/{server.pid('a')}/fd").iterdir()]
        assert [link for link in held if "pool" in link] in ([], ["/memfd:pool 3 (deleted)"]), "those of the dead are closed"
        server.supervisor.kill("a")
        await server.event(event="worker_ready", worker="a", epoch=2)
        await server.tell("a", "saw", "up probe/b@3")
        assert await server.tell("a", "fd", "probe/b@3 pool") == "['pool'] pool 3", "a newcomer gets those of the living"

    serve(tmp_path, [WorkerSpec("a"), WorkerSpec("b", fds=pool, share=("pool",))], scenario)
    for fd in fds.values():
        os.close(fd)  # still ours


def test_a_question_gets_one_answer_of_the_whole_server_which_names_the_silent(tmp_path: Path) -> None:
    asked: list[str] = []

    async def ourselves(kind: str, body: bytes) -> bytes | None:
        asked.append(kind)
        if kind == "fail":
            raise RuntimeError("the root's handler is broken")
        return b"root" if kind != "saw" else None

    async def scenario(server: Server) -> None:
        ask = server.supervisor.ask
        await server.tell("a", "saw", "up probe/b@1")
        assert (await ask("post", b"* probe/b@1", 20.0)).answers == {"a": b"done", "b": b"done", "supervisor": b"root"}
        silent = await ask("mute", b"b", 1.0)
        assert (silent.answers, silent.silent) == ({"supervisor": b"root"}, ("b",))
        failed = await ask("fail", b"a", 20.0)
        assert (failed.answers, failed.silent) == ({}, ("a", "supervisor"))
        admin = await ask("admin.fail", b"*", 20.0)
        assert (admin.answers, admin.silent) == ({"supervisor": b"root"}, ())
        from_worker = msgspec.json.decode(await server.tell("a", "ask", "hang b"), type=Answers)
        assert (from_worker.answers, from_worker.silent) == ({"b": b"done", "supervisor": b"root"}, ())
        assert asked == ["saw", "post", "mute", "fail", "admin.fail", "ask", "hang"]
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(named_silent_at_its_death, server, "b")
                await wait_all_tasks_blocked(0.01)
                server.supervisor.kill("b")
        while_down = await ask("post", b"a probe/a@1", 20.0)
        assert (while_down.answers["a"], while_down.silent) == (b"done", ("b",)), "who is just starting is named too"
        await server.event(event="worker_ready", worker="b", epoch=2)

    serve(tmp_path, names("a", "b"), scenario, on_ask=ourselves)


async def named_silent_at_its_death(server: Server, worker: str) -> None:
    assert (await server.supervisor.ask("mute", worker.encode(), 50.0)).silent == (worker,)


def test_a_link_that_stays_cut_between_two_living_workers_ends_one_of_them(tmp_path: Path) -> None:
    async def scenario(server: Server) -> None:
        assert str((await server.event(event="worker_died", worker="b", epoch=1))["reason"]).startswith("not reached by a ")
        await server.event(event="worker_ready", worker="b", epoch=2)
        await server.tell("a", "saw", "up probe/b@2")
        await server.tell("a", "post", "probe/b@2")
        await server.tell("a", "saw", "returned probe/b@2")
        assert server.epochs() == {"a": 1, "b": 2}

    def hide(run_dir: Path, event: dict[str, Value]) -> None:
        if event["event"] == "worker_ready" and event["worker"] == "b" and event["epoch"] == 1:
            (run_dir / socket_name("b", 1)).unlink()  # its peer has not been told of it yet

    serve(tmp_path, names("a", "b"), scenario, link_deadline_s=1.0, at_event=hide)


def test_a_worker_that_cannot_even_be_executed_counts_as_dying(tmp_path: Path) -> None:
    async def main() -> None:
        with run_directory(tmp_path) as run_dir:
            await Supervisor(run_dir, names("a"), RuntimeConfig(max_restarts=1), ["/nonexistent/python"]).run()

    with pytest.raises(TooManyRestarts, match="cannot be started"):
        trio.run(main)


@pytest.mark.parametrize("wrong", [("a", "a"), ("a/b",), ("",)])
def test_worker_names_that_cannot_be_are_refused(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    with pytest.raises(StartError):
        Supervisor(tmp_path, names(*wrong), RuntimeConfig(), COMMAND)
