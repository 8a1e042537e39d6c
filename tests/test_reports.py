"""reports.md is true: every row of its sections is there once, and is held by tests that exist or says why it does not apply."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = {
    "A": (1, 2, 4, 5),
    "B": (7, 8, 10, 11, 13, 14),
    "C": (16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32),
    "D": (34, 35, 37, 38, 40, 41, 43, 44, 46, 47, 49),
    "E": (50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68),
    "F": (70, 71, 73, 74, 76, 77, 79, 80, 82, 83),
    "J": (136, 137, 139, 140, 142, 143, 145, 146, 148, 149, 151, 152),
    "K": (154, 155, 157, 158, 160, 161, 163, 164),
}


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions of a file; empty if there is no such file."""
    file = ROOT / path
    if not file.exists():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def table() -> dict[str, list[tuple[int, str, str]]]:
    """(row, kind, held by) of each section."""
    sections = re.split(r"^## ", (ROOT / "tests" / "reports.md").read_text(), flags=re.MULTILINE)[1:]
    return {
        text[0]: [(int(n), kind, by) for n, kind, by in re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", text, re.MULTILINE)]
        for text in sections
    }


def test_every_row_is_there_once() -> None:
    assert {section: tuple(n for n, _, _ in rows) for section, rows in table().items()} == ROWS


def test_every_row_is_held_by_tests_that_exist_or_says_why_not() -> None:
    wrong = []
    for rows in table().values():
        for n, _, by in rows:
            if by.startswith("not applicable: "):
                continue
            names = [re.fullmatch(r"`(tests/\S+\.py)::(test_\w+)`", part) for part in by.split("<br>")]
            wrong += [f"row {n}: {by}" for name in names if name is None or name[2] not in names_in(name[1])]
    assert wrong == []
