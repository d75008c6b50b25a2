"""Fixtures that every folder of tests may use. Property tests have no deadline: a busy machine is no failure."""

from __future__ import annotations

from hypothesis import settings

from tests.fixtures_model import default_model, default_model_path

__all__ = ["default_model", "default_model_path"]

settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
