"""A root process for the tests: `python root.py PARENT NAME...` starts those workers, prints their pids, and drains on a signal.

A worker's name is its payload, too. Each rank that begins to drain prints a line.
"""

import sys
from pathlib import Path

import trio

from relay import log
from relay.config import RuntimeConfig
from relay.runtime.run_directory import run_directory
from relay.runtime.supervisor import Supervisor, WorkerSpec

COMMAND = [sys.executable, str(Path(__file__).with_name("hosted.py"))]


def on_event(name: str, /, **fields: str | int | float) -> None:
    if name == "draining":
        print(name, flush=True)


async def main(parent: Path, names: list[str]) -> None:
    with run_directory(parent) as run_dir:
        specs = [WorkerSpec(name, name.encode()) for name in names]
        supervisor = Supervisor(run_dir, specs, RuntimeConfig(silent_s=60.0), COMMAND, on_event)
        async with trio.open_nursery() as signals:
            signals.start_soon(supervisor.drain_on_signal)
            async with trio.open_nursery() as nursery:
                await nursery.start(supervisor.run)
                print(*(row.pid for row in supervisor.table()), flush=True)
            signals.cancel_scope.cancel()


if __name__ == "__main__":
    log.configure("root", level="error", terminal=False)
    trio.run(main, Path(sys.argv[1]), sys.argv[2:])
