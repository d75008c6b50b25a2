"""Finding a compiler, the cache of compiled programs, and serving without either."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.cache import cache_dir
from flare.graphs.cpu.build import CannotCompile, native_library
from flare.graphs.cpu.device import CpuDevice
from flare.graphs.cpu.native import NativeStep
from flare.graphs.programs.reference import ReferenceStep
from flare.machines.graph import GraphKind, GraphShape
from tests.graphs.programs_driver import Tensors
from tests.tiny_models import tiny_config, tiny_tensors

CATALOG = [GraphShape(GraphKind.DECODE, 2), GraphShape(GraphKind.PREFILL, 1, 64)]


def unprepared(
    cache: Path,
    said: list[str],
    *,
    eager: bool = False,
    head_dim: int = 64,
    max_model_len: int = 128,
    kv_bytes: int = 4 << 20,
) -> CpuDevice:
    """A device of a tiny model."""
    config = tiny_config(head_dim=head_dim)
    return CpuDevice(
        config,
        Tensors(tiny_tensors(config)),
        request_slots=2,
        max_model_len=max_model_len,
        kv_bytes=kv_bytes,
        dtype="auto",
        threads=1,
        eager=eager,
        cache_dir=cache,
        warn=said.append,
    )


def device(cache: Path, said: list[str], *, eager: bool = False, head_dim: int = 64) -> CpuDevice:
    """A prepared device of a tiny model that has not been started."""
    made = unprepared(cache, said, eager=eager, head_dim=head_dim)
    seen: list[tuple[int, int]] = []
    made.prepare(CATALOG, lambda _shape, done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    return made


def test_the_compiled_program_is_found_again() -> None:
    library = native_library(cache_dir())
    built_at = library.stat().st_mtime_ns
    assert native_library(cache_dir()) == library
    assert library.stat().st_mtime_ns == built_at


def test_without_a_compiler_it_says_so_and_runs_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    made = device(tmp_path, said)
    assert isinstance(made.program, ReferenceStep)
    assert len(said) == 1
    assert "install g++" in said[0]
    made.close()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'out of cheese' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(CannotCompile, match="out of cheese"):
        native_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_model_that_does_not_fit_the_fast_formats_runs_eagerly(tmp_path: Path) -> None:
    said: list[str] = []
    made = device(tmp_path, said, head_dim=48)
    assert isinstance(made.program, ReferenceStep)
    assert "head_dim" in said[0]
    made.close()


def test_eager_compiles_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    made = device(tmp_path / "cache", said, eager=True)
    assert isinstance(made.program, ReferenceStep)
    assert not said
    assert not (tmp_path / "cache").exists()
    made.close()


def test_a_capable_machine_gets_the_compiled_program() -> None:
    made = device(cache_dir(), [])
    assert isinstance(made.program, NativeStep)
    made.close()
    made.close()


def test_a_cache_too_small_for_one_request_is_refused_with_the_number_to_give() -> None:
    made = unprepared(cache_dir(), [], eager=True, max_model_len=512, kv_bytes=1 << 16)
    with pytest.raises(ValueError, match=r"kv_bytes: 65536 .* needs 16"):
        made.prepare(CATALOG, lambda *_: None)
