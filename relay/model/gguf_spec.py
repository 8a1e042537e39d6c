"""A `ModelSpec` out of the metadata of a GGUF file.

Keys that would be computed wrongly are refused by name. What the format leaves out is what llama.cpp, which defines it, takes for granted:
the period of Gemma's windows, the base of Gemma 3's local rope, and the query scale of the two models whose heads it differs for.
"""

from collections.abc import Callable
from typing import Final

from relay.errors import ModelError
from relay.model.gguf_metadata import GGUFHeader
from relay.model.keys import MOST_EXPERTS, MOST_LAYERS, Keys
from relay.model.rope_spec import Divisors, Linear, RopeSpec, Yarn, yarn_magnitude
from relay.model.spec import ARCHITECTURES, Architecture, ModelSpec, checked, served_names

_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}  # their query scale is (hidden / n_heads)^-0.5, and no key says so
ROPE_FREQS: Final = "rope_freqs.weight"


def spec_from_gguf(header: GGUFHeader, divisors: Callable[[], tuple[float, ...]] | None = None) -> ModelSpec:
    """Read a spec; `divisors` reads the tensor `rope_freqs.weight`. Raises ModelError with the key, what it says and what is served."""
    kind = header.metadata.get("general.architecture")
    keys = Keys(header.metadata, f"{kind}.")
    name = _name(kind, keys)
    row = ARCHITECTURES[name]
    if "token_embd.weight" not in header.tensors:
        raise ModelError("the tensor `token_embd.weight` is missing: the file holds no complete model; fetch it again")
    hidden, n_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    n_layers = keys.count("block_count", most=MOST_LAYERS)
    head_dim = keys.count("attention.key_length", hidden // n_heads or None)
    _refuse_unserved(keys, row, head_dim)
    is_27b = _LAYERS_OF_27B.get(name) == n_layers
    windows = _windows(keys, row, n_layers)
    rope = _rope(keys, head_dim, divisors if ROPE_FREQS in header.tensors else None)
    n_experts = keys.count("expert_count", most=MOST_EXPERTS) if row.experts else 0
    ffn_key = "expert_feed_forward_length" if row.experts == "qwen" else "feed_forward_length"
    return checked(
        ModelSpec(
            architecture=name,
            n_layers=n_layers,
            hidden=hidden,
            n_heads=n_heads,
            n_kv_heads=keys.count("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            ffn=keys.count(ffn_key),
            vocab_size=header.tensors["token_embd.weight"].shape[0],
            rope=rope,
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
            max_context=keys.count("context_length"),
            tied_embeddings="output.weight" not in header.tensors,
            attn_scale=(hidden / n_heads if is_27b else head_dim) ** -0.5,
            windows=windows,
            local_rope=RopeSpec(theta=keys.positive("rope.freq_base_swa", 10000.0)) if name == "gemma3" else None,
            attn_softcap=keys.limit("attn_logit_softcapping") if row.capped else 0.0,
            final_softcap=keys.limit("final_logit_softcapping") if row.capped else 0.0,
            n_experts=n_experts,
            n_used=keys.count("expert_used_count") if row.experts else 0,
        )
    )


def _name(kind: object, keys: Keys) -> str:
    """Llama, Mistral and Mixtral are one architecture to GGUF."""
    if kind == "llama":
        return "mixtral" if keys.size("expert_count") else "llama"
    found = [name for name, row in ARCHITECTURES.items() if row.gguf == kind]
    if not found:
        raise ModelError(f"the architecture `{kind}` is not served; expected `general.architecture` to be {served_names('gguf')}")
    return found[0]


def _refuse_unserved(keys: Keys, row: Architecture, head_dim: int) -> None:
    keys.expect("attention.value_length", head_dim, "K and V heads of one width are served")
    keys.expect("rope.dimension_count", head_dim, "rope over the whole head is served")
    keys.expect("expert_shared_count", 0, "experts without a shared one are served")
    keys.expect("expert_weights_scale", 1.0, "experts whose weights sum to one are served")
    keys.expect("expert_weights_norm", True, "experts whose weights sum to one are served")
    keys.expect("expert_gating_func", 1, "experts chosen by softmax are served")
    if not row.experts:
        keys.expect("expert_count", 0, "this architecture is served without experts")
    if row.gguf != "llama" and row.windows not in ("every", "periodic"):
        keys.expect("attention.sliding_window", 0, "this architecture is served with attention to the whole context")


def _windows(keys: Keys, row: Architecture, n_layers: int) -> tuple[int, ...]:
    size = keys.size("attention.sliding_window")
    period = row.period
    if row.windows == "periodic":
        size = size or (4096 if row.gguf == "gemma2" else 0)
        period = keys.count("attention.sliding_window_pattern", row.period)
    return tuple(0 if period and (i + 1) % period == 0 else size for i in range(n_layers))


def _rope(keys: Keys, head_dim: int, divisors: Callable[[], tuple[float, ...]] | None) -> RopeSpec:
    theta = keys.positive("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type") or "none"
    if divisors is not None:
        keys.expect("rope.scaling.type", "none", f"a file with the tensor `{ROPE_FREQS}` is served where nothing else scales its rope")
        values = divisors()
        if len(values) != head_dim // 2 or not all(0 < value < float("inf") for value in values):
            raise ModelError(f"the tensor `{ROPE_FREQS}` has {len(values)} divisors; expected {head_dim // 2} numbers above 0")
        return RopeSpec(theta=theta, scaling=Divisors(values))
    match kind:
        case "none":
            return RopeSpec(theta=theta)
        case "linear":
            return RopeSpec(theta=theta, scaling=Linear(keys.positive("rope.scaling.factor")))
        case "yarn":
            keys.expect("rope.scaling.attn_factor", 1.0, "YaRN with its own magnitude is served")
            keys.expect("rope.scaling.yarn_log_multiplier", 0.0, "YaRN with its own magnitude is served")
            factor = keys.positive("rope.scaling.factor")
            yarn = Yarn(
                factor=factor,
                original=keys.count("rope.scaling.original_context_length"),
                beta_fast=keys.positive("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=keys.positive("rope.scaling.yarn_beta_slow", 1.0),
                magnitude=yarn_magnitude(factor),
            )
            return RopeSpec(theta=theta, scaling=yarn)
    raise ModelError(f"`{keys.prefix}rope.scaling.type` is {kind!r}; expected none, linear or yarn: use another model")
