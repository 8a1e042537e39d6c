"""What a waiting attempt takes in the router's memory. Pure."""

from relay.messages import Admit, Sampling, Stopping

_ADMIT_BYTES, _ID_BYTES, _BIAS_BYTES, _SCORE_BYTES, _TOP_BYTES = 2048, 40, 128, 160, 72


def admit_bytes(admit: Admit) -> int:
    """At most."""
    scores = len(admit.logprobs) * (_SCORE_BYTES + _TOP_BYTES * max(0, admit.sampling.logprobs))
    envelope = len(admit.resumable.envelope) if admit.resumable is not None else 0
    return fresh_bytes(len(admit.tokens), admit.sampling, admit.stopping) + scores + envelope


def fresh_bytes(n_prompt: int, sampling: Sampling, stopping: Stopping) -> int:
    """Of a first attempt, but for its envelope. Token ids are objects of their own there, and so are the pairs of a bias."""
    return _ADMIT_BYTES + _ID_BYTES * (n_prompt + len(stopping.stop_ids)) + _BIAS_BYTES * len(sampling.logit_bias)
