"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flare.server.engine_api import Health

from .model_server import ModelServer, run_model
from .scripted_engine import ScriptedEngine, text_script
from .serving import Served, serve


@pytest.fixture(scope="session")
def scripted_server() -> Iterator[Served]:
    """A server over a scripted engine, for all tests that need no other settings."""
    with serve(ScriptedEngine()) as running:
        yield running


@pytest.fixture
def served(scripted_server: Served) -> Served:
    """That server, with an engine as if new: it says "hello"."""
    engine = scripted_server.engine
    scripted_server.release()
    engine.script = lambda _: text_script("hello")
    engine.health = Health.SERVING
    engine.refusal = None
    engine.requests.clear()
    engine.streams.clear()
    return scripted_server


@pytest.fixture(scope="session")
def server(default_model_path: Path) -> Iterator[ModelServer]:
    """The default model as a newcomer serves it."""
    with run_model("--max-num-seqs", "16") as running:
        yield running
