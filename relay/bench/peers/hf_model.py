"""A GGUF model as a folder in the Hugging Face layout, for servers that read no GGUF: the same numbers, rounded to bfloat16 once.

config.json, model.safetensors, tokenizer.json and tokenizer_config.json. Only what is needed to run a plain Llama: one matrix for each
slot, byte-level BPE. Other architectures are a StartError.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from relay.errors import StartError
from relay.model.checkpoint import Checkpoint
from relay.model.dequantize import dequantize
from relay.model.gguf_metadata import read_metadata
from relay.model.load import open_checkpoint
from relay.model.placing import hf_place
from relay.model.slots import Slot, slots
from relay.model.spec import ModelSpec
from relay.text.gguf_vocabulary import vocabulary_from_gguf
from relay.text.vocabulary import Vocabulary


def write_hf_folder(gguf: Path, folder: Path) -> None:
    """Write all four files into `folder`. Raises StartError for a model that is no plain Llama, ModelError for one that cannot be read."""
    checkpoint = open_checkpoint(gguf)
    spec = checkpoint.spec
    if spec.architecture != "llama" or spec.rope.scaling is not None:
        raise StartError(f"{gguf} is a `{spec.architecture}`; only a plain Llama is written in the Hugging Face layout here")
    vocabulary = vocabulary_from_gguf(read_metadata(gguf).metadata)
    _write_json(folder / "config.json", config(spec, vocabulary))
    _write_json(folder / "tokenizer.json", tokenizer(vocabulary))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(vocabulary))
    write_weights(checkpoint, folder / "model.safetensors")


def config(spec: ModelSpec, vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json, as transformers 4 and 5 read it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": list(vocabulary.eos_ids),
    }


def tokenizer(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer.json: the BPE that we encode with, and the special tokens, which it leaves out, under their own ids."""
    whole: dict[str, Any] = json.loads(vocabulary.bpe.to_str())
    specials = {spelling: special.id for spelling, special in vocabulary.specials.items()}
    whole["model"]["vocab"] |= specials
    kept = [token for token in whole["added_tokens"] if token["content"] not in specials]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": number, "content": spelling, **flags} for spelling, number in specials.items()]
    whole["added_tokens"] = sorted([*kept, *added], key=lambda token: token["id"])
    whole["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return whole


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """tokenizer_config.json."""
    spellings = {special.id: spelling for spelling, special in vocabulary.specials.items()}
    named = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_ids[0] if vocabulary.eos_ids else None}
    known = {name: spellings[number] for name, number in named.items() if number in spellings}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **known}


def write_weights(checkpoint: Checkpoint, path: Path) -> None:
    """In bfloat16."""
    spec = checkpoint.spec
    save_file({hf_place(spec, slot).tensor: _tensor(checkpoint, slot) for slot in slots(spec)}, path, metadata={"format": "pt"})


def _tensor(checkpoint: Checkpoint, slot: Slot) -> torch.Tensor:
    if len(slot.shape) == 1:
        return torch.from_numpy(checkpoint.vector(slot.name)).to(torch.bfloat16)
    whole = torch.empty(slot.shape)
    dequantize(checkpoint.matrix(slot.name), whole)
    return whole.to(torch.bfloat16)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
