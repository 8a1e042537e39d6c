"""Every CUDA kernel's machine code, by both of NVIDIA's front ends, for three architectures: made without a GPU, and looked into."""

from pathlib import Path

import pytest

from relay.errors import KernelsUnavailable
from relay.kernels.cuda_compiler import ARCHITECTURES, FOLDER, Program, architecture_for, build, build_all, compile_cubin, cubin_path
from relay.kernels.cuda_programs import PROGRAMS
from tests.cubins.cubin import resources
from tests.cubins.toolkit import compile_with_nvcc
from tests.cubins.wanted import faults

# each file for each architecture, another variant every time; scripts/kernels has all of them
STEMS = {stem: [program for program in PROGRAMS if program.stem == stem] for stem in sorted({p.stem for p in PROGRAMS})}
CHOSEN = [(of[i * 5 % len(of)], architecture) for of in STEMS.values() for i, architecture in enumerate(ARCHITECTURES)]
# spilled once: as many registers as there are
EDGES = [(program, 80) for program in STEMS["paged_prefill"] if program.macros[:2] == (("ELEMENT", "fp16"), ("HEAD_DIM", "256"))]


def test_every_cuda_file_has_programs() -> None:
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(STEMS)


@pytest.mark.parametrize(("program", "architecture"), CHOSEN + EDGES, ids=lambda value: getattr(value, "name", str(value)))
def test_code_is_what_was_meant(program: Program, architecture: int) -> None:
    assert faults(program, architecture, build(program, architecture)) == []


@pytest.mark.parametrize("number", range(len(STEMS)), ids=list(STEMS))
def test_nvcc_compiles_the_same_files(number: int, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
    program = {p.stem: p for p, a in CHOSEN if a == architecture}[list(STEMS)[number]]
    made = tmp_path / "made.cubin"
    compile_with_nvcc(program, architecture, made)
    assert faults(program, architecture, made) == []
    assert resources(made.read_bytes(), architecture).keys() == resources(build(program, architecture).read_bytes(), architecture).keys()


def test_a_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that keeps an array in local memory, uses no wide loads and too many registers for its blocks."""
    source = """
        extern "C" __global__ void __launch_bounds__(256) rms_norm(const float* x, float* out, int n) {
          float all[200];
          for (int i = 0; i < 200; i++) all[i] = x[threadIdx.x + i * n];
          for (int i = 0; i < n; i++) out[i] = all[(i * 7) % 200];
        }
    """
    (tmp_path / "rms_norm.cu").write_text(source)
    monkeypatch.setattr("relay.kernels.cuda_compiler.FOLDER", tmp_path)
    program = Program("rms_norm")
    cubin, _ = compile_cubin(program, 90)
    (tmp_path / "made.cubin").write_bytes(cubin)
    found = "\n".join(faults(program, 90, tmp_path / "made.cubin"))
    assert "bytes of stack" in found
    assert "LDL" in found
    assert "no instruction like STG" in found


def test_what_does_not_compile_is_refused_with_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.cu").write_text("KERNEL void broken() {}")
    monkeypatch.setattr("relay.kernels.cuda_compiler.FOLDER", tmp_path)
    with pytest.raises(KernelsUnavailable, match=r"broken\.cu with --gpu-architecture=sm_90(.|\n)*KERNEL"):
        compile_cubin(Program("broken"), 90)


def test_a_cubin_is_built_once_for_its_source_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (program,) = (p for p in PROGRAMS if p.name == "silu_mul_bf16_silu")
    first, second = build_all([(program, 90), (program, 80)])
    assert first != second
    written = first.stat().st_mtime_ns
    assert build(program, 90) == first
    assert first.stat().st_mtime_ns == written
    copied = tmp_path / "sources"
    copied.mkdir()
    for path in FOLDER.glob("*.cu*"):
        (copied / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr("relay.kernels.cuda_compiler.FOLDER", copied)
    assert cubin_path(program, 90).name == first.name
    (copied / "device.cuh").write_text((FOLDER / "device.cuh").read_text() + "// changed\n")
    assert cubin_path(program, 90).name != first.name


def test_a_device_runs_the_cubins_of_its_generation() -> None:
    assert [architecture_for(*capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (7, 5))] == [
        80,
        80,
        90,
        100,
        None,
        None,
    ]
