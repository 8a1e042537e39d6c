"""The simulation finds bugs that are planted; `scripts/simulate --mutants` shows it for all of them."""

import importlib.util
from pathlib import Path

import pytest

from relay.simulation.mutants import try_out
from relay.simulation.planted import MUTANTS

SAMPLE = (
    ("decode loses a Cancel", "computed after its cancel, cancel lost"),
    ("a lease is returned before the engine lets go", "write without a lease, loads"),
    ("a block is shared before it is full", "write without a lease"),
    ("checksums are not verified", "tokens"),
    ("the first token is sent with every row", "index"),
    ("a waiter is forgotten", "waiter forgotten"),
    ("a step is begun though a job has come", "computed after its cancel"),
    ("nobody is suspected of a step that followed", "suspects"),
    ("the server gives up at the first death", "restarts"),
    ("a death is told before the dead is reaped", "told of a death"),
    ("what a left stream came to is not told", "left behind"),
)


@pytest.mark.parametrize(("name", "laws"), SAMPLE)
def test_a_planted_bug_is_found(name: str, laws: str) -> None:
    found = try_out(name, 40, 0)
    assert found.seed is not None
    assert found.law in laws.split(", ")


def test_every_bug_can_be_planted_and_there_are_many() -> None:
    """Its text is in the source once, and what comes out still compiles."""
    for name, edits in MUTANTS.items():
        texts: dict[str, str] = {}
        for module, old, new in edits:
            spec = importlib.util.find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            text = texts.get(module) or Path(spec.origin).read_text()
            assert text.count(old) == 1, f"{name}: {old}"
            texts[module] = text.replace(old, new)
        for module, text in texts.items():
            compile(text, module, "exec")
    assert len(MUTANTS) >= 20
