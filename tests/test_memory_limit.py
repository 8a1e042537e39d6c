"""The least of what the machine has and what control groups allow, in both versions."""

from pathlib import Path

import pytest

from relay.memory_limit import memory_limit

GROUPS = {
    "its own, version 2": ("0::/a/b\n", {"a/b/memory.max": "1000\n", "a/memory.max": "max\n"}, 1000),
    "of one above, version 2": ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000),
    "mounted at the top": ("0::/docker/123\n", {"memory.max": "3000\n"}, 3000),
    "version 1": ("5:cpu,memory:/a\n", {"memory/a/memory.limit_in_bytes": "4000\n"}, 4000),
    "version 1 at the top": ("5:memory:/elsewhere\n", {"memory/memory.limit_in_bytes": "5000\n"}, 5000),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_a_limit_is_found(tmp_path: Path, kind: str) -> None:
    own, files, limit = GROUPS[kind]
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path / "root", tmp_path / "own") == (limit, "this container may use")


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("", {}),
        ("0::/a\n", {"a/memory.max": "max\n"}),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": f"{2**63 - 4096}\n"}),
        ("1:cpu:/\n", {"memory/memory.limit_in_bytes": "17\n"}),
    ],
)
def test_without_a_limit_it_is_the_machines(tmp_path: Path, own: str, files: dict[str, str]) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path / "root", tmp_path / "own")[1] == "this machine has"
