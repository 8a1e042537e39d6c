"""What chaos clients ask: a mix of everything whose continuation must be exact, the same every time."""

from typing import Any

import msgspec

SHARED = (
    "The old lighthouse keeper wrote in his book every evening, and this is what he wrote: the sea was calm, the wind came from the west. "
)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `kind` names what it exercises."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def specs(n_tokens: int) -> list[Spec]:
    """The mix; each answer has up to `n_tokens` tokens. All but one stream."""
    base = {"max_tokens": n_tokens, "temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    seeded = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
    chat = [{"role": "user", "content": "Tell me something about rivers and the towns beside them."}]
    found: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {"prompt": "The history of bread begins"}),
        ("greedy, longer prompt", {"prompt": "Once upon a time there was a small village by the sea. " * 3}),
        ("seeded", {"prompt": "The best thing about the winter is", "seed": 7, **seeded}),
        ("seeded, another", {"prompt": "My neighbour has a dog that", "seed": 11, **seeded}),
        ("n = 2", {"prompt": "A short poem about the moon:", "n": 2, "seed": 3, **seeded}),
        (
            "penalties",
            {"prompt": "red blue red blue red blue", "frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.1},
        ),
        ("stop string", {"prompt": "one, two, three, four, five,", "stop": [" eleven", "\n\n"]}),
        ("logprobs", {"prompt": "The capital of France is", "logprobs": 3}),
        ("max_tokens 1", {"prompt": "The sky is", "max_tokens": 1}),
        ("shared prefix", {"prompt": SHARED + "Then one day"}),
        ("shared prefix, seeded", {"prompt": SHARED + "But later", "seed": 5, **seeded}),
        ("not streamed", {"prompt": SHARED + "In the end", "stream": False, "stream_options": None}),
    ]
    completions = [Spec(kind=kind, path="/v1/completions", body={**base, **more}) for kind, more in found]
    return [*completions, Spec(kind="chat", path="/v1/chat/completions", body={**base, "messages": chat})]
