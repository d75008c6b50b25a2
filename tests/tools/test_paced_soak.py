"""The measurement of tools/paced_soak.py: its readers, and a short run of the whole server on a paced device."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter

import pytest

import tools.paced_soak
from tools.paced_soak import LETTERS, Reader, expected_text, prompt_of

TOOL = tools.paced_soak.__file__

EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: {"choices":[{"index":0,"text":"bc"}]}\n\ndata: [DONE]\n\n'
)
ANSWER = b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS


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


def test_every_token_reaches_its_reader_over_http() -> None:
    """In a process of its own, as a user runs it; how even the pace was is not for a test to say."""
    command = [sys.executable, TOOL, "--minutes", "0.01", "--streams", "5"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    lines = ended.stdout.splitlines()
    assert any(line.startswith("tokens delivered 300 of 300,") for line in lines), ended.stdout + ended.stderr
    assert all("the period's median" in line for line in lines if line.startswith("WRONG"))
