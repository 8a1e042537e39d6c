"""Run everything a kernel library does on small inputs, and print a digest of the bits of each result:

    python -m tests.kernels.digest LIBRARY.so

Two libraries compute the same if they print the same. Run under a sanitizer, it is the sanitizer's workload.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relay.engine.native.draws import Draws
from relay.engine.native.token_arrays import TokenArrays
from relay.engine.runner import Draw
from relay.kernels import cpp_library
from relay.kernels.packed_matmul import Format, matrix_bytes, multiply, read_row
from relay.kernels.token_sampling import draw_rows
from relay.kernels.weight_packing import pack
from relay.messages import Sampling
from relay.model.spec import ModelSpec
from tests.engine.native_models import NativePool, checkpoint_of, packed_fd, packed_rows, variant
from tests.engine.schedules import random_tokens

SPECS: dict[str, tuple[ModelSpec, str | tuple[str, ...]]] = {
    "llama": (variant(n_heads=8), ("Q4_1", "Q8_0", "Q4_0", "Q6_K", "Q4_K", "BF16", "F16")),
    "qwen3": (variant(architecture="qwen3", n_heads=4, n_kv_heads=4, head_dim=64), "Q4_1"),
    "mistral": (variant(architecture="mistral", windows=(17, 300), n_heads=5, n_kv_heads=1, head_dim=96), "Q8_0"),
    "odd widths": (variant(architecture="qwen2", hidden=96, ffn=112, vocab_size=301), "F32"),
}


def digest(*arrays: NDArray[np.generic]) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:16]


def products() -> Iterator[tuple[str, str]]:
    for kind in Format:
        rng = np.random.default_rng(kind)
        rows = packed_rows(kind.name, rng.standard_normal((37, 512)).astype(np.float32), rng)
        packed = np.empty(matrix_bytes(kind, 37, 512), np.uint8)
        pack(kind, rows, 512, packed)
        x = (rng.standard_normal((37, 512)) * np.exp(rng.standard_normal((37, 512)))).astype(np.float32)
        x[3], x[4, 32:64], x[5] = 0.0, 1e-35, 3e38
        results = [multiply(packed, kind, 37, x[:n], narrow=narrow) for n in (1, 2, 3, 4, 5, 8, 9, 23, 37) for narrow in (False, True)]
        yield kind.name, digest(packed, read_row(packed, kind, 37, 512, 36), *results)


def steps() -> Iterator[tuple[str, str]]:
    for name, (spec, kinds) in SPECS.items():
        fd = packed_fd(checkpoint_of(spec, kinds))
        sequences = random_tokens(spec, np.random.default_rng(1), [270, 33, 16, 1])
        for dtype, activations in (("bfloat16", "a16"), ("float16", "a8"), ("int8", "a16"), ("float32", "a8")):
            pool = NativePool(fd, spec, 60, np.random.default_rng(2), dtype, threads=3, activations=activations)
            logits, _ = pool.compute(sequences, (1, 2, 40, 129))
            pool.runner.close()
            yield f"{name} {dtype} {activations}", digest(*logits)
        os.close(fd)


def draws() -> Iterator[tuple[str, str]]:
    rng = np.random.default_rng(3)
    logits = (rng.normal(size=(40, 3001)) * rng.uniform(0.1, 4, (40, 1))).astype(np.float32)
    samplings = (
        Sampling(temperature=0.0, logprobs=20),
        Sampling(logprobs=0),
        Sampling(top_k=50, top_p=0.95, temperature=0.8, repetition_penalty=1.2, frequency_penalty=0.3),
        Sampling(top_p=0.9, logprobs=3),
        Sampling(top_k=2000, top_p=0.999, min_p=0.01),
    )
    how = [Draw(samplings[i % 5], float(u), rng.integers(0, 3001, 30).tolist(), 10, (1, 2)) for i, u in enumerate(rng.random(40))]
    found = Draws(how)
    found.see(TokenArrays())
    draw_rows(logits, found.draws_pointer, found.drawn_pointer)
    yield "draws", digest(np.array(found.ids())) + repr([entry and (entry.chosen, entry.top) for entry in found.logprobs()])


def main() -> None:
    path = Path(sys.argv[1])
    cpp_library.library_path = lambda: path
    print(json.dumps(dict([*products(), *steps(), *draws()])))


if __name__ == "__main__":
    main()
