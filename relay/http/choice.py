"""One choice of an answer: a flight's token ids on one side, text and log probabilities on the other."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from relay.actors.gateway import Flight
from relay.messages import FinishReason, Logprobs
from relay.openai.logprob import Candidate, Scored
from relay.text.detokenizer import Detokenizer
from relay.text.stop import StopChecker, StopStrings
from relay.text.tokenizer import Tokenizer

_AT_ONCE = 64  # tokens: with 20 alternatives each, a millisecond or two


class Seen(NamedTuple):
    """What a client has of a choice already: that many tokens' worth of events, and its finish."""

    n_tokens: int
    finished: bool


class Choice:
    """`pump` is called whenever there may be more; it never waits. `n_tokens` counts those that were used, the one that ends it too;
    `n_shown`, characters of the tokens that came out with log probabilities.

    Text that might be the beginning of a stop string is held back, and so are the log probabilities of its tokens.
    """

    def __init__(
        self,
        index: int,
        flight: Flight,
        tokenizer: Tokenizer,
        *,
        stops: StopStrings,
        include_stop: bool,
        skip_special: bool,
        with_logprobs: bool,
    ) -> None:
        self.index, self.flight = index, flight
        self.finish: FinishReason | None = None
        self.n_tokens = self.n_shown = 0
        self.replay = Seen(0, False)
        self._tokenizer, self._with_logprobs, self._include_stop = tokenizer, with_logprobs, include_stop
        self._detokenizer = Detokenizer(tokenizer, flight.prompt[-4:], skip_special=skip_special)
        self._stop = StopChecker(stops, include_stop=include_stop)
        self._held: deque[tuple[int, Scored]] = deque()  # (where its text ends, the token)
        self._made = self._sent = 0  # characters out of the detokenizer, out of the stop checker
        self.logprob_sum = 0.0

    @property
    def is_behind(self) -> bool:
        """Whether there is more already."""
        return self.finish is None and self.n_tokens < len(self.flight.ids)

    def pump(self) -> tuple[str, list[Scored]]:
        """What is new, or the first of it, as text and (if asked for) tokens; `finish` is set once it is all out. Of what a resumed
        stream's client has seen already nothing comes, but every state is as if it had."""
        if self.n_tokens < self.replay.n_tokens:
            self._pump(self.replay.n_tokens)
            if self.n_tokens < self.replay.n_tokens and self.finish is None:
                return "", []
        return self._pump(len(self.flight.ids))

    def _pump(self, until: int) -> tuple[str, list[Scored]]:
        if self.finish is not None:
            return "", []  # it stopped in what was seen already
        flight, parts, stopped = self.flight, [], False
        ids = flight.ids
        until = min(until, len(ids), self.n_tokens + _AT_ONCE)
        while self.n_tokens < until and not stopped:
            position, token = self.n_tokens, ids[self.n_tokens]
            self.n_tokens += 1
            last = flight.finish == "stop" and self.n_tokens == len(ids)
            if last and not self._include_stop:
                break  # the id that stopped it is not part of the text
            piece = self._detokenizer.push(token)
            self._hold(position, token, piece)
            text, stopped = self._stop.push(piece, may_end=self.n_tokens >= flight.stopping.min_tokens)
            parts.append(text)
        if stopped:
            self.finish = "stop"
        elif flight.finish is not None and self.n_tokens == len(ids):
            rest = self._detokenizer.flush()
            self._made += len(rest)
            if rest and self._held:
                final = self._held.pop()[1]
                self._held.append((self._made, Scored(final.chosen, final.piece + rest, final.top)))
            text, stopped = self._stop.push(rest)
            parts += [text] if stopped else [text, self._stop.flush()]
            self.finish = "stop" if stopped else flight.finish
        text = "".join(parts)
        self._sent += len(text)
        return text, self._release()

    def _hold(self, position: int, token: int, piece: str) -> None:
        if position < len(self.flight.logprobs):
            logprobs = self.flight.logprobs[position]
            self.logprob_sum += logprobs.chosen
            if self._with_logprobs:
                self._held.append((self._made + len(piece), scored(self._tokenizer, token, piece, logprobs)))
        self._made += len(piece)

    def _release(self) -> list[Scored]:
        """Tokens whose text is out; at the end the last one may be cut, and what lies behind a stop string is dropped. Within a character
        the last one stays: should that never be finished, what is shown for it is part of its text."""
        out = []
        stays = 1 if self.finish is None and self._detokenizer.unfinished else 0
        while len(self._held) > stays and self._held[0][0] <= self._sent:
            out.append(self._held.popleft()[1])
        if self.finish is not None and self._held:
            end, token = self._held.popleft()
            keep = len(token.piece) - (end - self._sent)
            if keep > 0:
                out.append(Scored(token.chosen, token.piece[:keep], token.top))
            self._held.clear()
        self.n_shown += sum(len(token.piece) for token in out)
        return out


def scored(tokenizer: Tokenizer, token: int, piece: str, logprobs: Logprobs) -> Scored:
    """One token and its alternatives as people see them."""
    top = tuple(candidate(tokenizer, top_id, value) for top_id, value in zip(logprobs.top_ids, logprobs.top, strict=True))
    return Scored(candidate(tokenizer, token, logprobs.chosen), piece, top)


def candidate(tokenizer: Tokenizer, token: int, logprob: float) -> Candidate:
    raw = tokenizer.token_bytes(token)
    return Candidate(token, raw.decode("utf-8", "replace"), raw, logprob)


def echoed(tokenizer: Tokenizer, flight: Flight, n_added: int) -> Iterator[list[Scored]]:
    """The prompt's tokens with their log probabilities, some at a time; the first has none. The first `n_added` are not the client's: they
    show no text."""
    detokenizer = Detokenizer(tokenizer, (), skip_special=False)
    prompt = flight.prompt
    assert len(flight.scores) == len(prompt) - 1, "a score for each token of the prompt but the first"
    for start in range(0, len(prompt), _AT_ONCE):
        some = []
        for i in range(start, min(start + _AT_ONCE, len(prompt))):
            piece = "" if i < n_added else detokenizer.push(prompt[i])
            if i == len(prompt) - 1:
                piece += detokenizer.flush()
            if i == 0:
                some.append(Scored(candidate(tokenizer, prompt[0], 0.0), piece, first=True))
            else:
                some.append(scored(tokenizer, prompt[i], piece, flight.scores[i - 1]))
        yield some
