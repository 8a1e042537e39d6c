"""Everything that a session of measurements says, as one object: what `scripts/measured/peers-DATE.json` holds.

Paths of the machine are written as `$CACHE`, `$TMP`, `$REPO` and `python`, so that a record can be read and repeated anywhere.
"""

import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from relay.bench.peers.contestant import Contestant
from relay.bench.peers.facts import Facts
from relay.bench.peers.pairing import Reading, Summary
from relay.bench.peers.verdict import Verdict
from relay.bench.peers.whereabouts import Whereabouts


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`absent`: why a server that was asked for took no part. `notes`: what else a reader should know."""

    schema: int = 1
    facts: Facts
    threads: int
    rounds: int
    quick: bool
    interrupted: bool
    model: str
    contestants: list[Contestant]
    absent: dict[str, str]
    notes: list[str]
    summaries: list[Summary]
    verdicts: list[Verdict]
    whereabouts: list[Whereabouts]
    readings: list[Reading]

    def to_json(self) -> bytes:
        """Indented: people read it, and git shows what changed."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class Anonymous:
    """Takes this machine's paths out of commands; `known` are folders by the name that stands for them."""

    def __init__(self, known: dict[str, Path]) -> None:
        replaced = [(str(path), name) for name, path in known.items()]
        replaced += [(sys.executable, "python"), (tempfile.gettempdir(), "$TMP"), (str(Path.home()), "$HOME")]
        self._replaced = sorted(replaced, key=lambda pair: -len(pair[0]))

    def text(self, words: str) -> str:
        for path, name in self._replaced:
            words = words.replace(path, name)
        return words

    def command(self, words: Iterable[str]) -> list[str]:
        return [self.text(word) for word in words]

    def contestants(self, some: Sequence[Contestant]) -> list[Contestant]:
        return [msgspec.structs.replace(one, command=self.command(one.command)) for one in some]


def free_stem(folder: Path, date: str) -> Path:
    """`peers-DATE`, or with a number after it where that is taken."""
    number, stem = 1, folder / f"peers-{date}"
    while any(stem.with_name(stem.name + ending).exists() for ending in (".md", ".json", ".png")):
        number += 1
        stem = folder / f"peers-{date}-{number}"
    return stem
