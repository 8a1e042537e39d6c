"""AVX2 and AVX-512 give the same bits; nothing reads or writes outside of what it was given; threads do not race.

Where there is no AVX-512, its half of simd.h runs on tests/kernels/emulated_avx512.h; the real instructions are compiled everywhere.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relay.kernels.cpp_library import (
    FLAGS,
    FOLDER,
    INSTRUCTION_FLAGS,
    SOURCES,
    best_instructions,
    compile_library,
    find_compiler,
    library_path,
)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
QUICK = tuple(flag for flag in FLAGS if flag != "-O3")  # what runs here is small: compile time counts
EMULATED = (*QUICK, "-O1", *INSTRUCTION_FLAGS["avx2"], "-DRELAY_AVX512", "-DRELAY_EMULATED_AVX512", f"-I{HERE}", "-Wno-psabi")
WARNINGS = ("-Wall", "-Wextra", "-Werror")
KERNELS = [FOLDER / name for name in SOURCES]


def digests(library: Path, **environment: str) -> dict[str, str]:
    done = subprocess.run(
        (sys.executable, "-m", "tests.kernels.digest", str(library)),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def avx2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if best_instructions() == "avx2":
        return digests(library_path())
    place = tmp_path_factory.mktemp("avx2") / "kernels.so"
    compile_library(place, KERNELS, (*FLAGS, *INSTRUCTION_FLAGS["avx2"]), find_compiler())
    return digests(place)


def test_emulated_avx512_gives_the_bits_of_avx2(avx2: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "kernels.so"
    compile_library(place, KERNELS, (*EMULATED, *WARNINGS), find_compiler())
    assert digests(place) == avx2


def test_avx512_compiles_and_where_it_runs_gives_the_bits_of_avx2(avx2: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "kernels.so"
    if best_instructions() == "avx512":
        compile_library(place, KERNELS, (*FLAGS, *INSTRUCTION_FLAGS["avx512"]), find_compiler())
        assert digests(place) == avx2
    else:
        compile_library(place, KERNELS, (*QUICK, "-O0", *INSTRUCTION_FLAGS["avx512"]), find_compiler())


def test_nothing_is_read_or_written_outside_and_nothing_is_undefined(avx2: dict[str, str], tmp_path: Path) -> None:
    place, compiler = tmp_path / "kernels.so", find_compiler()
    sanitized = (*QUICK, "-O1", *INSTRUCTION_FLAGS["avx2"], "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    compile_library(place, KERNELS, sanitized, compiler)
    runtime = subprocess.run((compiler, "-print-file-name=libasan.so"), capture_output=True, text=True, check=True).stdout.strip()
    assert digests(place, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0") == avx2


def test_threads_of_the_pool_do_not_race(tmp_path: Path) -> None:
    """Few and many threads, phases of one chunk and of thousands, late sleepers, and pools that come and go, under the thread sanitizer."""
    program, compiler = tmp_path / "driver", find_compiler()
    command = (compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{FOLDER}")
    subprocess.run((*command, str(HERE / "thread_pool_driver.cpp"), str(FOLDER / "thread_pool.cpp"), "-o", str(program)), check=True)
    with concurrent.futures.ThreadPoolExecutor(2) as both:
        runs = list(both.map(lambda seed: subprocess.run((str(program), str(seed)), capture_output=True, text=True, check=False), (1, 2)))
    for run in runs:
        assert run.returncode == 0, run.stderr[-8000:]
