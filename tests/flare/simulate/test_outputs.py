"""Places for results: those that cannot be written are found by a try, which leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.simulate.outputs import OutputError, try_file, try_folder, writing

FULL = Path("/dev/full")


def test_a_try_leaves_files_as_they_are(tmp_path: Path) -> None:
    held = tmp_path / "held.json"
    held.write_text("held", encoding="utf-8")
    try_file("--json", held)
    try_file("--json", tmp_path / "fresh.json")
    try_file("--json", None)
    try_folder("--plots", None)
    assert [path.name for path in tmp_path.iterdir()] == ["held.json"] and held.read_text(encoding="utf-8") == "held"
    try_folder("--plots", tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"--json: cannot write .*/none/x\.json: No such file or directory; name"):
        try_file("--json", tmp_path / "none" / "x.json")
    with pytest.raises(OutputError, match=r"--json: cannot write .*: Is a directory"):
        try_file("--json", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"--plots: cannot write .*/file: File exists"):
        try_folder("--plots", tmp_path / "file")
    with pytest.raises(OutputError, match="--json: cannot write /dev/full: No space left"), writing("--json", FULL):
        FULL.write_bytes(b"x")
