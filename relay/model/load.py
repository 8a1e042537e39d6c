"""From the path of a model to its spec, its packed tensors, or its weights: the one way in, whatever the format.

A path is a GGUF file, a folder in the Hugging Face layout, or a folder that `random:NAME` made. `load` alone needs torch, and imports it
when it is called: the root process and gateways read specs and packed tensors without it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from relay.errors import ModelError
from relay.model.checkpoint import Checkpoint
from relay.model.gguf_file import GGUFFile
from relay.model.gguf_metadata import read_metadata
from relay.model.gguf_spec import ROPE_FREQS, spec_from_gguf
from relay.model.hf_folder import CONFIG, SafetensorsFolder, read_json
from relay.model.hf_spec import spec_from_hf
from relay.model.placing import gguf_place, hf_place
from relay.model.random_tensors import SEED_FILE, RandomTensors, own_place
from relay.model.spec import ModelSpec

if TYPE_CHECKING:
    from relay.model.weights import Weights


def read_spec(path: Path) -> ModelSpec:
    """The spec of a model all of whose tensors have been checked by name, shape and type. Raises ModelError with the path."""
    return open_checkpoint(path).spec


def load(path: Path) -> "Weights":
    """All weights in float32. Raises ModelError with the path."""
    from relay.model.weights import unpack

    return unpack(open_checkpoint(path))


def open_checkpoint(path: Path) -> Checkpoint:
    """A model's packed tensors; files are mapped, not read. Raises ModelError with the path."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Checkpoint:
    header = read_metadata(path)
    n_parts = header.metadata.get("split.count", 1)
    if n_parts != 1:
        raise ModelError(f"{path}: it is one of {n_parts} parts of a model; make one file of them with llama.cpp's gguf-split --merge")
    source = GGUFFile(path, header)

    def divisors() -> tuple[float, ...]:
        if header.tensors[ROPE_FREQS].type != "F32":
            raise ModelError(f"the tensor `{ROPE_FREQS}` is {header.tensors[ROPE_FREQS].type}; expected F32")
        return tuple(float(value) for value in np.frombuffer(source.data(ROPE_FREQS), np.float32))

    try:
        spec = spec_from_gguf(header, divisors)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return Checkpoint(spec, source, gguf_place, interleaved_qk=spec.traits.interleaved_qk, may_be_left=lambda name: name == ROPE_FREQS)


def _from_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / CONFIG)
    try:
        spec = spec_from_hf(config)
    except ModelError as error:
        raise ModelError(f"{folder / CONFIG}: {error}") from error
    if (folder / SEED_FILE).is_file():
        return Checkpoint(spec, RandomTensors(folder, spec), own_place)

    def may_be_left(name: str) -> bool:
        """A second copy of a tied matrix, and tables that older files hold and that are computed here."""
        return (name == "lm_head.weight" and spec.tied_embeddings) or name.endswith("rotary_emb.inv_freq")

    return Checkpoint(spec, SafetensorsFolder(folder), hf_place, one_plus=spec.traits.one_plus, may_be_left=may_be_left)
