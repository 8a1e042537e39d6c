"""The command line: `relay serve`, `check`, `chat`, `bench` and `keys`. An expected failure is one clear line and exit status 1."""

import sys

import click

from relay import __version__
from relay.cli.bench import bench
from relay.cli.chaos import chaos
from relay.cli.chat import chat
from relay.cli.check import check
from relay.cli.keys import keys
from relay.cli.serve import serve
from relay.errors import StartError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="relay")
def cli() -> None:
    """Serve large language models; every request accounted for, none lost."""


cli.add_command(serve)
cli.add_command(keys)
cli.add_command(check)
cli.add_command(chat)
cli.add_command(chaos)
cli.add_command(bench)


def main() -> None:
    """Entry point of the `relay` command."""
    try:
        cli()
    except StartError as error:
        click.echo(f"relay: {error}", err=True)
        sys.exit(1)
