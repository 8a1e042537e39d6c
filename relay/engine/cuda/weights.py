"""A model on a device: its matrices as the kernels stream them, its vectors in the step's type, the angles of its rope."""

from dataclasses import dataclass

import torch
from torch import Tensor

from relay.engine.cuda.matrices import DenseMatrix, Matrix, MatrixLoader, Product
from relay.engine.cuda.served import check_served
from relay.errors import ModelError
from relay.kernels.device_runtime import Runtime
from relay.model.checkpoint import Checkpoint
from relay.model.rope import Rope
from relay.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """q_norm, k_norm: [head_dim], or None; with them `qkv` has q, k and v apart."""

    attn_norm: Tensor
    qkv: Product
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Product
    ffn_norm: Tensor
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """embedding: [vocab_size, hidden], dense, to look up in. cos, sin: float32 [n_positions, head_dim / 2]."""

    spec: ModelSpec
    dtype: torch.dtype
    embedding: Tensor
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor
    head: Matrix
    cos: Tensor
    sin: Tensor

    @property
    def exact(self) -> bool:
        """Whether no matrix is multiplied by cuBLAS: those that are packed never are."""
        products = [product for each in self.layers for product in (each.qkv, each.attn_out, each.gate_up, each.down)]
        return all(matrix.exact for matrix in (self.head, *(part for product in products for part in product.parts)))


def load_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, runtime: Runtime, *, max_rows: int, max_context: int, exact: bool = True
) -> DeviceWeights:
    """max_rows: of a step. exact: matrices by our kernel, whose bits don't depend on the batch, or by cuBLAS. Raises ModelError."""
    spec = checkpoint.spec
    check_served(spec)
    loader = MatrixLoader(checkpoint, dtype, runtime, exact=exact)
    widest = max(spec.n_heads * spec.head_dim, spec.ffn)
    scratch = torch.empty(max_rows * widest, dtype=dtype, device=runtime.place)

    def product(*names: str, apart: bool = False) -> Product:
        return Product(loader.parts(names, apart=apart), scratch, runtime)

    def norm(name: str) -> Tensor:
        found = loader.vector(name)
        if found is None:
            raise ModelError(f"the model has no `{name}`")
        return found

    layers = []
    for prefix in (f"layers.{i}." for i in range(spec.n_layers)):
        q_norm = loader.vector(f"{prefix}q_norm")
        layers.append(
            DeviceLayer(
                attn_norm=norm(f"{prefix}attn_norm"),
                qkv=product(f"{prefix}q", f"{prefix}k", f"{prefix}v", apart=q_norm is not None),
                q_norm=q_norm,
                k_norm=loader.vector(f"{prefix}k_norm"),
                attn_out=product(f"{prefix}attn_out"),
                ffn_norm=norm(f"{prefix}ffn_norm"),
                gate_up=product(f"{prefix}gate", f"{prefix}up"),
                down=product(f"{prefix}down"),
            )
        )
    embedding = loader.dense("embedding")
    (head,) = loader.parts(["embedding" if spec.tied_embeddings else "head"])
    if spec.tied_embeddings and isinstance(head, DenseMatrix):
        head = DenseMatrix(embedding, None, runtime, exact=exact)  # once
    rope = Rope(spec.rope, spec.head_dim, max_context)
    return DeviceWeights(
        spec=spec,
        dtype=dtype,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=norm("final_norm"),
        head=head,
        cos=rope.cos.to(runtime.place),
        sin=rope.sin.to(runtime.place),
    )
