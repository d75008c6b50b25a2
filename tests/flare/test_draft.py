"""Which draft goes with which settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flare.config.loader import load_settings
from flare.config.schema import ConfigError
from flare.draft import open_draft, speculation
from flare.graphs.catalog import Speculation
from flare.graphs.models.draft import whole_model
from flare.model import open_model
from tools.cut_model import cut


def quiet(_what: str, _done: int, _total: int) -> None:
    """No progress is shown."""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"speculative": "off"}, None),
        ({}, Speculation(drafts=True, width=None, envelope=64)),
        ({"speculative": "fixed:3", "speculative_token_capacity": 24}, Speculation(True, 3, 24)),
        ({"model": "some.gguf"}, Speculation(drafts=False, width=None, envelope=64)),
        ({"model": "some.gguf", "draft_model": "small.gguf"}, Speculation(True, None, 64)),
    ],
)
def test_the_settings_say_what_rounds_there_are(given: dict[str, object], wanted: Speculation | None) -> None:
    assert speculation(load_settings(None, given, {})) == wanted


@pytest.mark.parametrize("mode", ["fixed:0", "fixed:9", "on", ""])
def test_other_modes_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        load_settings(None, {"speculative": mode}, {})


def test_the_default_model_has_a_head_of_its_own(default_model_path: Path) -> None:
    model = open_model(str(default_model_path), quiet)
    draft = open_draft(load_settings(None, {}, {}), model, quiet)
    assert draft is not None
    assert draft.reads_hidden
    assert draft.kept is not None
    assert (draft.config.layers, draft.config.vocab) == (1, len(draft.kept))
    assert open_draft(load_settings(None, {"speculative": "off"}, {}), model, quiet) is None


def test_a_cut_model_drafts_for_the_whole(default_model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    cut(default_model_path, path, 2)
    model = open_model(str(default_model_path), quiet)
    settings = load_settings(None, {"model": str(default_model_path), "draft_model": str(path)}, {})
    draft = open_draft(settings, model, quiet)
    assert draft is not None
    assert not draft.reads_hidden
    assert draft.config == msgspec.structs.replace(model.config, layers=2)
    with pytest.raises(ValueError, match="--layers 31: the model has 1 to 30"):
        cut(default_model_path, tmp_path / "more.gguf", 31)


def test_a_draft_of_another_vocabulary_is_refused(default_model_path: Path) -> None:
    model = open_model(str(default_model_path), quiet)
    other = msgspec.structs.replace(model.config, vocab=100)
    with pytest.raises(ValueError, match="other has 100 tokens, the model that it drafts for 49152"):
        whole_model("other", other, model.weights, model.config)
