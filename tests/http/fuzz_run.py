"""`python -m tests.http.fuzz_run COUNT FIRST [MODEL]`: the long form of test_fuzz, eight bodies at a time."""

import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import track

from tests.http.fuzzing import damaged, send, small_config
from tests.running import ROOT, running


def main(count: int, first: int, model: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = small_config(ROOT / "configs" / "quickstart.yaml", Path(folder) / "small.yaml", model)
        with running(config, Path(folder) / "run") as server, ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda seed: send(server.http, *damaged(seed)), range(first, first + count))
            statuses = Counter(track(answers, total=count, description="bodies"))
            assert server.log().count("worker_died") == 0, server.log()
            assert "defect" not in server.log(), server.log()
            server.assert_blocks_come_back()
    sys.stdout.write(f"{count} bodies from seed {first}: " + ", ".join(f"{n} x {status}" for status, n in sorted(statuses.items())) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
