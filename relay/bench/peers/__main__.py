"""`python -m relay.bench.peers`: what `scripts/bench_peers` runs. Everything it starts ends with it, on Ctrl-C too."""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import click
import msgspec

from relay.bench.peers import llama, vllm
from relay.bench.peers.contestant import Contestant
from relay.bench.peers.facts import facts
from relay.bench.peers.hf_model import write_hf_folder
from relay.bench.peers.ours import variants
from relay.bench.peers.pairing import summarize
from relay.bench.peers.picture import draw
from relay.bench.peers.quiet import MOST_LOAD, load_average
from relay.bench.peers.result import Anonymous, Result, free_stem
from relay.bench.peers.shop import shelf, stock
from relay.bench.peers.table import markdown
from relay.bench.peers.tournament import Tournament
from relay.bench.peers.verdict import judge_all
from relay.bench.peers.whereabouts import Whereabouts, gather
from relay.bench.plot import require_matplotlib
from relay.config import Config, load
from relay.errors import StartError
from relay.model.source import default_cache_dir, resolve

ROOT: Final = Path(__file__).resolve().parents[3]
_CONFIGS: Final = ROOT / "configs"
_FAMILIES: Final = ("ours", "llama", "vllm")
_OURS: Final = ("a16", "a8", "a16-aggregated", "a8-aggregated")
_INTERRUPTED: Final = 130
_ROUNDS, _QUICK_ROUNDS = 5, 2


def _names(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Keys of contestants; `ours` stands for all of ours."""
    asked = [name.strip() for name in (text or ",".join(_FAMILIES)).split(",")]
    known = (*_FAMILIES, *_OURS)
    for name in asked:
        if name not in known:
            raise click.BadParameter(f"`{name}` is no server; known are {', '.join(known)}", ctx, param)
    return tuple(dict.fromkeys(key for name in asked for key in (_OURS if name == "ours" else (name,))))


@click.command()
@click.option("--only", "keys", callback=_names, metavar="NAMES", help=f"Of {', '.join((*_FAMILIES, *_OURS))}, joined by commas.")
@click.option("--quick", is_flag=True, help=f"Few requests and {_QUICK_ROUNDS} rounds: to see that all works, not to quote.")
@click.option("--rounds", type=click.IntRange(min=1), help=f"Default: {_ROUNDS}, or {_QUICK_ROUNDS} if quick.")
@click.option("--threads", type=click.IntRange(min=1), default=min(2, os.cpu_count() or 1), show_default=True, help="Of every server.")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0), default=20.0, show_default=True, help="Seconds a run waits for quiet.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=ROOT / "scripts" / "measured", help="Where records go.")
@click.option("--llama-server", "llama_program", type=click.Path(path_type=Path, exists=True), help="Instead of one built here.")
@click.option("--vllm-python", type=click.Path(path_type=Path, exists=True), help="That has vLLM; instead of one installed here.")
def main(
    keys: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    threads: int,
    wait_s: float,
    out: Path,
    llama_program: Path | None,
    vllm_python: Path | None,
) -> None:
    """Measure RelayServe beside llama.cpp's server and vLLM on this machine, and write what came of it."""
    require_matplotlib()
    signal.signal(signal.SIGTERM, _as_interrupt)
    config = load(_CONFIGS / "quickstart.yaml")
    gguf = resolve(config.model.source, sha256=config.model.sha256)
    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="relay-peers-") as name:
        folder = Path(name)
        contestants = _contestants(keys, folder, config, gguf, threads, llama_program, vllm_python, absent)
        if load_average() > MOST_LOAD:
            _say(f"the load average is {load_average():.1f}: these figures will not be those of a quiet machine")
        tournament = Tournament(contestants, folder, cores=os.cpu_count() or 1, wait_s=wait_s, say=_say)
        notes: list[str] = []
        interrupted = False
        try:
            with tournament:
                tournament.play(rounds or (_QUICK_ROUNDS if quick else _ROUNDS), quick=quick)
        except StartError as error:
            notes.append(f"It ended early: {error}")
        except KeyboardInterrupt:
            interrupted = True
        result = _result(tournament, folder, config, absent, notes, threads=threads, quick=quick, interrupted=interrupted)
    click.echo(markdown(result))
    if interrupted or not result.readings:
        sys.exit(_INTERRUPTED if interrupted else 1)
    _write(result, out)
    sys.exit(1 if notes else 0)


def _contestants(
    keys: Sequence[str],
    folder: Path,
    config: Config,
    gguf: Path,
    threads: int,
    llama_program: Path | None,
    vllm_python: Path | None,
    absent: dict[str, str],
) -> list[Contestant]:
    """Those that can be had; why not the others goes into `absent`."""
    model_name = config.model.name

    def of_llama() -> Contestant:
        program = llama_program or llama.find_server(_say)
        return llama.contestant(program, gguf, model_name=model_name, threads=threads, port=_free_port())

    def of_vllm() -> Contestant:
        python = vllm_python or vllm.find_server(_say)
        return vllm.contestant(python, _hf_folder(gguf), model_name=model_name, threads=threads, port=_free_port())

    makers: dict[str, Callable[[], Contestant]] = {"llama": of_llama, "vllm": of_vllm}
    ours = variants(_CONFIGS, folder, threads=threads, bind={key: f"127.0.0.1:{_free_port()}" for key in _OURS})
    found = [one for one in ours if one.key in keys]
    for key, make in makers.items():
        if key in keys:
            try:
                found.append(make())
            except StartError as error:
                _say(f"{key} takes no part: {error}")
                absent[key] = str(error)
    return found


def _hf_folder(gguf: Path) -> Path:
    """The model for servers that read no GGUF, kept."""

    def make(folder: Path) -> None:
        _say("writing the model in the Hugging Face layout")
        write_hf_folder(gguf, folder)

    return stock(shelf(f"{gguf.stem}-bf16"), make, _say)


def _result(
    tournament: Tournament,
    folder: Path,
    config: Config,
    absent: dict[str, str],
    notes: list[str],
    *,
    threads: int,
    quick: bool,
    interrupted: bool,
) -> Result:
    hide = Anonymous({"$CACHE": default_cache_dir(), "$TMP": folder, "$REPO": ROOT})
    readings = [msgspec.structs.replace(reading, command=hide.command(reading.command)) for reading in tournament.judged()]
    whereabouts: list[Whereabouts] = []
    for (contestant, scenario), ledgers in tournament.ledgers.items():
        some = [reading for reading in readings if (reading.contestant, reading.scenario) == (contestant, scenario)]
        told = gather(contestant, scenario, ledgers, [reading.cpu_s for reading in some], sum(reading.output_tokens for reading in some))
        whereabouts += [told] if told else []
    return Result(
        facts=facts(ROOT),
        threads=threads,
        rounds=1 + max((reading.round_number for reading in readings), default=0),
        quick=quick,
        interrupted=interrupted,
        model=config.model.source,
        contestants=hide.contestants(tournament.contestants),
        absent={name: hide.text(why) for name, why in {**absent, **tournament.absent}.items()},
        notes=[hide.text(note) for note in notes],
        summaries=summarize(readings),
        verdicts=judge_all(readings),
        whereabouts=whereabouts,
        readings=readings,
    )


def _write(result: Result, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    stem = free_stem(out, result.facts.date[:10])
    stem.with_name(stem.name + ".json").write_bytes(result.to_json())
    draw(result, stem.with_name(stem.name + ".png"))
    page = markdown(result).rstrip() + f"\n\n![The same as a picture]({stem.name}.png)\n"
    stem.with_name(stem.name + ".md").write_text(page, encoding="utf-8")
    _say(f"written: {stem}.md, .json and .png")


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
        click.echo(f"bench_peers: {error}", err=True)
        sys.exit(1)
