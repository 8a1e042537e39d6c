"""`POST /v1/completions`: a body in, a validated `CompletionRequest` out.

Choices of prompt p have the indices p * n to p * n + n - 1. With `echo`, `max_tokens` may be 0: the answer is the prompt, and with
`logprobs` its log probabilities.
"""

import msgspec

from relay.errors import InvalidRequest
from relay.openai.body import parse_object
from relay.openai.fields import Fields
from relay.openai.options import MOST_CHOICES, Options, read_options, refuse_ids_beyond
from relay.openai.prompt import Prompt, read_prompts
from relay.openai.sampling import read_completion_logprobs
from relay.openai.unserved import COMPLETION, refuse_unserved

MOST_SEQUENCES = 4096


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Each prompt is text still to be tokenized, or token ids."""

    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool

    @property
    def prompt_logprobs(self) -> int:
        """As `Admit` has it: -1 for none, else how many alternatives for each token of the prompt."""
        return self.options.logprobs if self.echo and self.options.logprobs is not None else -1

    def check(self, vocab_size: int) -> None:
        """Raises InvalidRequest if it names token ids that the model does not have."""
        self.options.check(vocab_size)
        for i, prompt in enumerate(self.prompts):
            if isinstance(prompt, tuple):
                refuse_ids_beyond(f"prompt[{i}]" if len(self.prompts) > 1 else "prompt", prompt, vocab_size)


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest."""
    fields = Fields(parse_object(body))
    refuse_unserved(fields, COMPLETION)
    prompts = read_prompts(fields)
    echo = fields.flag("echo", False)
    options = read_options(
        fields,
        logprobs=read_completion_logprobs(fields),
        least_tokens=0 if echo else 1,
        best_of=fields.integer("best_of", 1, MOST_CHOICES, None),
    )
    if len(prompts) * options.best_of > MOST_SEQUENCES:
        sequences = f"{len(prompts)} prompts for {options.best_of} choices each"
        raise InvalidRequest(f"`prompt` has {sequences}; at most {MOST_SEQUENCES} sequences run for one request", param="prompt")
    return CompletionRequest(options=options, prompts=prompts, echo=echo)
