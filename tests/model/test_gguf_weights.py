"""Weights from small GGUF files made here with the format's own writer."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relay.errors import ModelError
from relay.model.gguf_weights import half_split, load_gguf

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 16, 96, 50
Arrays = dict[str, NDArray[np.float32]]


def arrays() -> Arrays:
    """A model of one layer in the order of rows that training left: pairs half a head apart."""
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def interleaved(rows: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """What converters to GGUF do to q and k of a Llama."""
    return rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, tensors: Arrays, type_of: dict[str, str] | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, values in tensors.items():
        n_heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        stored = interleaved(values, n_heads) if n_heads else values
        kind = gguf.GGMLQuantizationType[(type_of or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_tensor_lands_in_its_place(tmp_path: Path) -> None:
    found = load_gguf(write(tmp_path / "m.gguf", arrays()))
    expected = {name.removesuffix(".weight"): torch.from_numpy(values) for name, values in arrays().items()}
    layer = found.layers[0]
    pairs = [
        (found.embedding, expected["token_embd"]),
        (found.final_norm, expected["output_norm"]),
        (layer.attn_norm, expected["blk.0.attn_norm"]),
        (layer.ffn_norm, expected["blk.0.ffn_norm"]),
        (layer.qkv, torch.cat([expected[f"blk.0.attn_{name}"] for name in "qkv"])),
        (layer.attn_out, expected["blk.0.attn_output"]),
        (layer.gate_up, torch.cat([expected[f"blk.0.ffn_{name}"] for name in ("gate", "up")])),
        (layer.down, expected["blk.0.ffn_down"]),
    ]
    for tensor, right in pairs:
        assert torch.equal(tensor, right)
    assert found.head is found.embedding


def test_an_output_matrix_of_its_own_is_used(tmp_path: Path) -> None:
    own = np.ones((VOCAB, HIDDEN), np.float32)
    found = load_gguf(write(tmp_path / "m.gguf", {**arrays(), "output.weight": own}))
    assert torch.equal(found.head, torch.from_numpy(own))
    assert not found.spec.tied_embeddings


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_packed_types_are_unpacked_as_the_format_says(tmp_path: Path, kind: str) -> None:
    names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight")
    found = load_gguf(write(tmp_path / "m.gguf", arrays(), dict.fromkeys(names, kind)))
    qtype = gguf.GGMLQuantizationType[kind]
    embedding, q, down = (gguf.quants.dequantize(gguf.quants.quantize(arrays()[name], qtype), qtype) for name in names)
    assert np.array_equal(found.embedding.numpy(), embedding)
    assert np.array_equal(found.layers[0].qkv[: HEADS * HEAD_DIM].numpy(), q)
    assert np.array_equal(found.layers[0].down.numpy(), down)
    assert not np.array_equal(down, arrays()[names[2]])


def test_rows_of_rope_pairs_are_put_half_a_head_apart() -> None:
    rows = torch.arange(16.0)[:, None]
    assert half_split(rows, 8).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_a_missing_an_unread_and_a_misshapen_tensor_are_refused_by_name(tmp_path: Path) -> None:
    missing = {name: values for name, values in arrays().items() if name != "blk.0.ffn_up.weight"}
    extra = {**arrays(), "blk.0.attn_q.bias": np.zeros(HEADS * HEAD_DIM, np.float32)}
    misshapen = {**arrays(), "output_norm.weight": np.zeros(HIDDEN + 1, np.float32)}
    for tensors, name in ((missing, "blk.0.ffn_up.weight"), (misshapen, "output_norm.weight")):
        with pytest.raises(ModelError, match=name):
            load_gguf(write(tmp_path / "m.gguf", tensors))
    del extra["blk.0.attn_q.bias"]
    extra["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, np.float32)
    with pytest.raises(ModelError, match="rope_freqs"):
        load_gguf(write(tmp_path / "m.gguf", extra))


def test_a_type_that_is_not_unpacked_here_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"blk\.0\.attn_output\.weight.*Q5_0"):
        load_gguf(write(tmp_path / "m.gguf", arrays(), {"blk.0.attn_output.weight": "Q5_0"}))


def test_the_real_model_loads_whole(smollm2_path: Path) -> None:
    weights = load_gguf(smollm2_path)
    assert len(weights.layers) == weights.spec.n_layers == 30
    assert weights.embedding.shape == (49152, 576)
