"""What a request has used so far, kept as its choices go on: usage on every event costs the same however many choices there are."""

from collections.abc import Sequence

from relay.http.choice import Choice
from relay.openai.usage import Usage, usage


class Used:
    """Each prompt once; of `best_of` all that were drawn. `counts`: whether generated tokens are, which an echo alone has none of."""

    def __init__(self, n_prompt: int, best_of: int, *, counts: bool) -> None:
        self._n_prompt, self._best_of, self._counts = n_prompt, best_of, counts
        self._seen: dict[int, tuple[int, int]] = {}
        self._completion = self._cached = 0

    def look(self, choices: Sequence[Choice]) -> None:
        """They may have gone on."""
        for choice in choices:
            n_tokens = choice.n_tokens if self._counts else 0
            n_cached = choice.flight.n_cached if choice.index % self._best_of == 0 else 0
            before = self._seen.get(choice.index, (0, 0))
            self._completion += n_tokens - before[0]
            self._cached += n_cached - before[1]
            self._seen[choice.index] = n_tokens, n_cached

    def usage(self) -> Usage:
        return usage(prompt=self._n_prompt, completion=self._completion, cached=self._cached)
