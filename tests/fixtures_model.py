"""The default model, fetched once for all tests through the project's own code."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.default_model import fetch_default_model
from flare.model import Model, open_model


def _no_progress(what: str, done: int, total: int) -> None:
    """Tests show none."""


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """Its GGUF file in the user's cache directory."""
    return fetch_default_model(_no_progress)


@pytest.fixture(scope="session")
def default_model(default_model_path: Path) -> Model:
    """The model as `flare run` opens it."""
    return open_model(None, _no_progress)
