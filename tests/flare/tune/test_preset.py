"""What a tuned preset looks like, and that it reads back exactly."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from flare.config.loader import load_policy
from flare.tune.preset import toml


@pytest.mark.parametrize("name", ["balanced", "interactive", "throughput"])
def test_a_policy_reads_back_exactly(name: str, tmp_path: Path) -> None:
    policy = msgspec.structs.replace(load_policy(name), decode_age_price=0.1 + 0.2, gap_price=1e-5, gap_stretch=1e6)
    path = tmp_path / "policy.toml"
    path.write_text(toml(policy, ["What it rests on: " + "much " * 50, "More."]), encoding="utf-8")
    assert load_policy(str(path)) == policy


def test_comments_are_wrapped_and_stand_above() -> None:
    lines = toml(load_policy("balanced"), ["word " * 60, "More."]).splitlines()
    end = lines.index("")
    assert end == 4 and all(line.startswith("# ") and len(line) <= 120 for line in lines[:end])
    assert lines[3] == "# More." and "output_token_value = 64" in lines
