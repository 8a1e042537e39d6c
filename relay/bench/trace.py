"""Public traces of real services: when requests came and how long they were; never what they said.

- Mooncake (JSON lines): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`: one id for each block of 512 tokens of the prompt.
  Equal ids are equal blocks after equal beginnings, which is what makes real prefix reuse measurable.
- Azure (CSV): `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from relay.errors import StartError

BLOCK_TOKENS = 512


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s` is after the first row."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path) -> list[Row]:
    """In the order of time. Raises StartError with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"the trace {path} cannot be read: {error}") from error
    try:
        rows = sorted(_rows(lines), key=lambda row: row.at_s)
    except ValueError as error:
        raise StartError(f"the trace {path}: {error}") from error
    if not rows:
        raise StartError(f"the trace {path} has no requests")
    first = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - first) for row in rows]


def _rows(lines: list[str]) -> Iterator[Row]:
    if lines and lines[0].startswith("{"):
        return _mooncake(lines)
    return _azure(lines)


def _mooncake(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Mooncake)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number}: {error}; expected timestamp, input_length, output_length, hash_ids") from error
        yield _row(number, row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _azure(lines: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    if not set(_AZURE) <= set(reader.fieldnames or ()):
        raise ValueError(f"its first line is neither a JSON object nor the header {','.join(_AZURE)}")
    for number, row in enumerate(reader, 2):
        try:
            at, prompt, output = datetime.fromisoformat(row[_AZURE[0]]), int(row[_AZURE[1]]), int(row[_AZURE[2]])
        except (TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {error}") from error
        yield _row(number, at.timestamp(), prompt, output, ())


def _row(number: int, at_s: float, prompt: int, output: int, hash_ids: tuple[int, ...]) -> Row:
    if prompt < 0 or output < 0:
        raise ValueError(f"line {number}: a negative length")
    return Row(at_s=at_s, prompt_tokens=prompt, output_tokens=output, hash_ids=hash_ids)
