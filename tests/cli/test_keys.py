"""`relay keys`: a key is printed once and only its hash is kept."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from relay.auth.keyfile import read_entries
from relay.auth.keys import KeyRing
from relay.cli import cli
from relay.errors import ConfigError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["keys", *arguments], catch_exceptions=False)


def test_a_new_key_works_and_is_nowhere_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    given = ["--scope", "admin", "--scope", "inference", "--rpm", "5", "--tpm", "700", "--concurrency", "2", "--model", "m"]
    made = run("new", "--file", str(path), "--name", "ann", *given, "--expires", "2090-01-01")
    key = made.stdout.strip()
    assert made.exit_code == 0
    assert "ann" in made.stderr
    assert key not in made.stderr
    assert key not in path.read_text()
    caller = KeyRing(read_entries(path)).find([key.encode()], 0.0)
    assert (caller.name, caller.is_admin, caller.limits.requests, caller.limits.tokens, caller.limits.concurrency) == (
        "ann",
        True,
        5,
        700,
        2,
    )
    listed = run("list", "--file", str(path)).stdout
    assert "ann" in listed
    assert "700" in listed
    assert read_entries(path)[0].sha256 not in listed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--name", "ann"], "name `ann`"), (["--name", "a b"], "name"), (["--name", "b", "--expires", "soon"], "expires is `soon`")],
)
def test_what_cannot_be_added_leaves_the_file_as_it_was(tmp_path: Path, arguments: list[str], says: str) -> None:
    path = tmp_path / "keys.yaml"
    run("new", "--file", str(path), "--name", "ann")
    before = path.read_text()
    with pytest.raises(ConfigError, match=says):
        run("new", "--file", str(path), *arguments)
    assert path.read_text() == before


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="relay keys new --file"):
        run("list", "--file", str(tmp_path / "none.yaml"))
