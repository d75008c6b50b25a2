"""The measurement of tools/paced_soak.py: its readers, and a short run of the whole server on a paced device."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tools.paced_soak import LETTERS, Reader, expected_text, parse, prompt_of, soak, tokens_of

EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"choices":[{"index":0,"text":"bc"}]}\n\ndata: [DONE]\n\n'
)
ANSWER = b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS


@pytest.fixture
def switch_interval() -> Iterator[None]:
    """Give the interpreter its switch interval back."""
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.asyncio
@pytest.mark.parametrize("cut", [1, 7, 40, len(ANSWER)])
async def test_a_reader_finds_text_however_it_is_cut(cut: int) -> None:
    reader = Reader(Counter(), asyncio.get_running_loop().create_future())
    for start in range(0, len(ANSWER), cut):
        reader.data_received(ANSWER[start : start + cut])
    reader.connection_lost(None)
    assert b"".join(reader.pieces) == b"abc"
    assert reader.done
    assert reader.ended.done()


def test_expected_text_is_one_letter_a_token_and_differs_between_streams() -> None:
    texts = [expected_text(stream, 50) for stream in range(64)]
    assert all(len(text) == 50 and text.isalpha() and text.islower() for text in texts)
    assert len(set(texts)) == 64
    assert len({tuple(prompt_of(stream)) for stream in range(64)}) == 64
    assert len(LETTERS) == 26


@pytest.mark.usefixtures("switch_interval")
def test_every_token_reaches_its_reader_over_http() -> None:
    arguments = parse(["--minutes", "0.01", "--streams", "5"])
    device, measured = soak(arguments)
    assert measured.reader is not None
    assert measured.reader.wrong == []
    assert measured.reader.tokens == 5 * tokens_of(arguments) == 300
    assert len(device.periods()) >= tokens_of(arguments)
