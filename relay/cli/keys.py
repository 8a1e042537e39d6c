"""`relay keys new` and `relay keys list`: make API keys and show which there are. A running server takes up a change by itself."""

import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from relay import config as configuration
from relay.auth.entry import Entry
from relay.auth.keyfile import append, read_entries, warn_if_loose
from relay.auth.keys import hash_of, new_key
from relay.errors import ConfigError

_FILE = click.option(
    "--file", type=click.Path(path_type=Path, dir_okay=False), default="keys.yaml", show_default=True, help="auth.keys_file of the server."
)


@click.group()
def keys() -> None:
    """API keys: `new` makes one, `list` shows them. To take one away, remove its entry from the file."""


@keys.command()
@_FILE
@click.option("--name", required=True, help="Who will use it: appears in logs, ledgers and metrics.")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(["inference", "metrics", "admin"]), help="May be given twice.")
@click.option("--rpm", type=click.IntRange(1), help="Requests that may start in any minute.")
@click.option("--tpm", type=click.IntRange(1), help="Tokens of requests that start in any minute, prompts and answers.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests that may run at once.")
@click.option("--best-priority", type=int, help="Lowest `priority` number that it may ask for; lower goes first.")
@click.option("--model", "models", multiple=True, help="A model it may use; default: all. May be given twice.")
@click.option("--expires", help="ISO 8601 date or time (UTC) from which on it is refused, such as 2030-01-31.")
def new(
    file: Path,
    name: str,
    scopes: tuple[str, ...],
    rpm: int | None,
    tpm: int | None,
    concurrency: int | None,
    best_priority: int | None,
    models: tuple[str, ...],
    expires: str | None,
) -> None:
    """Make a key, append its hash to the file, and print the key: this once, for nothing keeps it."""
    key = new_key()
    fields: dict[str, Any] = {
        "name": name,
        "sha256": hash_of(key.encode()),
        "rpm": rpm,
        "tpm": tpm,
        "concurrency": concurrency,
        "best_priority": best_priority,
        "expires": expires,
    }
    if scopes:
        fields["scopes"] = list(dict.fromkeys(scopes))
    if models:
        fields["models"] = list(dict.fromkeys(models))
    append(file, configuration.validate(fields, Entry, "relay keys new"))
    click.echo(f"The key of `{name}`, which is shown only now; its hash is in {file}:", err=True)
    click.echo(key)


@keys.command("list")
@_FILE
def list_keys(file: Path) -> None:
    """Show the keys of the file: names, scopes and limits. The keys themselves are nowhere."""
    try:
        entries = read_entries(file)
        warn_if_loose(file, lambda text: click.echo(f"warning: {text}", err=True))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; `relay keys new --file {file} --name NAME` makes one") from error
    table = Table(show_edge=False, pad_edge=False)
    for column in ("name", "scopes", "requests/min", "tokens/min", "at once", "models", "expires"):
        table.add_column(column, justify="right" if column in ("requests/min", "tokens/min", "at once") else "left")
    for entry in entries:
        expires = "never" if entry.expires is None else entry.expires + (" (expired)" if entry.expires_s <= time.time() else "")
        limits = ["-" if limit is None else str(limit) for limit in (entry.rpm, entry.tpm, entry.concurrency)]
        table.add_row(entry.name, ", ".join(entry.scopes), *limits, ", ".join(entry.models) or "all", expires)
    Console(highlight=False, markup=False).print(table)
