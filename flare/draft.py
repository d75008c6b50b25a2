"""What proposes tokens for the model that is served.

Owns the choice: a draft model that was named, else the head that was trained for the default model, else nothing but
copies. Does not own either's weights. Surprising rule: whether there is a draft is known from the settings alone,
before any model is opened, since the catalog of graphs depends on it.
"""

from __future__ import annotations

from importlib.resources import as_file, files

from flare.config.schema import ConfigError, Settings
from flare.graphs.catalog import Speculation
from flare.graphs.models.draft import DraftModel, load_draft_head, whole_model

from .default_model import Progress
from .model import Model, open_model
from .tokens.tokenizer import Tokenizer

HEAD = "smollm2-135m-instruct.safetensors"
"""The head of the default model, among the package's data."""


def speculation(settings: Settings) -> Speculation | None:
    """What rounds of several tokens there are to be."""
    mode, _, width = settings.speculative.partition(":")
    if mode == "off":
        return None
    return Speculation(_has_draft(settings), int(width) if width else None, settings.speculative_token_capacity)


def open_draft(settings: Settings, model: Model, progress: Progress) -> DraftModel | None:
    """The draft for `model`; the simulated device needs none. Raises `ModelError` or `ConfigError` for a draft model
    that cannot be had or used."""
    if settings.device == "sim" or settings.speculative == "off" or not _has_draft(settings):
        return None
    if settings.draft_model is None:
        with as_file(files("flare.graphs") / "models" / "drafts" / HEAD) as path:
            return load_draft_head(path, model.config, model.weights)
    draft = open_model(settings.draft_model, progress)
    if not _same_tokens(draft.tokenizer, model.tokenizer):
        raise ConfigError(
            f"draft_model: {draft.name} has other tokens than {model.name}; name one of the same tokenizer"
        )
    try:
        return whole_model(draft.name, draft.config, draft.weights, model.config)
    except ValueError as error:
        raise ConfigError(f"draft_model: {error}") from None


def _has_draft(settings: Settings) -> bool:
    return settings.draft_model is not None or settings.model is None


def _same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    return one.vocab_size == other.vocab_size and all(
        one.token_bytes(token) == other.token_bytes(token) for token in range(one.vocab_size)
    )
