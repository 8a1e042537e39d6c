"""Models in the Hugging Face layout made into GGUF files, by the format's own writer and its own table of tensor names.

What converters do to the numbers (llama.cpp, conversion/*.py): rows of q and k of a Llama are interleaved, norms of Gemma are stored as
1 + w, experts are stacked, and the factors of Llama 3's rope become a tensor.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Arrays = dict[str, NDArray[np.float32]]
_ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}


def interleaved(rows: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """What converters do to q and k of a Llama."""
    return rows.reshape(n_heads, 2, len(rows) // n_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def convert(folder: Path, path: Path, type_of: Callable[[str], str] = lambda name: "F32", **more: Any) -> Path:
    """Write the model of `folder` to `path`. type_of: of a GGUF tensor, by name; norms and biases stay F32. more: further metadata."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config), **more}.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    for name, values in _tensors(config, architecture, load_file(folder / "model.safetensors")).items():
        kind = gguf.GGMLQuantizationType[type_of(name) if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": head_dim,
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _tensors(config: dict[str, Any], architecture: str, tensors: Arrays) -> Arrays:
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    found: Arrays = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, values in tensors.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = interleaved(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if ".experts." in name:
            before, after = name.split(".experts.")
            number, part = after.split(".", 1)
            experts.setdefault(f"{before}.experts.{part}", {})[int(number)] = values
        else:
            found[_renamed(names, name)] = values
    for name, by_number in experts.items():
        merged = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward") if "block_sparse_moe" in name else name
        found[_renamed(names, merged)] = np.stack([by_number[number] for number in sorted(by_number)])
    if config["rope_parameters"].get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3_divisors(config["head_dim"], config["rope_parameters"])
    return found


def _renamed(names: Any, name: str) -> str:
    renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert renamed is not None, name
    return str(renamed)


def _llama3_divisors(head_dim: int, rope: dict[str, Any]) -> NDArray[np.float32]:
    """The rule as the release states it, by wavelengths."""
    found = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / head_dim)
        original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, np.float32)
