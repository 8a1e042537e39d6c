"""One API key as it stands in the key file: a YAML list with an entry for each key, and of the key itself only its hash.

The hash is SHA-256 and no slow one: `relay keys new` draws 256 random bits, which nobody finds by trying, so that scrypt would only make
each request cost tens of milliseconds and hand a stranger a way to keep the gateway busy. A password is no key: do not hash one here.
"""

import datetime
import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from relay import config
from relay.auth.caller import Caller
from relay.errors import ConfigError
from relay.messages import Limits

Scope = Literal["inference", "metrics", "admin"]
Count = Annotated[int, Meta(ge=1, le=1 << 40)]

_HEAD = "# API keys of RelayServe. `relay keys new` adds to it; the gateways read it again when it changes.\n"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key. A limit that is left out is none."""

    name: Annotated[str, Meta(description="who uses it: in logs, ledgers and metrics", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    sha256: Annotated[str, Meta(description="of the key, in hex", pattern=r"^[0-9a-f]{64}\Z")]
    scopes: Annotated[tuple[Scope, ...], Meta(description="what it may reach; admin holds the others", min_length=1)] = ("inference",)
    rpm: Annotated[Count | None, Meta(description="requests that may start in any minute")] = None
    tpm: Annotated[Count | None, Meta(description="tokens of requests that start in any minute: prompts and answers")] = None
    concurrency: Annotated[Count | None, Meta(description="requests that may run at once")] = None
    best_priority: Annotated[
        int | None, Meta(description="lowest `priority` number it may ask for; lower goes first. Default: gateway.best_priority")
    ] = None
    models: Annotated[tuple[str, ...], Meta(description="names of models it may use; empty: all")] = ()
    expires: Annotated[str | None, Meta(description="ISO 8601 date or time (UTC if it names no zone) from which on it is refused")] = None

    @property
    def expires_s(self) -> float:
        """Unix time; infinite for never. Raises ConfigError."""
        if self.expires is None:
            return float("inf")
        try:
            when = datetime.datetime.fromisoformat(self.expires)
        except ValueError:
            raise ConfigError(f"key `{self.name}`: expires is `{self.expires}`; expected something like 2030-01-31") from None
        return (when if when.tzinfo is not None else when.replace(tzinfo=datetime.UTC)).timestamp()

    def caller(self) -> Caller:
        limits = Limits(self.rpm or 0, self.tpm or 0, self.concurrency or 0)
        return Caller(name=self.name, scopes=self.scopes, limits=limits, models=self.models, best_priority=self.best_priority)


def parse_entries(text: str, where: str) -> tuple[Entry, ...]:
    """All entries of a key file; an empty file has none. Raises ConfigError with the file, the entry and what to do."""
    raw = config.read_yaml(text, where)
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise ConfigError(f"{where}: expected a list of keys, `- name: ...` for each; found {type(raw).__name__}")
    entries = config.validate(raw, tuple[Entry, ...], where)
    for what in ("name", "sha256"):
        seen: dict[str, None] = {}
        for entry in entries:
            value = getattr(entry, what)
            if value in seen:
                raise ConfigError(f"{where}: two keys have the {what} `{value}`; each needs its own")
            seen[value] = None
    for entry in entries:
        try:
            _ = entry.expires_s
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return entries


def with_entry(text: str, entry: Entry, where: str) -> str:
    """What to append to a key file that reads `text` so that it has this entry too. Raises ConfigError if that cannot be done."""
    fields = {field: value for field, value in msgspec.to_builtins(entry).items() if value not in (None, ())}
    lines = [f"{'  ' if i else '- '}{field}: {json.dumps(value, ensure_ascii=False)}\n" for i, (field, value) in enumerate(fields.items())]
    addition = (_HEAD if not text.strip() else "" if text.endswith("\n") else "\n") + "".join(lines)
    had = parse_entries(text, where)
    if parse_entries(text + addition, where) != (*had, entry):
        raise ConfigError(f"{where}: nothing can be appended to it as it is written; put each key under a `- ` at the start of a line")
    return addition
