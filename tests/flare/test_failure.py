"""What a command says of an error: one line, however long, with the file of what the system refused."""

from __future__ import annotations

import errno
import os

import pytest

from flare.failure import show_error


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(ValueError("word " * 60 + "[red]end"))
    assert capsys.readouterr().err == f"error: {'word ' * 60}[red]end\n"


def test_what_the_system_refuses_is_told_without_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    show_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "nope.jsonl"))
    assert capsys.readouterr().err == "error: nope.jsonl: No such file or directory\n"
