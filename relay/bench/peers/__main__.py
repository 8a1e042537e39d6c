"""`python -m relay.bench.peers`: what `scripts/bench_peers` runs. Everything it starts ends with it, on Ctrl-C too."""

import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Final

import click
from msgspec.structs import replace

from relay.bench.peers import llama, ours, vllm
from relay.bench.peers.loads import LOADS, Load
from relay.bench.peers.page import draw, markdown
from relay.bench.peers.record import Record, facts, hide, read_record
from relay.bench.peers.rounds import play
from relay.bench.peers.server import Process, Server, serving, tail
from relay.bench.peers.verdict import PEERS
from relay.bench.plot import require_matplotlib
from relay.config import load
from relay.errors import StartError
from relay.model.source import default_cache_dir, resolve

ROOT: Final = Path(__file__).resolve().parents[3]
_SERVERS: Final = (*ours.CONFIGS, *PEERS)
_READY_WITHIN_S: Final = 900.0  # vLLM compiles when it starts
_FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)

Maker = Callable[[int], Server]


def _some(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """For an option whose text is some of `known`, joined by commas; kept in the order of `known`."""

    def chosen(ctx: click.Context, param: click.Parameter, text: str) -> list[str]:
        asked = text.split(",")
        for name in asked:
            if name not in known:
                raise click.BadParameter(f"`{name}` is none of {', '.join(known)}", ctx, param)
        return [name for name in known if name in asked]

    return chosen


def _several(name: str, known: Sequence[str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(name, callback=_some(known), default=",".join(known), show_default=True)


@click.command()
@_several("--servers", _SERVERS)
@_several("--loads", [known.key for known in LOADS])
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of every server.")
@click.option("--continue", "record_path", type=_FILE, help="A record (.json) that gets more rounds, at the same commit.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "scripts" / "measured", help="Where records go.")
@click.option("--llama-server", type=_FILE, help="A program; instead of one built here.")
@click.option("--vllm-python", type=_FILE, help="A Python that has vLLM; instead of one installed here.")
def main(
    servers: list[str],
    loads: list[str],
    rounds: int,
    threads: int,
    record_path: Path | None,
    out: Path,
    llama_server: Path | None,
    vllm_python: Path | None,
) -> None:
    """Measure RelayServe beside llama.cpp's server and vLLM on this machine, and write what came of it."""
    require_matplotlib()
    signal.signal(signal.SIGTERM, _as_interrupt)
    configs = ROOT / "configs"
    config = load(configs / "quickstart.yaml")
    record = Record(facts=facts(ROOT), model=config.model.source, threads=threads)
    if record_path:
        record = read_record(record_path, record)
    gguf = resolve(config.model.source, sha256=config.model.sha256)
    name = config.model.name
    with tempfile.TemporaryDirectory(prefix="relay-peers-") as folder:
        makers: dict[str, Maker] = {
            "llama": lambda port: llama.server(llama_server, gguf, model_name=name, threads=threads, port=port, say=_say),
            "vllm": lambda port: vllm.server(vllm_python, gguf, model_name=name, threads=threads, port=port, say=_say),
        }
        for key in ours.CONFIGS:
            makers[key] = lambda port, key=key: ours.server(key, configs, Path(folder), threads=threads, port=port)  # type: ignore[misc]
        chosen = [known for known in LOADS if known.key in loads]
        _measure(record, {key: makers[key] for key in servers}, chosen, rounds, Path(folder))
    click.echo(markdown(record))
    if not record.readings:
        raise StartError("nothing was measured")
    stem = record_path.with_suffix("") if record_path else _free_stem(out, record.facts.date[:10])
    out.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_bytes(record.to_json())
    stem.with_suffix(".md").write_text(markdown(record) + f"\n![The same as a picture]({stem.name}.png)\n", encoding="utf-8")
    draw(record, stem.with_suffix(".png"))
    _say(f"written: {stem}.json, .md and .png")


def _measure(record: Record, makers: dict[str, Maker], loads: Sequence[Load], rounds: int, folder: Path) -> None:
    """Start what can be had, and add readings to `record` until the last round, or Ctrl-C, or a server that dies."""
    names = {sys.executable: "python", str(default_cache_dir()): "$CACHE", str(folder): "$TMP", str(ROOT): "$REPO", str(Path.home()): "~"}
    known = {server.key: server for server in record.servers}
    running: dict[str, tuple[Server, Process]] = {}

    def lost(key: str, why: str) -> None:
        _say(f"{key} is lost: {why}")
        record.absent[f"{key} from then on"] = hide(f"{why}; its log ends: {tail(folder / f'{key}.log')}", names)

    with ExitStack() as stack:
        try:
            for key, make in makers.items():
                try:
                    server = make(_free_port())
                    _say(f"starting {server.name}")
                    running[key] = server, stack.enter_context(serving(server, folder / f"{key}.log", _READY_WITHIN_S))
                    known[key] = replace(server, command=[hide(word, names) for word in server.command])
                    record.absent.pop(key, None)
                except StartError as error:
                    _say(f"{key} takes no part: {error}")
                    record.absent[key] = hide(str(error), names)
            record.servers = [known[key] for key in _SERVERS if key in known]
            first = 1 + max((reading.round_number for reading in record.readings), default=-1)
            for reading in play(running, loads, range(first, first + rounds), folder, lost):
                record.readings.append(replace(reading, command=[hide(word, names) for word in reading.command]))
                told = ", ".join(f"{figure} {value:.1f}" for figure, value in reading.figures.items())
                _say(f"round {reading.round_number + 1}, {reading.load}, {reading.server}: {told}{'' if reading.quiet else ' (not quiet)'}")
        except KeyboardInterrupt:
            _say("stopped by hand; what was measured is kept")
        except StartError as error:
            _say(f"stopped; what was measured is kept: {error}")


def _free_stem(out: Path, date: str) -> Path:
    """`peers-DATE`, or with a number after it where that is taken."""
    number, stem = 1, out / f"peers-{date}"
    while stem.with_suffix(".json").exists():
        number += 1
        stem = out / f"peers-{date}-{number}"
    return stem


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(words: str) -> None:
    click.echo(f"bench_peers: {words}", err=True)


if __name__ == "__main__":
    try:
        main()
    except StartError as error:
        _say(str(error))
        sys.exit(1)
