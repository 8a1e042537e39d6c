"""Rows of tokens that are too large for one frame, in parts: a long prompt's log probabilities, a long answer told from its first token on.

Sizes are upper bounds of what MessagePack makes of a row, from counts alone: they are asked for each row of each step.
"""

from collections.abc import Iterator, Sequence

from relay.messages import Logprobs, Row, Trail

PART_BYTES = 256 << 10  # what a link writes at once: what others have to say goes between two parts
_ROW_BYTES, _ID_BYTES, _STAMP_BYTES = 512, 5, 16
_LOGPROBS_BYTES, _TOP_BYTES = 16, 14  # of one token, and of each of its alternatives

Given = tuple[Row, Trail]  # with the trail of the step that it is of


def logprobs_bytes(n_tokens: int, n_top: int) -> int:
    """Of so many tokens' log probabilities, with so many alternatives each."""
    return n_tokens * (_LOGPROBS_BYTES + _TOP_BYTES * max(0, n_top))


def row_bytes(row: Row) -> int:
    """At most, in a frame."""
    scores = _of(row.logprobs) + _of(row.prompt_logprobs)
    return _ROW_BYTES + _ID_BYTES * len(row.ids) + _STAMP_BYTES * len(row.trail) + scores


def score_parts(scores: tuple[Logprobs, ...]) -> Iterator[tuple[Logprobs, ...]]:
    """As many at a time as a part holds, in order."""
    n = _fitting(scores)
    for at in range(0, len(scores), n):
        yield scores[at : at + n]


def parts(row: Row) -> list[Row]:
    """The same in several rows, for frames in this order: the prompt's log probabilities first, the finish last, the trail once."""
    if row_bytes(row) <= PART_BYTES:
        return [row]
    name, found, at = (row.request_id, row.attempt), [], row.scores_from
    for scores in score_parts(row.prompt_logprobs):
        found.append(Row(*name, row.first, (), (), "", (), row.n_cached, scores, at))
        at += len(scores)
    n = max(1, PART_BYTES // 2 // _ID_BYTES)
    if row.logprobs:
        n = min(n, _fitting(row.logprobs))
    for start in range(0, len(row.ids), n):
        ids, logprobs = row.ids[start : start + n], row.logprobs[start : start + n]
        last = start + n >= len(row.ids)
        found.append(Row(*name, row.first + start, ids, (), row.finish if last else "", logprobs, row.n_cached))
    if not row.ids:
        found.append(Row(*name, row.first, (), (), row.finish, (), row.n_cached))
    return [with_trail(found[0], row.trail), *found[1:]]


def frames_of(rows: Sequence[Given]) -> Iterator[list[Given]]:
    """The rows in the same order, in groups that each fit into a frame. The trail of a row that comes in parts goes with the first."""
    group: list[Given] = []
    size = 0
    for row, trail in rows:
        for n, part in enumerate(parts(row)):
            n_bytes = row_bytes(part) + _STAMP_BYTES * len(trail)
            if group and size + n_bytes > 2 * PART_BYTES:
                yield group
                group, size = [], 0
            group.append((part, () if n else trail))
            size += n_bytes
    if group:
        yield group


def with_trail(row: Row, trail: Trail) -> Row:
    """The same with another trail. Rows are copied at each step of each sequence: `msgspec.structs.replace` takes twice as long."""
    return Row(
        row.request_id,
        row.attempt,
        row.first,
        row.ids,
        trail,
        row.finish,
        row.logprobs,
        row.n_cached,
        row.prompt_logprobs,
        row.scores_from,
    )


def _of(logprobs: tuple[Logprobs, ...]) -> int:
    return logprobs_bytes(len(logprobs), len(logprobs[0].top_ids)) if logprobs else 0


def _fitting(logprobs: tuple[Logprobs, ...]) -> int:
    """How many of them a part holds."""
    return max(1, PART_BYTES // 2 // max(1, logprobs_bytes(1, len(logprobs[0].top_ids)))) if logprobs else 1
