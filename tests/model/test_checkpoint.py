"""Packed tensors by slot, the same from every format, and files that hold too little, too much, or something else."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from relay.errors import ModelError
from relay.model.checkpoint import Checkpoint, half_split
from relay.model.load import load, open_checkpoint
from relay.model.size import n_weights
from tests.model import tiny
from tests.model.gguf_writing import convert


def edited(name: str, target: Path, *, drop: tuple[str, ...] = (), **add: np.ndarray[Any, Any]) -> Path:
    """A model with some tensors taken away and others put in; `__` for a dot."""
    folder = tiny.changed(name, target)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if key not in drop}
    (folder / "model.safetensors").unlink()
    safetensors.numpy.save_file({**tensors, **{key.replace("__", "."): value for key, value in add.items()}}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", tiny.NAMES)
def test_slots_hold_the_same_bytes_in_either_format(name: str, tmp_path: Path) -> None:
    """q and k of a Llama come back from their interleaved order, experts from their stacks, phi's parts from what is fused."""
    folder, file = open_checkpoint(tiny.folder(name)), open_checkpoint(convert(tiny.folder(name), tmp_path / "m.gguf"))
    assert folder.names == file.names
    n_numbers = 0
    for slot in folder.names:
        n_numbers += int(np.prod(folder.shape(slot)))
        if len(folder.shape(slot)) == 1:
            assert np.array_equal(folder.vector(slot), file.vector(slot)), slot
            continue
        ours, other = folder.matrix(slot), file.matrix(slot)
        assert (ours.type, ours.n_in, ours.n_out) == ("F32", folder.shape(slot)[1], folder.shape(slot)[0])
        assert np.array_equal(ours.rows, other.rows), slot
    assert n_numbers == n_weights(folder.spec)


def test_packed_rows_are_those_of_the_file_and_no_copy(tmp_path: Path) -> None:
    kinds = {"blk.0.ffn_down.weight": "Q4_0", "blk.0.attn_q.weight": "Q8_0"}
    path = convert(tiny.folder("qwen3"), tmp_path / "m.gguf", lambda name: kinds.get(name, "F32"))
    checkpoint = open_checkpoint(path)
    q = checkpoint.matrix("layers.0.q")
    assert (q.type, q.n_in, q.rows.shape) == ("Q8_0", 64, (128, 2 * 34))
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert q.rows.tobytes() == written["blk.0.attn_q.weight"].data.tobytes()
    assert checkpoint.matrix("layers.0.q").rows.ctypes.data == q.rows.ctypes.data
    assert checkpoint.matrix("layers.0.down").type == "Q4_0"


def test_interleaved_rows_are_put_in_order_without_being_unpacked(tmp_path: Path) -> None:
    path = convert(tiny.folder("llama"), tmp_path / "m.gguf", lambda name: "Q8_0" if "attn_q" in name else "F32")
    right = safetensors.numpy.load_file(tiny.folder("llama") / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    packed = gguf.quants.quantize(right, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(open_checkpoint(path).matrix("layers.1.q").rows, packed)
    assert half_split(16, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_norms_of_gemma_are_what_a_row_is_multiplied_with() -> None:
    held = safetensors.numpy.load_file(tiny.folder("gemma3") / "model.safetensors")
    checkpoint = open_checkpoint(tiny.folder("gemma3"))
    for slot, tensor in (("final_norm", "model.norm"), ("layers.1.q_norm", "model.layers.1.self_attn.q_norm")):
        assert np.array_equal(checkpoint.vector(slot), held[f"{tensor}.weight"] + np.float32(1))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_vectors_of_half_width_are_read(kind: str, tmp_path: Path) -> None:
    folder = tiny.changed("qwen2", tmp_path / "m")
    tensors = {name: torch.from_numpy(value) for name, value in safetensors.numpy.load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    safetensors.torch.save_file({name: value.to(dtype) for name, value in tensors.items()}, folder / "model.safetensors")
    weights = load(folder)
    assert torch.equal(weights.final_norm, tensors["model.norm.weight"].to(dtype).float())
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].to(dtype).float())
    bias = weights.layers[1].qkv_bias
    assert bias is not None
    assert torch.equal(bias[:128], tensors["model.layers.1.self_attn.q_proj.bias"].to(dtype).float())


def test_a_second_copy_of_a_tied_matrix_is_no_obstacle(tmp_path: Path) -> None:
    """vllm#6758: a tied model whose file has lm_head as well. The config says which one counts."""
    copy = edited(
        "llama", tmp_path / "a", lm_head__weight=np.zeros((256, 64), np.float32), model__rotary_emb__inv_freq=np.ones(32, np.float32)
    )
    weights = load(copy)
    assert weights.head is weights.embedding
    assert torch.equal(weights.embedding, load(tiny.folder("llama")).embedding)


def test_a_model_without_output_matrix_uses_its_embeddings(smollm2_path: Path) -> None:
    """sglang#1508: with `tie_word_embeddings` passed over, SmolLM speaks gibberish. The GGUF file has no output.weight."""
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.spec.tied_embeddings
    assert "head" not in checkpoint.names


def test_what_is_missing_misshapen_or_unread_is_refused_by_name(tmp_path: Path) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    for i, (folder, says) in enumerate(
        [
            (edited("llama", tmp_path / "a", drop=(gone,)), f"the tensor `{gone}` is missing"),
            (
                edited("llama", tmp_path / "b", model__norm__weight=np.ones(63, np.float32)),
                r"`model\.norm\.weight` has shape \[63\]; expected \[64\]",
            ),
            (edited("llama3_rope", tmp_path / "c", drop=("lm_head.weight",)), r"`lm_head\.weight` is missing"),
            (
                edited("llama", tmp_path / "d", model__layers__0__self_attn__q_proj__bias=np.ones(256, np.float32)),
                r"reads 1 .*q_proj\.bias",
            ),
        ]
    ):
        with pytest.raises(ModelError, match=says) as refused:
            open_checkpoint(folder)
        assert str(tmp_path) in str(refused.value), i


def test_every_type_in_a_mixed_file_is_read_or_named(tmp_path: Path) -> None:
    """rknn-llm#100: a file called Q4_0 has other types in it too. All that cannot be read are named at once."""
    kinds = {"blk.0.ffn_down.weight": "Q5_0", "blk.1.ffn_down.weight": "Q5_0", "blk.0.attn_k.weight": "Q5_1", "blk.0.attn_q.weight": "Q4_0"}
    path = convert(tiny.folder("llama"), tmp_path / "m.gguf", lambda name: kinds.get(name, "Q8_0"))
    with pytest.raises(ModelError, match=r"Q5_1 \(1 tensors, such as `blk\.0\.attn_k\.weight`\), Q5_0 \(2 tensors") as refused:
        open_checkpoint(path)
    assert "Expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K, Q6_K" in str(refused.value)


def test_fp8_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny.changed("llama", tmp_path / "m")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    eight = {
        name: torch.from_numpy(value).to(torch.float8_e4m3fn) if value.ndim == 2 else torch.from_numpy(value)
        for name, value in tensors.items()
    }
    (folder / "model.safetensors").unlink()
    safetensors.torch.save_file(eight, folder / "model.safetensors")
    with pytest.raises(ModelError, match="F8_E4M3"):
        open_checkpoint(folder)


def test_the_real_file_holds_its_three_types(smollm2_path: Path) -> None:
    """rknn-llm#100: our Q4_1 file has F32, Q4_1 and Q8_0 in it."""
    checkpoint: Checkpoint = open_checkpoint(smollm2_path)
    kinds = {checkpoint.matrix(name).type for name in checkpoint.names if len(checkpoint.shape(name)) == 2}
    assert kinds == {"Q4_1", "Q8_0"}
    assert checkpoint.vector("final_norm").dtype == np.float32
