"""The library is compiled once, whole or not at all, and what cannot be is said clearly."""

import concurrent.futures
import ctypes
from pathlib import Path

import pytest

from relay.errors import KernelsUnavailable
from relay.kernels import cpp_library
from relay.kernels.cpp_library import best_instructions, compile_library, find_compiler, library_path, processor_flags


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one short file, in a cache of its own."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text(
        '#include "one.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'
    )
    (sources / "one.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(cpp_library, "FOLDER", sources)
    monkeypatch.setattr(cpp_library, "SOURCES", ("one.cpp",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return sources


def answer(path: Path) -> int:
    found: int = ctypes.CDLL(str(path)).answer()
    return found


def test_a_library_is_compiled_once_and_again_only_if_a_source_or_header_changes(small: Path) -> None:
    first = library_path()
    assert answer(first) == 42
    made = first.stat().st_mtime_ns
    assert library_path() == first
    assert first.stat().st_mtime_ns == made
    (small / "one.h").write_text("#define ANSWER 43\n")
    second = library_path()
    assert second != first
    assert answer(second) == 43


def test_several_that_start_together_compile_once_and_leave_nothing_else(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counted(place: Path, *rest: object) -> None:
        compiled.append(place)
        compile_library(place, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cpp_library, "compile_library", counted)
    with concurrent.futures.ThreadPoolExecutor(4) as several:
        places = {job.result() for job in [several.submit(library_path) for _ in range(4)]}
    assert len(places) == len(compiled) == 1
    assert {path.suffix for path in compiled[0].parent.iterdir()} == {".so", ".lock"}


def test_a_cache_that_cannot_be_written_is_replaced_by_one_of_this_process(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small.parent / "cache").write_text("a file, where a folder should be")
    assert answer(library_path()) == 42
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ones/are/ignored")
    monkeypatch.setenv("HOME", str(small.parent / "home"))
    assert library_path().is_relative_to(small.parent / "home")


def test_what_the_compiler_says_is_in_the_error_and_nothing_is_cached(small: Path) -> None:
    (small / "one.h").write_text("#error this cannot be\n")
    with pytest.raises(KernelsUnavailable, match="this cannot be"):
        library_path()
    assert not list((small.parent / "cache").rglob("*.so"))
    assert not list((small.parent / "cache").rglob(".building-*"))


def test_a_machine_without_a_compiler_is_told_so(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(small))
    with pytest.raises(KernelsUnavailable, match=r"C\+\+ compiler"):
        library_path()


def test_a_compiler_that_does_not_run_is_named(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (small / "g++").write_text("#!/bin/sh\nexit 3\n")
    (small / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(small))
    with pytest.raises(KernelsUnavailable, match=r"g\+\+ does not run"):
        library_path()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 fma f16c bmi1 bmi2 popcnt", "avx2"),
        ("avx2 fma f16c bmi1 bmi2 popcnt avx512f avx512bw avx512vl avx512dq", "avx2"),
        ("avx2 fma f16c bmi1 bmi2 popcnt avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512"),
    ],
)
def test_instructions_follow_from_the_processor(flags: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_library, "processor_flags", lambda: frozenset(flags.split()))
    assert best_instructions() == expected


def test_another_processor_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_library, "processor_flags", lambda: frozenset({"fma", "f16c", "bmi1", "bmi2", "popcnt"}))
    with pytest.raises(KernelsUnavailable, match="lacks avx2"):
        best_instructions()


def test_this_machine_has_what_it_says() -> None:
    assert "sse2" in processor_flags()
    assert Path(find_compiler()).is_file()
