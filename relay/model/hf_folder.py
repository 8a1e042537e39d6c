"""A model folder in the Hugging Face layout: config.json, and model.safetensors or the shards that model.safetensors.index.json names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from relay.errors import ModelError
from relay.model.packed import TensorInfo
from relay.model.safetensors_file import SafetensorsFile

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_MAX_JSON_BYTES: Final = 64 << 20


class SafetensorsFolder:
    """A `TensorSource` over all shards of a folder. Raises ModelError for shards that are missing, damaged, or overlap."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        names = shard_names(folder)
        shards = [SafetensorsFile(folder / name) for name in names]
        self._shard_of: dict[str, SafetensorsFile] = {}
        self._infos: dict[str, TensorInfo] = {}
        for shard in shards:
            for name, info in shard.infos().items():
                if name in self._infos:
                    raise ModelError(f"{shard.where}: the tensor `{name}` is in {self._shard_of[name].where} as well; fetch it again")
                self._infos[name], self._shard_of[name] = info, shard

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def data(self, name: str) -> NDArray[np.uint8]:
        return self._shard_of[name].data(name)


def shard_names(folder: Path) -> list[str]:
    """The files with a folder's tensors: plain names, sorted. Raises ModelError for an index that is damaged, or leaves the folder."""
    if not (folder / INDEX).is_file():
        return [SINGLE]
    index = read_json(folder / INDEX)
    try:
        names = sorted(set(msgspec.convert(index.get("weight_map"), dict[str, str]).values()))
    except msgspec.ValidationError as error:
        raise ModelError(f"{folder / INDEX}: its `weight_map` is not a mapping from tensors to files: {error}; fetch it again") from error
    for name in names:
        if "/" in name or "\\" in name or not name.endswith(".safetensors") or not name.isprintable():
            raise ModelError(f"{folder / INDEX}: `weight_map` names {name!r}; expected .safetensors files of the same folder")
    if not names:
        raise ModelError(f"{folder / INDEX}: `weight_map` names no file; fetch it again")
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelError."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: it has {path.stat().st_size} bytes; expected at most {_MAX_JSON_BYTES}")
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found
