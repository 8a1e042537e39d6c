"""NVIDIA's compiler and disassembler as packages bring them: no toolkit on the machine is needed, nor taken.

tool("nvdisasm")                          -> path of the program
compile_with_nvcc(program, 90, to)        the same file, the same macros, the other front end
"""

import importlib.util
import subprocess
from pathlib import Path

from relay.kernels.cuda_compiler import Program


def tool(name: str) -> str:
    """Raises RuntimeError."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found and found.submodule_search_locations) or ():
        place = Path(folder) / "cu13" / "bin" / name
        if place.exists():
            return str(place)
    raise RuntimeError(
        f"there is no {name}; scripts/setup --dev installs it (packages nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-nvdisasm)"
    )


def compile_with_nvcc(program: Program, architecture: int, to: Path) -> None:
    """Raises RuntimeError with what the compiler said."""
    flags = [flag for flag in program.flags if flag != "-default-device"]  # NVRTC's word for functions without __device__
    command = [tool("nvcc"), "-cubin", f"-arch=sm_{architecture}", *flags, str(program.path), "-o", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name} does not compile with nvcc for sm_{architecture}:\n{done.stderr[:4000]}")
