"""The `usage` object of responses and streams."""

import msgspec


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request: each prompt once, whatever its number of choices; of `best_of` all that were drawn."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage(*, prompt: int, completion: int, cached: int) -> Usage:
    """`cached` of the `prompt` tokens were not computed again."""
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached))
