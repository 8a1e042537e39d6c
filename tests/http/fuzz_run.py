"""`python -m tests.http.fuzz_run COUNT FIRST`: the long form of test_fuzz."""

import sys
import tempfile
from pathlib import Path

from rich.progress import track

from tests.http.fuzzing import damaged, send, small_config
from tests.running import ROOT, running


def main(count: int, first: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = small_config(ROOT / "configs" / "quickstart.yaml", Path(folder) / "small.yaml")
        with running(config, Path(folder) / "run") as server:
            statuses: dict[int, int] = {}
            for seed in track(range(first, first + count), description="bodies"):
                status = send(server.http, *damaged(seed))
                statuses[status] = statuses.get(status, 0) + 1
            assert server.log().count("worker_died") == 0, server.log()
            server.assert_blocks_come_back()
    sys.stdout.write(f"{count} bodies from seed {first}: " + ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items())) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
