"""Little models of every architecture, with the logits that transformers computed for them (tests/data/README.md)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent.parent / "data"
NAMES = sorted(path.name for path in (DATA / "tiny").iterdir())


def folder(name: str) -> Path:
    return DATA / "tiny" / name


def expected(name: str) -> dict[str, NDArray[Any]]:
    """prompt_ids: int32 [75]. logits: float32 [75, 256]. greedy: int32 [24], what follows the first 40 ids."""
    with np.load(folder(name) / "expected.npz") as file:
        ids, greedy = file["prompt_ids"].astype(np.int32), file["greedy_after_40"].astype(np.int32)
        return {"prompt_ids": ids, "logits": file["logits"], "greedy": greedy}


def variants() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, the model whose weights they have, and what its config says otherwise."""
    for name, variant in json.loads((DATA / "tiny_variants.json").read_text()).items():
        yield name, variant["base"], variant["config"]


def variant_array(name: str) -> NDArray[np.float32]:
    """Logits of the last 8 rows of a variant, or the frequencies of a rope."""
    with np.load(DATA / "tiny_variants.npz") as file:
        return np.asarray(file[name], np.float32)


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder(name) / "config.json").read_text())
    return found


def changed(name: str, target: Path, **changes: Any) -> Path:
    """A folder with the weights of a model and a config that differs; None takes a key away."""
    target.mkdir(parents=True)
    (target / "model.safetensors").symlink_to(folder(name) / "model.safetensors")
    config = {key: value for key, value in {**config_of(name), **changes}.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target
