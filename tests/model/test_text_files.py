"""Tokenizer and chat template of a model in either format, and where a folder may keep them."""

import json
from pathlib import Path
from typing import Any

import pytest

from relay.errors import ModelError
from relay.model.random_models import make_folder
from relay.model.text_files import read_text_files

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder("tiny-llama", tmp_path)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rendered(folder: Path) -> str | None:
    template = read_text_files(folder)[1]
    return None if template is None else template.render(MESSAGES)


def test_a_gguf_file_has_both_in_its_metadata(smollm2_path: Path) -> None:
    tokenizer, template = read_text_files(smollm2_path)
    assert tokenizer.vocab_size == 49152
    assert template is not None
    assert "<|im_start|>user\nhello<|im_end|>" in template.render(MESSAGES)


def test_a_folder_has_its_template_in_a_file_or_in_its_config(folder: Path) -> None:
    assert rendered(folder) == "<|begin|><|user|>hello<|end|><|assistant|>"
    (folder / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    assert rendered(folder) == "own hello"
    (folder / "chat_template.jinja").unlink()
    configure(folder, chat_template=[{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d {{ messages[0].content }}"}])
    assert rendered(folder) == "d hello"
    configure(folder, chat_template=[{"name": "tool_use", "template": "t"}])
    assert rendered(folder) is None
    configure(folder, chat_template=None)
    assert rendered(folder) is None


def test_ends_come_from_the_generation_config_too(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [259, 257]}')
    assert set(read_text_files(folder)[0].eos_ids) == {257, 259}


def test_files_that_cannot_be_read_are_refused_with_their_path(folder: Path) -> None:
    configure(folder, chat_template=7)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: `chat_template` is a int"):
        read_text_files(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        read_text_files(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        read_text_files(folder)
