"""What a section found, as JSON, and the table that ends the command."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "skipped"]
_COLUMNS = ("section", "what", "value", "unit", "of floor", "target", "")


class Skip(Exception):
    """Something that a section needs is not here."""


@dataclass
class Row:
    """One line. floor: the least value physics allows on this machine, or the most, in the same unit; share: what was reached of it.

    target: what the value should reach; ok: None where nothing was asked of it.
    """

    name: str
    value: float | None = None
    unit: str = ""
    floor: float | None = None
    share: float | None = None
    target: float | None = None
    ok: bool | None = None
    note: str = ""


@dataclass
class Found:
    """Of one section. `rows` are there as far as it came; `on_row` is called with each, so that what was found survives what comes next."""

    section: str
    status: Status = "ok"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    note: str = ""
    on_row: Callable[["Found"], None] | None = field(default=None, repr=False, compare=False)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.on_row is not None:
            self.on_row(self)

    def holds(self, name: str, true: bool, note: str = "") -> None:
        """Something that must be so."""
        self.add(Row(name, ok=true, note=note))

    def rate(self, name: str, value: float, unit: str, *, most: float | None = None, target: float | None = None, note: str = "") -> None:
        """More is better; `most` is what the machine can."""
        share = None if most is None else value / most
        self.add(Row(name, value, unit, most, share, target, None if target is None else value >= target, note))

    def time(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        least: float | None = None,
        share: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> None:
        """Less is better; `least` is the floor. The target is a share of the floor, or a time at most."""
        reached = None if least is None else least / value
        ok = value <= most if most is not None else None if share is None or reached is None else reached >= share
        self.add(Row(name, value, unit, least, reached, share if most is None else most, ok, note))

    def close(self) -> "Found":
        """Failed if something that must be so is not; a target that was missed says so in its row and fails nothing."""
        if any(row.ok is False and row.target is None for row in self.rows):
            self.status = "failed"
        return self

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) for row in self.rows]
        return {"section": self.section, "status": self.status, "seconds": self.seconds, "rows": rows, "note": self.note}


def from_json(data: dict[str, Any]) -> Found:
    return Found(data["section"], data["status"], data["seconds"], [Row(**row) for row in data["rows"]], data["note"])


def table(found: Sequence[Found]) -> str:
    """Columns apart by two spaces or more, one row a line, and a line for each section that has none."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    for section in found:
        if not section.rows or section.status != "ok":
            lines.append((section.section, section.note.splitlines()[-1][:90] if section.note else "", "", "", "", "", section.status))
        lines += [_line(section.section, row) for row in section.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _line(section: str, row: Row) -> tuple[str, ...]:
    said = {True: "ok", False: "FAILED" if row.target is None else "missed", None: ""}[row.ok]
    share = "" if row.share is None else f"{100 * row.share:.0f} %"
    target = "" if row.target is None else f"{row.target:g}"
    return section, row.name, _number(row.value), row.unit, share, target, f"{said} {row.note}".strip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
