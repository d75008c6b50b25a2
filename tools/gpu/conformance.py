"""The device's conformance suites, on the card.

Owns running them in a process of their own and counting what came of them. Does not own the checks (`tests`).
Surprising rule: a test that was skipped counts as one that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from .report import Finding

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("tests/graphs/cuda/test_conformance_cuda.py",)
ON_THE_CARD = {"FLARE_TEST_CUDA": "1"}
"""Makes the suites take the card in place of the fake runtime."""

TIME_LIMIT_S = 240


def run_suites(suites: Sequence[str] = SUITES, environment: Mapping[str, str] = ON_THE_CARD) -> Iterator[Finding]:
    """One row for all, and one for each test that did not pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *suites]
        ended = subprocess.run(
            command, check=False, cwd=ROOT, env={**os.environ, **environment}, timeout=TIME_LIMIT_S, capture_output=True
        )
        if not report.exists():
            said = (ended.stdout + ended.stderr).decode(errors="replace")[-300:]
            yield Finding("conformance", "does not run", " ".join(said.split()), "runs", ok=False)
            return
        cases = list(ElementTree.parse(report).iter("testcase"))
    bad = [(case, outcome) for case in cases for outcome in case if outcome.tag in ("failure", "error", "skipped")]
    value = f"{len(cases) - len(bad)} of {len(cases)} tests passed"
    yield Finding("conformance", "suites", value, "all, and some", bool(cases) and not bad)
    for case, outcome in bad[:20]:
        said = " ".join((outcome.get("message") or "").split())[:200]
        yield Finding("conformance", str(case.get("name")), f"{outcome.tag}: {said}", "passes", ok=False)
