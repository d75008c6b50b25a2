"""Fields that other servers know and this one does not act upon.

Owns two tables. Does not own the fields that are acted upon (`wire`). Surprising rule: a field is refused by name where
leaving it out would change the answer, also when nobody has ever heard of it (a misspelt `max_token`), and accepted
where it would change nothing. docs/api.md lists both.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

import msgspec

from .errors import ApiError, invalid

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
LOGIT_BIAS_BYTES_MAX = 64 * 1024
"""Of JSON. A dict of a million keys would hold the interpreter for most of a second before it could be counted."""

_UNKNOWN_FIELD = re.compile(r"unknown field `(.*)`$", re.DOTALL)


class FieldCheck:
    """Looks at the names in a body before anything is made of their values."""

    def __init__(self, known: Sequence[str]) -> None:
        """`known`: the names of the fields that are acted upon."""
        self._known = known
        self._foreign = sorted(NEUTRAL.keys() - set(known))
        names = {*known, *NEUTRAL, *HARMLESS}
        struct = msgspec.defstruct(
            "Names", [(name, msgspec.Raw, msgspec.Raw()) for name in names], forbid_unknown_fields=True
        )
        self._decode = msgspec.json.Decoder(struct).decode

    def check(self, raw: bytes) -> None:
        """Raises `ApiError` 400 for a field that would change the answer or has no meaning here, and msgspec's errors
        for what is no JSON object."""
        try:
            fields = self._decode(raw)
        except msgspec.ValidationError as error:
            found = _UNKNOWN_FIELD.search(str(error))
            raise (self._unknown(found[1]) if found else error) from None
        for name in self._foreign:
            value: msgspec.Raw = getattr(fields, name)
            if len(bytes(value)) > 0 and not _is_neutral(name, value):
                raise invalid(name, f"`{name}` is not supported: leave it out.", code="unsupported_parameter")
        bias: msgspec.Raw = getattr(fields, "logit_bias", msgspec.Raw())
        if len(bytes(bias)) > LOGIT_BIAS_BYTES_MAX:
            raise invalid("logit_bias", "`logit_bias` names too many tokens.")

    def _unknown(self, name: str) -> ApiError:
        shown = name[:SHOWN_CHARACTERS]
        near = difflib.get_close_matches(shown, self._known, n=1)
        return invalid(shown, f"Unknown parameter: `{shown}`." + (f" Did you mean `{near[0]}`?" if near else ""))


def _is_neutral(name: str, raw: msgspec.Raw) -> bool:
    value = msgspec.json.decode(raw)
    return value is None or value in NEUTRAL[name]
