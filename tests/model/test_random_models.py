"""Random models: known shapes, the same numbers in every process, and text in and out."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from relay.errors import ModelError, SourceError
from relay.model.load import load, open_checkpoint, read_spec
from relay.model.random_models import SHAPES, make_folder
from relay.model.size import n_matrix_weights, n_weights
from relay.model.text_files import read_text_files
from tests.engine.schedules import Pool, random_tokens

TINY = [name for name in SHAPES if name.startswith("tiny-")]
_DIGEST = """
import hashlib, sys
from pathlib import Path
from relay.model.load import open_checkpoint
checkpoint = open_checkpoint(Path(sys.argv[1]))
whole = hashlib.sha256()
for name in checkpoint.names:
    tensor = checkpoint.vector(name) if len(checkpoint.shape(name)) == 1 else checkpoint.matrix(name).rows
    whole.update(tensor.tobytes())
print(whole.hexdigest())
"""


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("mistral-7b", 7.248),
        ("mixtral-8x7b", 46.7),
        ("qwen2-7b", 7.616),
        ("qwen3-8b", 8.19),
    ],
)
def test_shapes_have_the_weights_that_their_names_promise(name: str, billions: float, tmp_path: Path) -> None:
    spec = read_spec(make_folder(name, tmp_path))
    assert n_weights(spec) / 1e9 == pytest.approx(billions, rel=2e-3)
    if name == "mixtral-8x7b":
        assert n_matrix_weights(spec) / 1e9 == pytest.approx(12.75, rel=1e-2)


def test_numbers_are_the_same_in_every_process_and_differ_between_tensors_and_seeds(tmp_path: Path) -> None:
    """The digest is written down: it may not change from one release to the next."""
    folder = make_folder("tiny-llama", tmp_path)
    found = [subprocess.run([sys.executable, "-c", _DIGEST, str(folder)], capture_output=True, text=True, check=True).stdout for _ in "ab"]
    assert found[0] == found[1]
    assert found[0].strip() == "6c3aafca0a057701c334cb0f93b9a1fa9bfbd8efbc2dacccb4ae0d6fb7133982"
    other = open_checkpoint(make_folder("tiny-llama", tmp_path, seed=1))
    one = open_checkpoint(folder)
    rows = [checkpoint.matrix(name).rows.tobytes() for checkpoint in (one, other) for name in ("layers.0.k", "layers.0.v", "layers.1.k")]
    assert len(set(rows)) == 6
    assert make_folder("tiny-llama", tmp_path) == folder


def test_numbers_have_the_spread_that_keeps_activations_at_their_size(tmp_path: Path) -> None:
    weights = load(make_folder("tiny-qwen2", tmp_path))
    layer = weights.layers[0]
    assert float(layer.qkv.std()) == pytest.approx(64**-0.5, rel=0.02)
    assert float(layer.networks[0].down.std()) == pytest.approx(96**-0.5, rel=0.02)
    assert abs(float(layer.qkv.mean())) < 0.01
    assert layer.attn_norm is not None
    assert layer.qkv_bias is not None
    assert float((layer.attn_norm - 1).std()) == pytest.approx(0.1, rel=0.2)
    assert float(layer.qkv_bias.std()) == pytest.approx(0.1, rel=0.2)
    assert len(set(layer.qkv.flatten().tolist())) <= 256
    assert torch.equal(layer.qkv, layer.qkv.bfloat16().float())


@pytest.mark.parametrize("name", TINY)
def test_every_tiny_model_computes(name: str, tmp_path: Path) -> None:
    weights = load(make_folder(name, tmp_path))
    tokens = random_tokens(weights.spec, np.random.default_rng(0), [60])[0]
    (logits,), _ = Pool(weights, 6, np.random.default_rng(1)).compute([tokens], (60,))
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(1).tolist())) > 20


def test_text_goes_in_byte_by_byte_and_comes_out(tmp_path: Path) -> None:
    tokenizer, template = read_text_files(make_folder("tiny-llama", tmp_path))
    assert template is not None
    assert tokenizer.vocab_size == 320
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (256, (257,), True)
    text = "héllo <300> <|end|>\n😀"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([300, 104]) == "<300>h"
    assert tokenizer.encode_prompt("a<|end|>") == [256, tokenizer.encode("a")[0], 257]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    rendered = template.render(messages, add_generation_prompt=True)
    assert rendered == "<|begin|><|system|>s<|end|><|user|>u<|end|><|assistant|>a<|end|><|assistant|>"


def test_large_vocabularies_are_covered_to_the_last_id(tmp_path: Path) -> None:
    tokenizer, _ = read_text_files(make_folder("llama-3-8b", tmp_path))
    assert tokenizer.vocab_size == 128256
    assert tokenizer.decode([128255]) == "<128255>"


def test_names_and_folders_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="expected one of: smollm2-135m"):
        make_folder("llama-9", tmp_path)
    folder = make_folder("tiny-llama", tmp_path)
    (folder / "random.json").write_text("{}")
    with pytest.raises(ModelError, match=r"random\.json"):
        read_spec(folder)
