"""Which models the CUDA runner computes. No torch: it is asked before anything starts."""

from typing import Final

from relay.errors import ModelError
from relay.model.spec import ModelSpec

HEAD_DIMS: Final = (64, 96, 128, 256)
_OUTPUTS: Final = 8


def check_served(spec: ModelSpec) -> None:
    """Raises ModelError, saying what is not served."""
    traits = spec.traits
    lacking = {
        "experts": spec.n_experts > 0,
        "norms at the outputs of a layer": traits.post_norms or not traits.pre_norms,
        "norms of q and k over all heads": traits.qk_norm == "width",
        "scaled embeddings": traits.scaled_embedding,
        "a soft cap of its logits": spec.final_softcap > 0,
        "layers with angles of their own": spec.local_rope is not None,
        f"heads of width {spec.head_dim} (expected {', '.join(map(str, HEAD_DIMS))})": spec.head_dim not in HEAD_DIMS,
        f"a vocabulary of {spec.vocab_size}, not a multiple of {_OUTPUTS}": spec.vocab_size % _OUTPUTS > 0,
        f"rows of {spec.hidden} and {spec.ffn}, not multiples of {_OUTPUTS}": spec.hidden % _OUTPUTS + spec.ffn % _OUTPUTS > 0,
    }
    found = [what for what, there in lacking.items() if there]
    if found:
        raise ModelError(f"the CUDA kernels do not serve this {spec.architecture} model: it has {'; '.join(found)}. device: cpu serves it")
