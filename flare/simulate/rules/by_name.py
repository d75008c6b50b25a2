"""The rules by the names that they have on the command line.

Owns the names and the default of each rule's one parameter. Surprising rule: `vtc` and `vllm-table` take none, that of
`fastserve` is a number of requests and that of rules that speculate one of proposals, where others count tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..iteration import Rule
from .adaptive import AdaptiveVerificationRule
from .drafting import DraftingRule, TableRule
from .fastserve import FastServeRule
from .prefill_first import PrefillFirstRule
from .sarathi import SarathiRule
from .turbospec import TurboSpecRule
from .vllm import VllmRule
from .vtc import VtcRule

_RULES: Mapping[str, Callable[[int], Rule]] = MappingProxyType(
    {
        "vllm": VllmRule,
        "sarathi": SarathiRule,
        "prefill-first": PrefillFirstRule,
        "fastserve": FastServeRule,
        "static": DraftingRule,
        "turbospec": TurboSpecRule,
        "vllm-adaptive": AdaptiveVerificationRule,
    }
)
_PLAIN: Mapping[str, Callable[[], Rule]] = MappingProxyType(
    {"vtc": VtcRule, "fastserve": FastServeRule, "vllm-table": TableRule}
)
_DEFAULTS: Mapping[str, int] = MappingProxyType(
    {"vllm": 2048, "sarathi": 512, "prefill-first": 8192, "static": 3, "turbospec": 7, "vllm-adaptive": 7}
)
_LEAST: Mapping[str, int] = MappingProxyType({"prefill-first": PrefillFirstRule.block, "static": 0})
"""Chunks of the first are whole blocks; no proposals are a number of them too."""

_SPECULATING = frozenset({"static", "turbospec", "vllm-adaptive", "vllm-table"})

_NUMBER = re.compile(r"0*[0-9]{1,9}")


def is_rule(name: str) -> bool:
    """Whether `name` means a rule rather than a policy of Flare."""
    base = name.partition(":")[0]
    return base in _RULES or base in _PLAIN


def speculates(name: str) -> bool:
    """Whether `name` means a rule that makes proposals."""
    return name.partition(":")[0] in _SPECULATING


def canonical(name: str) -> str:
    """The name with its parameter: `vllm` is `vllm:2048`. Raises ValueError for a parameter that the rule lacks."""
    base, colon, number = name.partition(":")
    if not colon:
        return f"{base}:{_DEFAULTS[base]}" if base in _DEFAULTS else base
    if base not in _RULES:
        raise ValueError(f"{name}: {base} takes no parameter; leave out :{number}")
    least = _LEAST.get(base, 1)
    if not _NUMBER.fullmatch(number) or int(number) < least:
        raise ValueError(
            f"{name:.40}: give a whole number from {least} to 999999999, as {base}:{_DEFAULTS.get(base, 64)}"
        )
    return f"{base}:{int(number)}"


def make_rule(name: str) -> Rule:
    """A fresh rule of that name. Raises ValueError as `canonical` does."""
    base, _, number = canonical(name).partition(":")
    return _RULES[base](int(number)) if number else _PLAIN[base]()
