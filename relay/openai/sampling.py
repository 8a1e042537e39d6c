"""The fields that say how tokens are drawn: a body's fields in, a `Sampling` template out; the gateway fills in seed and choice.

Ranges are OpenAI's, wider where users of other servers go further: temperature up to 100, `top_k` 0 or -1 for off, `min_p`,
`repetition_penalty` from 0.01 (below that the model's numbers overflow) to 10. A value is honoured or refused, never clipped and never
ignored.
"""

from relay.errors import InvalidRequest
from relay.messages import Sampling
from relay.openai.body import shown
from relay.openai.fields import INT32, INT64, Fields, wrong

MOST_BIASES = 4096
MOST_LOGPROBS = 20


def read_sampling(fields: Fields, logprobs: int | None) -> Sampling:
    """`logprobs` is None for off, else how many alternatives. Raises InvalidRequest."""
    top_p, top_k = fields.number("top_p", 0, 1, 1.0), max(0, fields.integer("top_k", -1, INT32, 0))
    if top_p == 0:
        top_p, top_k = 1.0, 1  # the least set of tokens with any chance at all is the likeliest alone
    return Sampling(
        temperature=fields.number("temperature", 0, 100, 1.0),
        top_p=top_p,
        top_k=top_k,
        min_p=fields.number("min_p", 0, 1, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10, 1.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(fields),
        logprobs=-1 if logprobs is None else logprobs,
    )


def read_seed(fields: Fields) -> int | None:
    """Any 64-bit integer, negative ones too. Raises InvalidRequest."""
    return fields.integer("seed", -INT64 - 1, INT64, None)


def read_chat_logprobs(fields: Fields) -> int | None:
    """`logprobs` switches on, `top_logprobs` counts: off is None, on alone is 0. Raises InvalidRequest."""
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS, 0)
    if fields.flag("logprobs", False):
        return top
    if top:
        raise InvalidRequest(f"`top_logprobs` is {top} without logprobs; send `logprobs`: true with it", param="top_logprobs")
    return None


def read_completion_logprobs(fields: Fields) -> int | None:
    """A count: 0 gives the chosen token's alone. Raises InvalidRequest."""
    return fields.integer("logprobs", 0, MOST_LOGPROBS, None)


def refuse_biases_beyond(sampling: Sampling, vocab_size: int) -> None:
    """Raises InvalidRequest if a bias is for an id that the model does not have."""
    for token, _ in sampling.logit_bias:
        if token >= vocab_size:
            raise InvalidRequest(
                f'`logit_bias` has the key "{token}"; token ids of this model go from 0 to {vocab_size - 1}', param="logit_bias"
            )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    biases = fields.object("logit_bias")
    if biases is None:
        return ()
    given = fields.get("logit_bias")
    if len(given) > MOST_BIASES:
        raise InvalidRequest(f"`logit_bias` has {len(given)} keys; at most {MOST_BIASES} are taken", param="logit_bias")
    pairs = []
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequest(f"`logit_bias` has the key {shown(key)}; expected a token id in decimal digits", param="logit_bias")
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise wrong(f"logit_bias.{key}", "a number from -100 to 100", value)
        pairs.append((int(key), float(value)))
    return tuple(sorted(pairs))
