"""Writes the generated parts of the documents: state diagrams, and the tables of settings and policies.

Run as `python -m tools.generate_docs` after a change of a transition table or of `config/schema.py`. Owns the blocks
between `<!-- generated NAME -->` and `<!-- end NAME -->`. Surprising rule: a test fails while a document lags behind.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.inspect import FloatType, IntType, LiteralType
from msgspec.structs import FieldInfo

from flare.config.convert import described, fields_by_key, only_in_files
from flare.config.devices import default_texts
from flare.config.loader import flag_of, load_policy
from flare.config.schema import Policy, Settings
from flare.machines import ledger, lifecycle, slot, windows
from flare.machines.table import State, Transitions

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ("balanced", "throughput", "interactive")
S = TypeVar("S", bound=State)
_BLOCK = re.compile(r"<!-- generated (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)


def diagram(states: type[S], table: Transitions[S]) -> str:
    """A mermaid state diagram of `table`: it begins in the first state, and ends in those that nothing leaves."""
    labels: dict[tuple[S, S], list[str]] = {}
    for (before, event), after in table.items():
        labels.setdefault((before, after), []).append(event.__name__)
    order = list(states)
    lines = [f"[*] --> {order[0].value}"]
    for before, after in sorted(labels, key=lambda move: (order.index(move[0]), order.index(move[1]))):
        lines.append(f"{before.value} --> {after.value}: {', '.join(labels[before, after])}")
    left = {before for before, _ in labels}
    lines += [f"{state.value} --> [*]" for state in order if state not in left]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])


def settings_table() -> str:
    """One row for each key of `Settings`."""
    rows = [
        f"| `{key}` | {'' if only_in_files(field) else f'`{flag_of(key)}`'} | {_values(field)} "
        f"| {default_texts(field)} | {described(field)[1]} |"
        for key, field in fields_by_key(Settings).items()
    ]
    return "\n".join(["| key | flag | values | default | meaning |", "| --- | --- | --- | --- | --- |", *rows])


def policy_table() -> str:
    """One row for each coefficient, with the values of the presets."""
    presets = [msgspec.structs.asdict(load_policy(name)) for name in PRESETS]
    rows = [
        ("key", "values", *PRESETS, "meaning"),
        ("---",) * (3 + len(PRESETS)),
        *(
            (f"`{key}`", _values(field), *(f"{preset[key]:g}" for preset in presets), described(field)[1])
            for key, field in fields_by_key(Policy).items()
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "request-machine": lambda: diagram(lifecycle.RequestState, lifecycle.TRANSITIONS),
    "image-windows-machine": lambda: diagram(windows.WindowState, windows.TRANSITIONS),
    "frame-slot-machine": lambda: diagram(slot.SlotState, slot.TRANSITIONS),
    "ledger-machine": lambda: diagram(ledger.LedgerState, ledger.TRANSITIONS),
    "settings": settings_table,
    "policies": policy_table,
}


def fill(text: str) -> str:
    """`text` with each generated block made anew. Raises `KeyError` for a block of an unknown name."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- generated {name} -->\n{BLOCKS[name]()}\n<!-- end {name} -->"

    return _BLOCK.sub(block, text)


def documents() -> list[Path]:
    """The documents that may hold generated blocks."""
    return sorted((ROOT / "docs").glob("*.md"))


def main() -> None:
    """Bring every document up to date, and say which changed."""
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = fill(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"updated {path.relative_to(ROOT)}")


def _values(field: FieldInfo) -> str:
    kind, _ = described(field)
    if isinstance(kind, LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, IntType | FloatType):
        least = f"above {kind.gt:g}" if kind.gt is not None else f"from {kind.ge:g}"
        return f"{least} to {kind.le:g}" if kind.le is not None else least
    names = {
        "BoolType": "true, false",
        "StrType": "text",
        "VarTupleType": "list of texts",
        "DictType": "table of numbers",
    }
    return names[type(kind).__name__]


if __name__ == "__main__":
    main()
