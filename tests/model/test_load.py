"""Whole models out of every format: the same weights, in memory once, and no torch where none is needed."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch

from relay.errors import ModelError
from relay.model.load import load, read_spec
from relay.model.random_models import make_folder
from tests.engine.schedules import Pool
from tests.model import tiny
from tests.model.gguf_writing import convert


def logits(path: Path, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    (found,), _ = Pool(load(path), 8, np.random.default_rng(0)).compute([tiny.expected(name)["prompt_ids"]], (75,))
    return found


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_gguf_file_computes_what_its_folder_computes(name: str, tmp_path: Path) -> None:
    """llama.cpp#8676: the rope of llama3_rope is a tensor in its GGUF file; its divisors are float32, so its last bits differ."""
    path = convert(tiny.folder(name), tmp_path / "m.gguf")
    ours, other = read_spec(tiny.folder(name)), read_spec(path)
    assert other.rms_eps == pytest.approx(ours.rms_eps, rel=1e-7)  # a float32 in the file
    fields = [field for field in ours.__struct_fields__ if field != "rms_eps" and getattr(ours, field) != getattr(other, field)]
    assert fields == {"llama3_rope": ["rope"], "mistral_sliding": ["architecture"]}.get(name, [])
    difference = np.abs(logits(path, name) - logits(tiny.folder(name), name)).max()
    assert difference < 5e-5 if name == "llama3_rope" else difference == 0


def test_weights_of_a_quantized_file_are_those_of_its_packed_rows(tmp_path: Path) -> None:
    kinds = {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q4_0", "blk.0.attn_k.weight": "Q4_1", "blk.1.ffn_gate.weight": "BF16"}
    folder = tiny.folder("llama")
    weights = load(convert(folder, tmp_path / "m.gguf", lambda name: kinds.get(name, "F16")))
    held = safetensors.numpy.load_file(folder / "model.safetensors")

    def right(name: str, kind: str) -> torch.Tensor:
        qtype = gguf.GGMLQuantizationType[kind]
        return torch.from_numpy(np.asarray(gguf.quants.dequantize(gguf.quants.quantize(held[name], qtype), qtype), np.float32))

    qkv = weights.layers[0].qkv
    assert torch.equal(weights.embedding, right("model.embed_tokens.weight", "Q8_0"))
    assert torch.equal(qkv[:256], right("model.layers.0.self_attn.q_proj.weight", "Q4_0"))
    assert torch.equal(qkv[256:384], right("model.layers.0.self_attn.k_proj.weight", "Q4_1"))
    assert torch.equal(qkv[384:], right("model.layers.0.self_attn.v_proj.weight", "F16"))
    assert torch.equal(weights.layers[1].networks[0].gate_up[:96], right("model.layers.1.mlp.gate_proj.weight", "BF16"))


def test_shards_are_one_model(tmp_path: Path) -> None:
    held = safetensors.numpy.load_file(tiny.folder("qwen3") / "model.safetensors")
    names = sorted(held)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for shard, inside in shards.items():
        safetensors.numpy.save_file({name: held[name] for name in inside}, tmp_path / shard)
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_bytes((tiny.folder("qwen3") / "config.json").read_bytes())
    assert np.array_equal(logits(tmp_path, "qwen3"), logits(tiny.folder("qwen3"), "qwen3"))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        read_spec(tmp_path)
    safetensors.numpy.save_file(held, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match="as well"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        *("[", "[]", "{}", '{"weight_map": ' + "[" * 100000),
        *('{"weight_map": {}}', '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "m.bin"}}'),
        *('{"weight_map": {"a": "../m.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}'),
    ],
)
def test_an_index_that_is_damaged_or_leaves_the_folder_is_refused(tmp_path: Path, index: str) -> None:
    folder = tiny.changed("llama", tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"index\.json"):
        read_spec(folder)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", 3)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    with pytest.raises(ModelError, match="one of 3 parts"):
        read_spec(path)


@pytest.mark.parametrize("config", ["", "{", "[]", "null", '{"model_type": "llama"}', '{"model_type": ["llama"]}', "\ud800"])
def test_a_config_that_is_no_model_is_refused_with_its_path(tmp_path: Path, config: str) -> None:
    folder = tiny.changed("llama", tmp_path / "m")
    (folder / "config.json").write_bytes(config.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(folder)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        read_spec(tmp_path / "none.gguf")


_PEAK = """
import sys, threading
from pathlib import Path

def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))

import torch
from relay.model.load import load, read_spec
from relay.model.size import n_weights
path = Path(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
weights = load(path)
print(status("VmHWM") - before, 4 * n_weights(weights.spec))
"""


def test_loading_takes_the_memory_of_the_weights_and_little_more(tmp_path: Path) -> None:
    """512 MiB of weights, made of random bfloat16: a second copy of the whole, or of the largest matrix, would show."""
    folder = make_folder("smollm2-135m", tmp_path)
    found = subprocess.run([sys.executable, "-c", _PEAK, str(folder)], capture_output=True, text=True, check=True)
    peak, weights = (int(number) for number in found.stdout.split())
    assert weights > 500 << 20
    assert peak < weights + (160 << 20)


def test_specs_text_files_and_packed_tensors_need_no_torch() -> None:
    modules = ["load", "text_files", "source", "checkpoint", "random_models", "hub"]
    code = f"import sys\nfrom relay.model import {', '.join(modules)}\nimport relay.plan\nfrom pathlib import Path\n"
    code += "load.open_checkpoint(Path(sys.argv[1])).matrix('layers.0.q')\nprint('torch' in sys.modules, 'huggingface_hub' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code, str(tiny.folder("llama"))], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]
