"""What a chat and a completion request have in common, validated: counts, sampling, stops, streaming, placement.

`max_tokens` is the most of one choice; None leaves it to the server. `max_completion_tokens` is its newer name: both may be sent if they
are equal, and are refused otherwise, because obeying either would break the other's promise.
"""

from typing import Any

import msgspec

from relay.errors import InvalidRequest
from relay.messages import Sampling
from relay.openai.body import shown
from relay.openai.fields import INT32, INT64, Fields, wrong
from relay.openai.sampling import read_sampling, read_seed, refuse_biases_beyond

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024  # of one
MOST_STOP_CHARACTERS_IN_ALL = 4096  # a state of their automaton each
MOST_STOP_IDS = 128


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`sampling` is a template: the gateway fills in `seed` (this one, or its own where None) and `choice`.

    `n` choices are answered out of the `best_of` that are drawn. `logprobs` is what the client asked for, None for nothing;
    `sampling.logprobs` is what must be computed for it, which is more where `best_of` choices are ranked.
    """

    model: str | None
    n: int
    best_of: int
    sampling: Sampling
    seed: int | None
    logprobs: int | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    include_stop: bool
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    salt: str

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest if it names token ids that the model does not have."""
        refuse_biases_beyond(self.sampling, vocab_size)
        refuse_ids_beyond("stop_token_ids", self.stop_ids, vocab_size)


def read_options(fields: Fields, *, logprobs: int | None, least_tokens: int, best_of: int | None) -> Options:
    """`least_tokens` is the smallest `max_tokens` allowed, `best_of` None where it does not apply. Raises InvalidRequest."""
    n = fields.integer("n", 1, MOST_CHOICES, 1)
    stream = fields.flag("stream", False)
    drawn = n if best_of is None else best_of
    if drawn < n:
        raise wrong("best_of", f"at least `n`, which is {n}", drawn)
    if drawn > n and stream:
        raise InvalidRequest(
            f"`best_of` is {drawn} with `stream`; the best of them is known at the end only: leave one out", param="best_of"
        )
    max_tokens = _max_tokens(fields, least_tokens)
    min_tokens = fields.integer("min_tokens", 0, INT32, 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise wrong("min_tokens", f"at most `max_tokens`, which is {max_tokens}", min_tokens)
    include_usage, continuous_usage = _stream_options(fields, stream)
    model = fields.string("model", 256, None)
    if model == "":
        raise wrong("model", "the name of a model", model)
    return Options(
        model=model,
        n=n,
        best_of=drawn,
        sampling=read_sampling(fields, 0 if logprobs is None and drawn > n else logprobs),
        seed=read_seed(fields),
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos", False),
        stop=_stop(fields),
        stop_ids=_stop_ids(fields),
        include_stop=fields.flag("include_stop_str_in_output", False),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        priority=fields.integer("priority", -INT64 - 1, INT64, 0),
        salt=fields.string("cache_salt", 256, ""),
    )


def refuse_ids_beyond(param: str, ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidRequest for the first id that is not below `vocab_size`."""
    if ids and max(ids) >= vocab_size:
        i = next(i for i, token in enumerate(ids) if token >= vocab_size)
        raise wrong(f"{param}[{i}]", f"a token id of this model, 0 to {vocab_size - 1}", ids[i])


def refuse_non_ids(param: str, ids: list[Any]) -> None:
    """Raises InvalidRequest for the first item that is not an integer of 0 or more."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0):
        return
    i = next(i for i, token in enumerate(ids) if type(token) is not int or token < 0)
    raise wrong(f"{param}[{i}]", "a token id, an integer of 0 or more", ids[i])


def _max_tokens(fields: Fields, least: int) -> int | None:
    older = fields.integer("max_tokens", least, INT32, None)
    newer = fields.integer("max_completion_tokens", least, INT32, None)
    if older is not None and newer is not None and older != newer:
        raise InvalidRequest(
            f"`max_completion_tokens` is {newer} and `max_tokens` is {older}; send one of them", param="max_completion_tokens"
        )
    return older if newer is None else newer


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """(a last chunk with usage, usage on every chunk); the second only goes with the first, as vLLM has it."""
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise InvalidRequest("`stream_options` is there without `stream`; send `stream`: true with it", param="stream_options")
    include = options.flag("include_usage", False)
    return include, options.flag("continuous_usage_stats", False) and include


def _stop(fields: Fields) -> tuple[str, ...]:
    given = fields.get("stop")
    stops = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS:
        raise fields.wrong("stop", f"a string or an array of at most {MOST_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MOST_STOP_CHARACTERS:
            at = "stop" if isinstance(given, str) else f"stop[{i}]"
            raise InvalidRequest(f"`{at}` is {shown(stop)}; expected a string of 1 to {MOST_STOP_CHARACTERS} characters", param=at)
    if (n_characters := sum(map(len, stops))) > MOST_STOP_CHARACTERS_IN_ALL:
        text = f"the stop strings have {n_characters} characters in all; at most {MOST_STOP_CHARACTERS_IN_ALL} are looked for"
        raise InvalidRequest(text, param="stop")
    return tuple(dict.fromkeys(stops))


def _stop_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.array("stop_token_ids", MOST_STOP_IDS) or []
    refuse_non_ids("stop_token_ids", ids)
    return tuple(dict.fromkeys(ids))
