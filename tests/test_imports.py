"""Imports point down: the layers of the design, read from the source."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent

# lowest first; rooms of one row do not import each other unless it says so
LAYERS = (
    ("errors", "config", "messages", "clock", "line_writer", "log", "memory_limit", "__init__"),
    ("runtime",),
    ("text", "kv", "policy", "ledger", "openai", "auth"),
    ("kernels",),
    ("model", "engine"),
    ("actors",),
    ("http", "plan"),
    ("bench", "chaos", "weights", "simulation", "gpu_check"),
    ("serve", "worker", "faults", "cli", "replay", "__main__"),
)
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
SAME_ROW = {
    ("log", "line_writer"),
    ("engine", "model"),
    ("config", "errors"),
    ("cli", "serve"),
    ("__main__", "cli"),
    ("policy", "kv"),
    ("worker", "faults"),
}


def sources() -> list[tuple[str, Path]]:
    found = [(path.relative_to(ROOT / "relay").parts[0].removesuffix(".py"), path) for path in sorted((ROOT / "relay").rglob("*.py"))]
    for folder in ("actors", "kernels"):
        found += [(folder, path) for path in sorted((ROOT / folder).rglob("*.py"))]
    return found


def imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" if node.module == "relay" else node.module for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("relay.")}
    return rooms


def test_imports_point_down() -> None:
    wrong = []
    for room, path in sources():
        for other in imported(path):
            if other == "__version__" or other == room:
                continue
            if RANK[other] > RANK[room] or (RANK[other] == RANK[room] and (room, other) not in SAME_ROW):
                wrong.append(f"{path.relative_to(ROOT)} imports relay.{other}")
    assert wrong == []


def test_actors_never_import_each_other() -> None:
    for path in (ROOT / "actors").glob("*.py"):
        assert "actors" not in imported(path), path


def test_what_the_gateway_and_the_root_load_has_no_torch() -> None:
    for room, path in sources():
        if room in ("runtime", "text", "openai", "http", "kv", "policy", "ledger", "auth", "plan", "serve", "actors") or path.name in (
            "spec.py",
            "size.py",
            "source.py",
            "gguf_metadata.py",
        ):
            tree = ast.parse(path.read_text())
            names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            assert "torch" not in names, path
