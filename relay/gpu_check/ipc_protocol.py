"""Section `ipc`: the transport's protocol suite over handles of real device memory: two processes, kills, free while open. Needs pytest
and a checkout with its tests."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

from relay.gpu_check.report import Found, Skip

ROOT = Path(__file__).resolve().parent.parent.parent
SUITE = ROOT / "tests" / "engine" / "transport"


def run(found: Found, rehearse: bool) -> None:
    if not SUITE.is_dir():
        raise Skip(f"{SUITE} is not there: it needs a checkout")
    for name in ("pytest", "msgspec", "httpx"):
        importlib.import_module(name)
    which = ["-m", "not gpu", "-k", "emulated"] if rehearse else ["-m", "gpu"]
    command = [sys.executable, "-m", "pytest", "--noconftest", "-v", "-p", "no:cacheprovider", *which, str(SUITE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path[1:]))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    for name, outcome in re.findall(r"::test_(\S+)\[\w+\] (PASSED|FAILED|ERROR)", done.stdout):
        found.holds(name.replace("_", " "), outcome == "PASSED")
    if not found.rows:
        raise RuntimeError(f"no test ran:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode:
        found.note = done.stdout[-4000:]
