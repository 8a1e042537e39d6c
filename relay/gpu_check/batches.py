"""Steps for sections that run a whole model. Needs msgspec."""

import numpy as np

from relay.engine.runner import Batch, Draw
from relay.messages import Sampling

_GREEDY = Sampling(temperature=0.0)


def decoding(n: int, context: int) -> Batch:
    """n sequences, each computing its token number `context`."""
    blocks = -(-context // 16)
    return Batch(
        tokens=(np.arange(n) % 251).astype(np.int32),
        positions=np.full(n, context - 1, np.int32),
        sequence=np.arange(n, dtype=np.int32),
        block_table=np.arange(n * blocks, dtype=np.int32).reshape(n, blocks),
        logit_rows=np.arange(n, dtype=np.int32),
        draws=tuple(Draw(_GREEDY, 0.0, [0] * context, context) for _ in range(n)),
    )


def prompt(n: int, begin: int = 0) -> Batch:
    """Rows `begin` to n of one prompt; the last is drawn."""
    return Batch(
        tokens=(np.arange(begin, n) * 7 % 251).astype(np.int32),
        positions=np.arange(begin, n, dtype=np.int32),
        sequence=np.zeros(n - begin, np.int32),
        block_table=np.arange(-(-n // 16), dtype=np.int32)[None],
        logit_rows=np.array([n - begin - 1], np.int32),
        draws=(Draw(_GREEDY, 0.0, [0] * n, n),),
    )
