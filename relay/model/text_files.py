"""The tokenizer and the chat template that come with a model, whichever format it is in. No torch: gateways read a model through this."""

from pathlib import Path
from typing import Final

from relay.errors import ModelError
from relay.model.gguf_metadata import read_metadata
from relay.model.hf_folder import read_json
from relay.text.chat_template import ChatTemplate
from relay.text.tokenizer import Tokenizer

_MAX_TEMPLATE_BYTES: Final = 4 << 20


def read_text_files(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """Of a GGUF file, or a folder in the Hugging Face layout. Without a template a model has no chat. Raises ModelError."""
    if path.is_dir():
        tokenizer, source = Tokenizer.from_tokenizer_json(path / "tokenizer.json"), _folder_template(path)
    else:
        metadata = read_metadata(path).metadata
        tokenizer, source = Tokenizer.from_gguf(metadata), metadata.get("tokenizer.chat_template")
    return tokenizer, ChatTemplate.for_tokenizer(source, tokenizer) if isinstance(source, str) else None


def _folder_template(folder: Path) -> str | None:
    """chat_template.jinja, or the one of tokenizer_config.json; where that has several, `default`."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            if own.stat().st_size > _MAX_TEMPLATE_BYTES:
                raise ModelError(f"{own}: it has {own.stat().st_size} bytes; expected at most {_MAX_TEMPLATE_BYTES}")
            return own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{own}: cannot be read: {error}") from error
    config = folder / "tokenizer_config.json"
    found = read_json(config).get("chat_template") if config.is_file() else None
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelError(f"{config}: `chat_template` is a {type(found).__name__}; expected text, or a list with one named `default`")
    return found
