"""Actors and cores are simulated: nothing in them may differ between two runs. Read from the source."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIMULATED = (
    *sorted((ROOT / "actors").glob("*.py")),
    *sorted((ROOT / "relay" / "policy").glob("*.py")),
    *sorted((ROOT / "relay" / "ledger").glob("*.py")),
    *sorted((ROOT / "relay" / "simulation").glob("*.py")),
    *sorted((ROOT / "relay" / "replay").glob("*.py")),
    *(ROOT / "relay" / "kv" / f"{name}.py" for name in ("book", "prefix", "pools")),
    *(ROOT / "relay" / "engine" / f"{name}.py" for name in ("engine", "host", "sequence", "report", "modelled_runner", "token_log")),
    *(ROOT / "relay" / "runtime" / f"{name}.py" for name in ("node", "mailbox")),
)
MAY = {  # outside of what is simulated: they start processes and read real clocks
    "sweep.py": {"multiprocessing"},
    "mutants.py": {"time", "concurrent.futures", "subprocess"},
    "__main__.py": {"os"},
    "metrics.py": set(),
    "strand.py": {"threading"},  # a thread that takes turns with the loop
}
MODULES = {
    "time",
    "threading",
    "uuid",
    "secrets",
    "os",
    "queue",
    "socket",
    "subprocess",
    "multiprocessing",
    "concurrent.futures",
    "asyncio",
}
CALLS = {"id", "hash", "set", "frozenset"}


def faults(path: Path) -> list[str]:
    found = []
    may = MAY.get(path.name, set())
    if path.name == "book.py":
        may = {"threading"}  # one lock, never waited for in a simulation
    if path.name == "pools.py":
        may = {"os"}  # descriptors of real pools
    for node in ast.walk(ast.parse(path.read_text())):
        what = ""
        if isinstance(node, ast.Import):
            what = next((f"import {alias.name}" for alias in node.names if alias.name in MODULES - may), "")
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES - may:
            what = f"from {node.module} import"
        elif isinstance(node, ast.Set | ast.SetComp):
            what = "a set: its order is that of hashes"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            what = f"{node.func.id}()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner, name = node.func.value.id, node.func.attr
            if (owner == "random" and name != "Random") or (owner == "trio" and name == "to_thread") or name == "run_sync":
                what = f"{owner}.{name}()"
        if what:
            found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {what}")
    return found


def test_what_is_simulated_is_deterministic() -> None:
    assert [fault for path in SIMULATED for fault in faults(path)] == []
