"""Fixtures that every folder of tests may use."""

from __future__ import annotations

from tests.fixtures_model import default_model, default_model_path

__all__ = ["default_model", "default_model_path"]
