"""The real model's tokenizer and chat template."""

from pathlib import Path
from typing import Any

import pytest

from relay.model.gguf_metadata import read_metadata
from relay.text.chat_template import ChatTemplate
from relay.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_metadata(smollm2_path).metadata


@pytest.fixture(scope="session")
def tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(metadata)


@pytest.fixture(scope="session")
def template(metadata: dict[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.for_tokenizer(metadata["tokenizer.chat_template"], tokenizer)
