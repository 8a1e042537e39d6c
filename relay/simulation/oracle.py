"""What a request must be answered if nothing goes wrong: the modelled runner's tokens, from its prompt alone."""

from dataclasses import dataclass

from relay.engine.keyed_random import uniform
from relay.engine.modelled_runner import Oracle
from relay.messages import FinishReason, Sampling, Stopping


@dataclass(frozen=True, slots=True)
class Answer:
    ids: tuple[int, ...]
    finish: FinishReason


def answer(prompt: tuple[int, ...], sampling: Sampling, stopping: Stopping, vocab_size: int, n_layers: int) -> Answer:
    oracle, ids = Oracle(vocab_size, n_layers), list[int]()
    for token in prompt:
        oracle.push(token)
    while True:
        position = len(prompt) + len(ids)
        token = oracle.next_token(uniform(sampling.seed, sampling.choice, position) if sampling.temperature > 0 else 0.0)
        ids.append(token)
        oracle.push(token)
        if token in stopping.stop_ids and len(ids) > stopping.min_tokens:
            return Answer(tuple(ids), "stop")
        if len(ids) >= stopping.max_tokens:
            return Answer(tuple(ids), "length")
