"""Fields that other servers know and this one does not act upon.

Owns two tables. Does not own the fields that are acted upon (`wire`). Surprising rule: a field is refused by name where
leaving it out would change the answer, also when nobody has ever heard of it (a misspelt `max_token`), and accepted
where it would change nothing. docs/api.md lists both.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from .errors import invalid

HARMLESS = frozenset(
    {
        "cache_salt",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "store",
    }
)
"""Fields that leave the text of the answer as it is."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that this server does not support, with the values (besides null) that ask for nothing."""


SHOWN_CHARACTERS = 64


def check_foreign_fields(fields: Mapping[str, msgspec.Raw], known: frozenset[str]) -> None:
    """Raises `ApiError` 400 for a field outside `known` that would change the answer, or that has no meaning here."""
    for name in fields.keys() - known - HARMLESS:
        if name not in NEUTRAL:
            shown = name[:SHOWN_CHARACTERS]
            near = difflib.get_close_matches(shown, known, n=1)
            raise invalid(shown, f"Unknown parameter: `{shown}`." + (f" Did you mean `{near[0]}`?" if near else ""))
        value = msgspec.json.decode(fields[name])
        if value is not None and value not in NEUTRAL[name]:
            raise invalid(name, f"`{name}` is not supported: leave it out.", code="unsupported_parameter")
