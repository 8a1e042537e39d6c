"""A GGUF model written in the Hugging Face layout is the same model."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch

from relay.bench.peers.hf_model import config, tokenizer, tokenizer_config, write_weights
from relay.model.gguf_metadata import read_metadata
from relay.model.hf_spec import spec_from_hf
from relay.model.load import load, open_checkpoint, read_spec
from relay.text.gguf_vocabulary import vocabulary_from_gguf
from relay.text.tokenizer import Tokenizer
from relay.text.vocabulary import Vocabulary
from tests.model import tiny
from tests.model.gguf_writing import convert

TEXT = "Hello  wörld, 1234 times!\n\tdef f(x): return x ** 2 — 你好 🙂 it's"


@pytest.fixture(scope="module")
def vocabulary(smollm2_path: Path) -> Vocabulary:
    return vocabulary_from_gguf(read_metadata(smollm2_path).metadata)


def test_the_tokenizer_gives_the_same_ids_and_knows_the_special_tokens(vocabulary: Vocabulary) -> None:
    ours, theirs = Tokenizer(vocabulary), tokenizers.Tokenizer.from_str(json.dumps(tokenizer(vocabulary)))
    assert theirs.encode(TEXT, add_special_tokens=False).ids == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT)) == TEXT
    assert theirs.encode("<|im_start|>user", add_special_tokens=False).ids[0] == ours.specials["<|im_start|>"].id
    assert theirs.get_vocab_size() == ours.vocab_size


def test_the_config_is_read_back_as_the_same_spec(smollm2_path: Path, vocabulary: Vocabulary) -> None:
    spec = read_spec(smollm2_path)
    assert spec_from_hf(config(spec, vocabulary)) == spec
    assert tokenizer_config(vocabulary)["eos_token"] == "<|im_end|>"


def test_the_weights_are_those_of_the_file_rounded_to_bfloat16(tmp_path: Path) -> None:
    gguf = convert(tiny.folder("llama"), tmp_path / "model.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_weights(open_checkpoint(gguf), folder / "model.safetensors")
    (folder / "config.json").write_bytes((tiny.folder("llama") / "config.json").read_bytes())
    ours, theirs = load(gguf), load(folder)
    assert torch.equal(theirs.embedding, ours.embedding.bfloat16().float())
    assert torch.equal(theirs.final_norm, ours.final_norm.bfloat16().float())
    for a, b in zip(theirs.layers, ours.layers, strict=True):
        assert torch.equal(a.qkv, b.qkv.bfloat16().float())
        assert torch.equal(a.networks[0].down, b.networks[0].down.bfloat16().float())
