"""Models of known shapes with random weights: for benchmarks of what cannot be fetched, and for tests.

`make_folder` writes a folder in the Hugging Face layout: config.json, a byte-level tokenizer, a chat template and a seed. The weights
are nowhere: `relay.model.random_tensors` makes them. The vocabulary is 256 bytes, five special tokens, and as many tokens without a use,
spelled as their number, `<300>`, as the shape has further rows: text goes in byte by byte, and what comes out can be shown.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from relay.errors import SourceError
from relay.model.hf_folder import CONFIG
from relay.model.random_tensors import SEED_FILE
from relay.text.vocabulary import byte_level_alphabet

_SPECIALS: Final = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")  # ids 256 to 260
_BEGIN, _END = 256, 257
_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{% elif message.role == 'assistant' %}<|assistant|>{% else %}<|system|>{% endif %}"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


_Config = dict[str, Any]


def _shape(kind: str, layers: int, hidden: int, heads: str, ffn: int, vocab: int, context: int, theta: float, **more: Any) -> _Config:
    """heads: query heads / K/V heads / width of a head."""
    n_heads, n_kv_heads, head_dim = (int(part) for part in heads.split("/"))
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": theta,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    } | more


def _tiny(kind: str, **more: Any) -> _Config:
    return _shape(kind, 2, 64, "4/2/32", 96, 320, 2048, 10000.0, **more)


_GEMMA: Final = {"query_pre_attn_scalar": 32, "sliding_window": 24, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}
_QWEN_MOE: Final = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}

SHAPES: Final[dict[str, _Config]] = {
    "smollm2-135m": _shape("llama", 30, 576, "9/3/64", 1536, 49152, 8192, 1e5, rms_norm_eps=1e-5, tie_word_embeddings=True),
    "llama-3-8b": _shape("llama", 32, 4096, "32/8/128", 14336, 128256, 8192, 5e5, rms_norm_eps=1e-5),
    "llama-3-70b": _shape("llama", 80, 8192, "64/8/128", 28672, 128256, 8192, 5e5, rms_norm_eps=1e-5),
    "mistral-7b": _shape("mistral", 32, 4096, "32/8/128", 14336, 32768, 32768, 1e6, rms_norm_eps=1e-5),
    "mixtral-8x7b": _shape(
        "mixtral", 32, 4096, "32/8/128", 14336, 32000, 32768, 1e6, rms_norm_eps=1e-5, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2-7b": _shape("qwen2", 28, 3584, "28/4/128", 18944, 152064, 131072, 1e6),
    "qwen3-8b": _shape("qwen3", 36, 4096, "32/8/128", 12288, 151936, 40960, 1e6),
    "tiny-llama": _tiny("llama"),
    "tiny-llama-64": _shape("llama", 2, 64, "2/1/64", 96, 320, 2048, 10000.0),  # heads of a width that the CUDA kernels have
    "tiny-mistral": _tiny("mistral", sliding_window=24),
    "tiny-mixtral": _tiny("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "tiny-qwen2": _tiny("qwen2"),
    "tiny-qwen3": _tiny("qwen3"),
    "tiny-qwen3-moe": _tiny("qwen3_moe", **_QWEN_MOE),
    "tiny-gemma2": _tiny("gemma2", **_GEMMA, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "tiny-gemma3": _tiny("gemma3_text", **_GEMMA, sliding_window_pattern=2, rope_local_base_freq=1000.0),
    "tiny-olmo2": _tiny("olmo2"),
    "tiny-phi3": _tiny("phi3"),
}


def make_folder(name: str, parent: Path, seed: int = 0) -> Path:
    """The folder of a model; made in `parent` unless it is there. Raises SourceError for a name that is not known, and OSError."""
    if name not in SHAPES:
        raise SourceError(f"the model source `random:{name}` has no known shape; expected one of: {', '.join(SHAPES)}")
    files = _files(name, seed)
    digest = hashlib.blake2b(msgspec.json.encode(sorted(files.items())), digest_size=6).hexdigest()
    folder = parent / f"{name}-{digest}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))
        for file_name, text in files.items():
            (part / file_name).write_text(text, encoding="utf-8")
        try:
            part.rename(folder)
        except OSError:
            shutil.rmtree(part)
            if not folder.is_dir():  # it is, if another start was first, with the same content
                raise
    return folder


def _files(name: str, seed: int) -> dict[str, str]:
    shape = SHAPES[name]
    names = {"bos_token": _SPECIALS[0], "eos_token": _SPECIALS[1], "add_bos_token": True, "chat_template": _TEMPLATE}
    return {
        CONFIG: _json(shape | {"bos_token_id": _BEGIN, "eos_token_id": _END, "torch_dtype": "bfloat16"}),
        "generation_config.json": _json({"bos_token_id": _BEGIN, "eos_token_id": _END}),
        "tokenizer.json": _json(_tokenizer(shape["vocab_size"])),
        "tokenizer_config.json": _json(names),
        SEED_FILE: _json({"model": name, "seed": seed}),
    }


def _tokenizer(vocab_size: int) -> _Config:
    """A BPE without merges, so that no text becomes one of the tokens without a use."""
    chars = {byte: char for char, byte in byte_level_alphabet().items()}
    tokens = [*(chars[byte] for byte in range(256)), *_SPECIALS]
    tokens += [f"<{number}>" for number in range(len(tokens), vocab_size)]
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + i, "content": token, **special} for i, token in enumerate(_SPECIALS)],
        "pre_tokenizer": by_bytes,
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }


def _json(value: _Config) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n"
