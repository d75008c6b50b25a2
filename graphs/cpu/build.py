"""Compiling the native program once, and finding it again.

Owns the compiler's command line and the cache of shared objects, keyed by sources, flags, compiler and CPU. Does not
own the program. Surprising rule: the code is tuned to the CPU that it is built on, so a cache directory that moves to
another kind of CPU is compiled anew, not trusted.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
COMPILERS = ("g++", "c++", "clang++")
COMPILE_SECONDS_MAX = 300


class CannotCompile(RuntimeError):
    """There is no native program; the message tells a person why and what to do."""


def native_library(cache_dir: Path) -> Path:
    """The compiled program, from `cache_dir` or built now. Raises `CannotCompile`."""
    compiler = find_compiler()
    sources = _sources()
    library = cache_dir / f"step-{_key(compiler, sources)}.so"
    if not library.exists():
        _compile(compiler, sources, library)
    return library


def find_compiler() -> str:
    """The C++ compiler's path: `$CXX` if set, else the first of COMPILERS. Raises `CannotCompile`."""
    named = os.environ.get("CXX")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise CannotCompile(
        f"no C++ compiler found ({'$CXX is ' + named if named else 'tried ' + ', '.join(COMPILERS)}): "
        "install g++ for the fast programs"
    )


def _sources() -> dict[str, bytes]:
    files = (resources.files(__package__) / "native").iterdir()
    return {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}


def _key(compiler: str, sources: dict[str, bytes]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((FLAGS, compiler, version, platform.machine(), _cpu())).encode())
    for name, source in sources.items():
        digest.update(name.encode() + source)
    return digest.hexdigest()[:16]


def _cpu() -> str:
    """What `-march=native` depends on, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, sources: dict[str, bytes], library: Path) -> None:
    """Build in a private directory and move into place, so that two servers may start at once."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for name, source in sources.items():
            (Path(folder) / name).write_bytes(source)
        built = Path(folder) / "step.so"
        command = [compiler, *FLAGS, "-o", str(built), str(Path(folder) / "step.cpp")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotCompile(f"{compiler} could not build the native program: {error}") from error
        if done.returncode:
            raise CannotCompile(f"{compiler} could not build the native program: {done.stderr.strip()[-500:]}")
        built.replace(library)
