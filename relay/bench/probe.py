"""Before the load: ask the server what it is called, what it takes, and how many tokens our words are.

Each field that not every server knows is tried by a request of one token, and left out if the server refuses it (400, 422 and the like).
Prompts are token ids only if the server's own count of the prompt agrees: some take an array of numbers for something else.
"""

from itertools import product
from typing import Any

import msgspec

from relay.bench.client import Client
from relay.bench.dialect import Calibration, Dialect, EndpointName
from relay.bench.prompt import PromptMaker
from relay.bench.schedule import Segment
from relay.errors import StartError

_REFUSALS = (400, 404, 405, 415, 422, 500, 501)
_PROBE_TOKENS = 24
_WORDS = (32, 160)
_GUESS = Calibration(tokens_per_word=1.3, added_tokens=0)


class Probe:
    """`low` and `high` bound the token ids that prompts are made of."""

    def __init__(self, client: Client, *, endpoint: EndpointName, model: str | None, seed: int, low: int, high: int) -> None:
        self._client, self._endpoint, self._model = client, endpoint, model
        self._ids = PromptMaker(seed=seed, low=low, high=high, calibration=None)
        self._texts = PromptMaker(seed=seed, low=low, high=high, calibration=_GUESS)
        self.notes: list[str] = []

    async def run(self) -> Dialect:
        """Raises StartError if nothing that we can say is answered."""
        model, max_context = await self._models()
        problem = ""
        for usage, ignore_eos, ids in product((True, False), repeat=3):
            if ids and self._endpoint == "chat":
                continue
            dialect = Dialect(endpoint=self._endpoint, model=model, ignore_eos=ignore_eos, usage=usage, max_context=max_context)
            prompt = self._ids.make((Segment("probe", _PROBE_TOKENS),)) if ids else self._text("probe", _PROBE_TOKENS)
            status, counted, problem = await self._ask(dialect, prompt)
            if status == 200:
                if ids and counted not in (None, _PROBE_TOKENS, _PROBE_TOKENS + 1):
                    continue
                return await self._settled(dialect, ids)
            if status not in _REFUSALS:
                break
        raise StartError(f"the server does not answer a request of one token: {problem}")

    async def _settled(self, dialect: Dialect, ids: bool) -> Dialect:
        if not dialect.ignore_eos:
            self.notes.append("the server takes no ignore_eos: answers may be shorter than asked for")
        if not dialect.usage:
            self.notes.append("the server sends no usage in streams: tokens are counted by chunks")
        if ids:
            return dialect
        if self._endpoint == "completions":
            self.notes.append("the server takes no token ids, or counts them otherwise: prompts are text of about as many tokens")
        return msgspec.structs.replace(dialect, calibration=await self._calibrate(dialect))

    async def _models(self) -> tuple[str, int | None]:
        """The name to ask for, and how many tokens fit if the server says so (`max_model_len`, as vLLM and we have it)."""
        status, body, problem = await self._client.fetch("GET", "/v1/models")
        if not status:
            raise StartError(f"no server answers there ({problem})")
        cards = _cards(body) if status == 200 else []
        if self._model is None and not cards:
            raise StartError(f"the server lists no model ({problem or body[:100]!r}); name one with --model")
        card: dict[str, Any] = next((card for card in cards if self._model in (None, card.get("id"))), {})
        most = card.get("max_model_len")
        return self._model or str(card.get("id")), most if isinstance(most, int) else None

    async def _calibrate(self, dialect: Dialect) -> Calibration:
        """A line through two prompts."""
        counts = []
        for n in _WORDS:
            _, counted, _ = await self._ask(dialect, self._text(f"calibrate {n}", n))
            if counted is None:
                self.notes.append(f"the server counts no tokens: a word is taken for {_GUESS.tokens_per_word}")
                return _GUESS
            counts.append(counted)
        per_word = max(0.1, (counts[1] - counts[0]) / (_WORDS[1] - _WORDS[0]))
        return Calibration(tokens_per_word=per_word, added_tokens=max(0, round(counts[0] - per_word * _WORDS[0])))

    def _text(self, key: str, n: int) -> str:
        return " ".join(self._texts.words(key, n))

    async def _ask(self, dialect: Dialect, prompt: list[int] | str) -> tuple[int, int | None, str]:
        """Status, prompt tokens by the server's count, and what went wrong. As a stream where `stream_options` is on trial."""
        body = dialect.body(prompt, 1, sampling="greedy", stream=False)
        status, answer, problem = await self._client.fetch("POST", dialect.path, body)
        if status == 200 and dialect.usage:
            status, _, problem = await self._client.fetch("POST", dialect.path, dialect.body(prompt, 1, sampling="greedy"))
        return status, _prompt_tokens(answer) if status == 200 else None, problem


def _cards(body: bytes) -> list[dict[str, Any]]:
    try:
        listed = msgspec.json.decode(body)["data"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []
    return [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []


def _prompt_tokens(body: bytes) -> int | None:
    try:
        counted = msgspec.json.decode(body)["usage"]["prompt_tokens"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return counted if isinstance(counted, int) else None
