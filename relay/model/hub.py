"""A model on the Hugging Face hub: `hf:ORG/NAME[@REVISION]`, of which only what serving needs is fetched.

huggingface_hub does the fetching: it knows the user's token, mirror (HF_ENDPOINT), cache (HF_HOME) and wish to stay offline
(HF_HUB_OFFLINE), resumes files that were cut off, and keeps two starts at once apart. First the small files are fetched, then the
safetensors that their index names: a repository may hold the same weights in other formats beside them.
"""

import re
import threading
from pathlib import Path
from typing import Any, Final

from relay.errors import ModelError, SourceError
from relay.model.hf_folder import CONFIG, INDEX, shard_names
from relay.model.progress import Progress

_SOURCE: Final = re.compile(r"hf:(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[A-Za-z0-9][\w./-]*))?", re.ASCII)
_SMALL: Final = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX)


def from_hub(source: str, report: Progress) -> Path:
    """The folder of the snapshot, in the hub's own cache. Raises SourceError."""
    found = _SOURCE.fullmatch(source)
    if found is None or ".." in source:
        raise SourceError(f"the model source `{source}` is not of the form hf:ORG/NAME or hf:ORG/NAME@REVISION")
    folder = _snapshot(source, found["repo"], found["revision"] or "main", _SMALL, report)
    if not (folder / CONFIG).is_file():
        raise SourceError(f"the model `{source}` has no {CONFIG}: it is no model in the Hugging Face layout; name another repository")
    try:
        shards = shard_names(folder)
    except ModelError as error:
        raise SourceError(f"the model `{source}`: {error}") from error
    folder = _snapshot(source, found["repo"], folder.name, tuple(shards), report)
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise SourceError(
            f"the model `{source}` lacks {len(missing)} of its files with weights, such as {missing[0]}. Safetensors are served: "
            "name a repository that has them; if this one does and you are offline, start once with a network"
        )
    return folder


def _snapshot(source: str, repo: str, revision: str, names: tuple[str, ...], report: Progress) -> Path:
    import huggingface_hub as hub  # takes 0.3 s, which no other source should pay
    from huggingface_hub import errors

    token = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        return Path(hub.snapshot_download(repo, revision=revision, allow_patterns=list(names), tqdm_class=_bar(report)))
    except errors.GatedRepoError as error:
        raise SourceError(
            f"the model `{source}` is gated: ask for access on its page, then {token}. The hub said: {_said(error)}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceError(f"the hub has no model `{repo}`, or hides it: check the name; for a private one {token}") from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"the model `{repo}` has no revision `{revision}`; expected a branch, a tag or a commit") from error
    except errors.LocalEntryNotFoundError as error:
        raise SourceError(
            f"the model `{source}` is not whole in the hub's cache, and the hub cannot be reached: connect and start again (what has been "
            f"fetched is kept), unset HF_HUB_OFFLINE if it is set, or give `model.source` as a path. The hub's library said: {_said(error)}"
        ) from error
    except Exception as error:  # the library lets through whatever the network layer below it raises
        raise SourceError(
            f"the model `{source}` cannot be fetched: {type(error).__name__}: {_said(error)}; start again to go on"
        ) from error


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _bar(report: Progress) -> type:
    """A class that the library takes for a tqdm bar. Of its bars, those that count bytes are reported, as the one that is furthest."""
    lock = threading.Lock()
    bars: list[Any] = []

    class Bar:
        def __init__(self, *args: object, total: float | None = None, initial: float = 0, unit: str = "it", **rest: object) -> None:
            self.total, self.n, self.format_dict = total, initial, dict[str, object]()
            if unit == "B":
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if self in bars:
                    report("downloading", int(max(bar.n for bar in bars)), int(max(bar.total or 0 for bar in bars)))

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            """refresh, set_description, set_postfix_str, close and the like: nothing is drawn."""
            return lambda *args, **more: None

        @classmethod
        def get_lock(cls) -> threading.Lock:
            return lock

        @classmethod
        def set_lock(cls, lock: object) -> None:
            pass

    return Bar
