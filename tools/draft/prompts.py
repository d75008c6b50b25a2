"""What the model is asked: the prompts of its texts, and those on which its draft head is judged.

Owns drawing conversations from the patterns of prompts.toml, asked.txt (questions that the model wrote) and
held_out.txt. Does not own chat templates.
Surprising rule: a draw never comes twice, so that no greedy text does either.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from flare.bench.prompts import text

Messages = tuple[tuple[str, str], ...]
"""(role, content) of each turn."""

SYSTEM_SHARE = 0.2
"""Of the conversations that begin with a system message of their own; the others get the template's."""

WORDS_SHARE = 0.05
"""Of the conversations that are words without sense, as `flare bench` sends them."""

_WORDS = (20, 120)
_FOLDER = Path(__file__).parent

ASKED = _FOLDER / "asked.txt"

_GAP = re.compile(r"\{(\w+)\}")


def drawn_prompts(seed: int) -> Iterator[Messages]:
    """Conversations without end, none of them twice."""
    with (_FOLDER / "prompts.toml").open("rb") as file:
        content = tomllib.load(file)
    draw = random.Random(seed)
    fills: dict[str, list[str]] = content["fills"]
    seen: set[Messages] = set()
    while True:
        pattern = draw.choice(content["patterns"])
        if draw.random() < WORDS_SHARE:
            pattern = [" ".join(text(draw, draw.randint(*_WORDS)))]
        turns = [_GAP.sub(lambda gap: draw.choice(fills[gap[1]]), turn) for turn in pattern]
        messages = tuple((("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns))
        if draw.random() < SYSTEM_SHARE:
            messages = (("system", draw.choice(content["systems"])), *messages)
        if messages not in seen:
            seen.add(messages)
            yield messages


def held_out_prompts() -> list[Messages]:
    """The questions which no head is trained on."""
    return _lines(_FOLDER / "held_out.txt")


def asked_prompts() -> list[Messages]:
    """The questions that the model wrote."""
    return _lines(ASKED)


def kept_questions(written: Iterable[str]) -> list[str]:
    """Lines for asked.txt: what has letters, none twice, none of the held-out."""
    held = {content for messages in held_out_prompts() for _, content in messages}
    once = dict.fromkeys(text.strip() for text in written)
    return [_line(text) for text in once if text not in held and re.search("[a-z]{3}", text)]


def _lines(path: Path) -> list[Messages]:
    """One question a line; `\\n` in a line is a line break."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [(("user", line.replace("\\n", "\n")),) for line in lines if line]


def _line(text: str) -> str:
    return text.replace("\r", "").replace("\n", "\\n")
