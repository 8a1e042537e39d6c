"""The hub's own library against a stand-in for the hub on this machine, and against what is in its cache."""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as constants
import pytest

from relay.errors import SourceError
from relay.model.load import read_spec
from relay.model.progress import Stage
from relay.model.source import resolve
from tests.model import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNWANTED = {"README.md": b"hello", "pytorch_model.bin": b"x" * 1000, "original/consolidated.safetensors": b"y" * 1000}


@dataclass
class Hub:
    """What it has and what it was asked for. `breaks`: bytes after which the connection of a GET ends, once for each file."""

    files: dict[str, bytes]
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    breaks: int | None = None
    broken: set[str] = field(default_factory=set)
    got: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo in self.hub.errors:
            status, code = self.hub.errors[repo]
            return self.answer(status, b"{}", {"X-Error-Code": code})
        match parts:
            case ["api", "models", _, _, "revision", revision] if revision not in ("main", "v1", COMMIT):
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            case ["api", "models", _, _, "revision", _]:
                return self.answer(200, json.dumps({"id": "org/little", "sha": COMMIT, "siblings": []}).encode())
            case ["api", "models", _, _, "tree", *_]:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.hub.files.items()
                ]
                return self.answer(200, json.dumps(tree).encode())
            case [_, _, "resolve", _, *path] if "/".join(path) in self.hub.files:
                return self.file("/".join(path))
        return self.answer(404, b"{}")

    def file(self, name: str) -> None:
        data = self.hub.files[name]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
        if self.command == "GET":
            self.hub.got.append((name, self.headers.get("Range")))
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        short = self.hub.breaks is not None and self.command == "GET" and name not in self.hub.broken and len(data) > self.hub.breaks
        if short:
            self.hub.broken.add(name)
        self.answer(206 if first else 200, data[first:], headers, cut=self.hub.breaks if short else None)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The library reads its settings from the environment when it is imported; here they are what it would have read."""
    files = {path.name: path.read_bytes() for path in tiny.folder("llama").iterdir() if path.name != "expected.npz"}
    hub = Hub(files={**files, "tokenizer.json": b"{}", **UNWANTED})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_what_is_needed_is_fetched_once_and_then_found(hub: Hub) -> None:
    seen: list[tuple[Stage, int, int]] = []
    folder = resolve("hf:org/little", sha256=None, progress=lambda *args: seen.append(args))
    assert {path.name for path in folder.iterdir()} == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert folder.name == COMMIT
    assert read_spec(folder).hidden == 64
    size = len(hub.files["model.safetensors"])
    assert {stage for stage, _, _ in seen} == {"downloading"}
    assert ("downloading", size, size) in seen
    assert len({done for _, done, _ in seen}) > 3
    hub.got.clear()
    assert resolve("hf:org/little", sha256=None) == folder
    assert hub.got == []


def test_shards_are_those_of_the_index(hub: Hub) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.files |= dict.fromkeys(weight_map.values(), b"weights")
    folder = resolve("hf:org/little@v1", sha256=None)
    assert {path.name for path in folder.glob("*.safetensors")} == set(weight_map.values())
    files = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").write_bytes(files)
    with pytest.raises(SourceError, match="files of the same folder"):
        resolve("hf:org/little@v1", sha256=None)


def test_a_file_that_was_cut_off_is_resumed(hub: Hub) -> None:
    hub.breaks = 200_000
    folder = resolve("hf:org/little", sha256=None)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    ranges = [span for name, span in hub.got if name == "model.safetensors"]
    assert ranges[-1] is not None
    assert int(ranges[-1][6:-1]) >= 65536


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "GatedRepo", "is gated: ask for access on its page, then log in with `hf auth login`"),
        (401, "GatedRepo", "is gated"),
        (404, "RepoNotFound", "the hub has no model `org/little`"),
        (401, "RepoNotFound", "the hub has no model `org/little`"),
        (500, "", "cannot be reached"),
    ],
)
def test_a_refusal_of_the_hub_says_what_to_do(hub: Hub, status: int, code: str, says: str) -> None:
    hub.errors["org/little"] = (status, code)
    with pytest.raises(SourceError, match=says):
        resolve("hf:org/little", sha256=None)


def test_a_revision_that_is_not_there_is_named(hub: Hub) -> None:
    with pytest.raises(SourceError, match="no revision `v9`; expected a branch, a tag or a commit"):
        resolve("hf:org/little@v9", sha256=None)


def test_without_a_network_the_cache_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(SourceError, match="unset HF_HUB_OFFLINE"):
            resolve("hf:org/little", sha256=None)
    folder = resolve("hf:org/little", sha256=None)
    hub.got.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("hf:org/little", sha256=None) == folder
    assert resolve(f"hf:org/little@{COMMIT}", sha256=None) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="not whole in the hub's cache"):
        resolve("hf:org/little", sha256=None)
    assert hub.got == []


def test_a_cache_that_another_program_filled_serves(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layout as the library documents it: refs, snapshots of links, blobs; without the listing that newer versions keep beside it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "hub" / "models--org--other"
    for name in ("refs", "blobs", f"snapshots/{COMMIT}"):
        (root / name).mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for number, name in enumerate(["config.json", "model.safetensors"]):
        (root / "blobs" / str(number)).write_bytes(hub.files[name])
        (root / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{number}")
    folder = resolve("hf:org/other", sha256=None)
    assert read_spec(folder).n_layers == 2
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"lacks 1 of its files with weights, such as model\.safetensors"):
        resolve("hf:org/other", sha256=None)
    (folder / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config\.json"):
        resolve("hf:org/other", sha256=None)


@pytest.mark.parametrize(
    "source", ["hf:little", "hf:org/little/more", "hf:org/../x", "hf:org/little@", "hf:org/little@a b", "hf:-/x", "hf:org/a@../b"]
)
def test_sources_that_are_malformed_are_refused(hub: Hub, source: str) -> None:
    with pytest.raises(SourceError, match="not of the form hf:ORG/NAME"):
        resolve(source, sha256=None)


def test_a_sum_is_refused_with_what_pins_instead(hub: Hub) -> None:
    with pytest.raises(SourceError, match="pin a revision instead"):
        resolve("hf:org/little", sha256="0" * 64)
