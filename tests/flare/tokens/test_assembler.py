"""Streamed text against the whole string: any tokens, any grouping, any stop strings."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.model import Model
from flare.tokens.assembler import TextAssembler
from flare.tokens.tokenizer import Tokenizer

SPECIAL = 0


@dataclass(frozen=True)
class ListedTokens:
    """Tokens given by their bytes; 0 is a control token."""

    pieces: tuple[bytes, ...]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_special(self, token: int) -> bool:
        return token == SPECIAL


def assembler(pieces: list[bytes], stop: list[str]) -> TextAssembler:
    return TextAssembler(cast(Tokenizer, ListedTokens((b"<end>", *pieces))), stop)


def decoded_with_starts(data: bytes) -> tuple[str, list[int]]:
    """The whole text, and for each byte the index of its character, from Python's own decoder and its error hook."""
    bad: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        bad.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note-bad-bytes", note)
    text = data.decode("utf-8", "note-bad-bytes")
    ends = dict(bad)
    index_of: list[int] = []
    for index, character in enumerate(text):
        width = ends[len(index_of)] - len(index_of) if len(index_of) in ends else len(character.encode())
        index_of += [index] * width
    assert len(index_of) == len(data)
    return text, index_of


UNFINISHED_CHARACTERS = {
    chr(code).encode()[:length]
    for code in (*range(0x80, 0xD800, 64), *range(0xE000, 0x110000, 64))
    for length in range(1, len(chr(code).encode()))
}
"""Every beginning of a character that more bytes can complete."""


def decoded_so_far(data: bytes, final: bool) -> str:
    """All that is certain of `data`: an unfinished character at its end is awaited, unless nothing follows."""
    awaited = (
        0 if final else max((n for n in (1, 2, 3) if data[-n:] in UNFINISHED_CHARACTERS and n <= len(data)), default=0)
    )
    return data[: len(data) - awaited].decode("utf-8", "replace")


def first_stop(text: str, stop: list[str]) -> tuple[int, str] | None:
    """Where the earliest stop string begins, the shortest of those that begin there."""
    found = [(text.find(each), len(each), each) for each in stop if each in text]
    return (min(found)[0], min(found)[2]) if found else None


def held_from(text: str, stop: list[str]) -> int:
    """Where the longest suffix begins that is a proper prefix of a stop string."""
    return min(
        (at for at in range(len(text)) if any(each != text[at:] and each.startswith(text[at:]) for each in stop)),
        default=len(text),
    )


PIECES = st.lists(
    st.text("abZ日é🙂", min_size=1, max_size=4).map(str.encode)
    | st.binary(min_size=1, max_size=3)
    | st.sampled_from(
        [b"\xf0\x9f", b"\x98", b"\x80", b"\xe6\x97", b"\xa5", b"\xe0", b"\x80a", b"\xef\xbf", b"\xbd", b"\xed", b"\xa0"]
    ),
    min_size=1,
    max_size=12,
)
STOPS = st.lists(st.text("abZ日\ufffd", min_size=1, max_size=4), max_size=4)


@given(PIECES, STOPS, st.data())
@settings(deadline=None, max_examples=400)
def test_any_grouping_gives_the_text_before_the_first_stop(
    pieces: list[bytes], stop: list[str], data: st.DataObject
) -> None:
    tokens = list(range(1, len(pieces) + 1))
    for at in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=2)), reverse=True):
        tokens.insert(at, SPECIAL)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    bounds = [0, *cuts, len(tokens)]
    whole, index_of = decoded_with_starts(b"".join(pieces))
    expected = first_stop(whole, stop)

    streaming = assembler(pieces, stop)
    sent, seen = "", 0
    offsets: list[int] = []
    for group, (begin, end) in enumerate(pairwise(bounds)):
        final = group == len(bounds) - 2
        piece = streaming.push(tokens[begin:end], final)
        sent += piece.text
        offsets += piece.offsets
        assert len(piece.offsets) == end - begin
        assert (piece.stopped_by is not None) == (streaming.stopped_by is not None)
        seen += sum(len(pieces[token - 1]) for token in tokens[begin:end] if token != SPECIAL)
        known = decoded_so_far(b"".join(pieces)[:seen], final)
        if piece.stopped_by is None:  # all has left but what may still become a stop string
            assert sent == (known if final else known[: held_from(known, stop)])

    if expected is None:
        assert (sent, streaming.stopped_by) == (whole, None)
    else:
        assert (sent, streaming.stopped_by) == (whole[: expected[0]], expected[1])
    visible = len(sent)
    at_byte = 0
    for token, offset in zip(tokens, offsets, strict=True):
        if token != SPECIAL:
            true_offset = index_of[at_byte]
            assert offset == true_offset or (expected is not None and offset == visible <= true_offset)
            at_byte += len(pieces[token - 1])


def streamed(model: Model, text: str, stop: list[str]) -> tuple[list[str], str | None]:
    streaming = TextAssembler(model.tokenizer, stop)
    tokens = model.tokenizer.encode(text, parse_special=False)
    pieces = [streaming.push([token]) for token in tokens] + [streaming.push([], final=True)]
    return [piece.text for piece in pieces], streaming.stopped_by


@pytest.mark.parametrize(
    ("text", "stop", "visible", "stopped_by"),
    [
        ("DEFGHIJKLMN", ["DEFGHIJ"], "", "DEFGHIJ"),
        ("DEFGHIJKLMN", ["DE"], "", "DE"),
        ("DEFGHIJKLMN", ["EF"], "D", "EF"),
        ("DEFGHIJKLMN", ["HI"], "DEFG", "HI"),
        (" 6, 7, 8, 9", [", 8"], " 6, 7", ", 8"),
        (" 6, 7, 8, 9,", [", 9, X"], " 6, 7, 8, 9,", None),
        (" 6, 7, 8, 9,", ["7, 8, 9", "8"], " 6, ", "7, 8, 9"),
        (" 6, 7, 8, 9,", ["7, 8, X", "8"], " 6, 7, ", "8"),
        (" 6, 7, 8", ["7, 8, X", "8"], " 6, 7, ", "8"),
    ],
)
def test_stop_strings_end_the_text_at_the_character(
    default_model: Model, text: str, stop: list[str], visible: str, stopped_by: str | None
) -> None:
    pieces, found = streamed(default_model, text, stop)
    assert ("".join(pieces), found) == (visible, stopped_by)


def test_a_stop_string_that_does_not_begin_holds_nothing_back(default_model: Model) -> None:
    text = " 6, 7, 8, 9, 10, 11"
    assert streamed(default_model, text, ["ZZZZZZZZZZZZZZZZ"])[0] == streamed(default_model, text, [])[0]
    assert all(streamed(default_model, text, [])[0][:-1])


def test_characters_leave_when_they_are_whole(default_model: Model) -> None:
    assert streamed(default_model, "日本語", [])[0] == ["", "日", "本", "", "", "語", ""]


def test_each_bad_sequence_is_one_replacement_as_soon_as_it_is_bad() -> None:
    pieces = [b"\xf0\x9f", b"\x8c"]
    streaming = assembler(pieces, [])
    texts = [streaming.push([token]).text for token in [1, 2] * 3]
    assert texts == ["", "", "\ufffd", "", "\ufffd", ""]
    assert streaming.push([], final=True).text == "\ufffd"


def test_nothing_follows_a_stop() -> None:
    streaming = assembler([b"one stop", b" two"], ["stop"])
    assert streaming.push([1]).text == "one "
    after = streaming.push([2], final=True)
    assert (after.text, after.offsets, after.stopped_by) == ("", (4,), "stop")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop"):
        assembler([b"a"], ["a", ""])
