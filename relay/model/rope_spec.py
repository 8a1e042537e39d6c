"""How positions become angles: the base, and what stretches it to contexts longer than those a model was first trained on.

A head of width d has d/2 pairs; pair i turns by `position * frequency[i]`. Plain: frequency[i] = theta^(-2i/d). Sources of the stretches:
linear, https://arxiv.org/abs/2306.15595; Llama 3, the release's own model card code; YaRN, https://arxiv.org/abs/2309.00071; divisors, the
tensor `rope_freqs.weight` of GGUF files. No torch: kernels of any kind build their tables from these numbers.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray


class Linear(msgspec.Struct, frozen=True, tag=True):
    """Every frequency divided by one factor."""

    factor: float


class Llama3(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Wavelengths above `original / low` tokens are divided by the factor, those below `original / high` are left, between them a blend."""

    factor: float
    low: float
    high: float
    original: int


class Yarn(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Pairs that turn more than `beta_fast` times within `original` tokens are left, those under `beta_slow` divided, a ramp between.

    magnitude: multiplies cosines and sines, so that attention is as sharp as it was.
    """

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    magnitude: float


class Divisors(msgspec.Struct, frozen=True, tag=True):
    """Each pair's frequency has its own divisor: [head_dim / 2]."""

    values: tuple[float, ...]


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One set of angles. `scaling`: None is plain."""

    theta: float
    scaling: Linear | Llama3 | Yarn | Divisors | None = None

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.scaling.magnitude if isinstance(self.scaling, Yarn) else 1.0

    def frequencies(self, head_dim: int) -> NDArray[np.float64]:
        """[head_dim / 2], in radians per position."""
        plain: NDArray[np.float64] = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        match self.scaling:
            case None:
                return plain
            case Linear(factor):
                return plain / factor
            case Divisors(values):
                return plain / np.array(values, np.float64)
            case Llama3() as llama3:
                turns = llama3.original * plain / (2 * math.pi)
                kept = np.clip((turns - llama3.low) / (llama3.high - llama3.low), 0.0, 1.0)
                return plain * (kept + (1 - kept) / llama3.factor)
            case Yarn() as yarn:
                first = max(math.floor(self._pair_of(yarn, yarn.beta_fast, head_dim)), 0)
                last = min(math.ceil(self._pair_of(yarn, yarn.beta_slow, head_dim)), head_dim - 1)
                divided = np.clip((np.arange(head_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
                return plain * (1 - divided + divided / yarn.factor)

    def _pair_of(self, yarn: Yarn, turns: float, head_dim: int) -> float:
        """The place of the pair that turns so often within the original context."""
        return head_dim * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def yarn_magnitude(factor: float) -> float:
    """The paper's own, which files leave out: 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
