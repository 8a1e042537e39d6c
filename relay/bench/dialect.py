"""What a server takes beyond the least of OpenAI's API, and the JSON bodies made for it."""

from typing import Any, Literal

import msgspec

EndpointName = Literal["completions", "chat"]
SamplingName = Literal["greedy", "default"]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What the server's own counts say: tokens of a word, and those that it adds to every prompt (chat template, beginning of text)."""

    tokens_per_word: float
    added_tokens: int


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """`calibration` is None where prompts are token ids. `usage`: whether a last chunk with token counts can be had."""

    endpoint: EndpointName
    model: str
    ignore_eos: bool = True
    usage: bool = True
    calibration: Calibration | None = None
    max_context: int | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, prompt: list[int] | str, output_tokens: int, *, sampling: SamplingName, stream: bool = True) -> bytes:
        """`greedy` is temperature 0; `default` leaves sampling to the server."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if sampling == "greedy":
            fields["temperature"] = 0
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if stream:
            fields["stream"] = True
            if self.usage:
                fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)
