"""The documents: generated parts are up to date, links lead somewhere, and the README's commands are what CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flare.machines.lifecycle import TRANSITIONS, RequestState
from flare.server.fields import HARMLESS, NEUTRAL
from tools.generate_docs import BLOCKS, diagram, documents, fill

from .sources import PACKAGE_FOLDERS, ROOT, modules, source

MARKDOWN = [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *documents())]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_generated_blocks_are_up_to_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == fill(text), f"run python -m tools.generate_docs: {path.name} lags behind"


def test_every_generated_block_is_shown_once() -> None:
    text = "".join(map(source, MARKDOWN))
    for name in BLOCKS:
        assert text.count(f"<!-- generated {name} -->") == 1, name
        assert text.count(f"<!-- end {name} -->") == 1, name


def test_a_diagram_has_every_move_of_its_table() -> None:
    lines = diagram(RequestState, TRANSITIONS).splitlines()
    for (before, event), after in TRANSITIONS.items():
        (line,) = [line for line in lines if line.strip().startswith(f"{before.value} --> {after.value}:")]
        assert event.__name__ in line.split(": ")[1].split(", ")


@pytest.mark.parametrize("path", MARKDOWN)
def test_links_between_documents_lead_somewhere(path: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", source(path)):
        if "://" not in target:
            assert (ROOT / path).parent.joinpath(target).exists(), f"{path} links to {target}"


def test_ci_installs_and_tests_as_the_readme_says() -> None:
    script = source(".ci/run")
    (development,) = [line for line in source("README.md").splitlines() if line.endswith("-m pytest")]
    install = development.split(" && ")[1].removeprefix(".venv/bin/pip install ")
    assert install in script
    assert "python -m pytest" in script


def test_the_fields_without_effect_are_those_of_the_server() -> None:
    text = source("docs/api.md")
    begin, middle, end = map(text.index, ("**Accepted and without effect:**", "**Refused unless", "**Anything else**"))
    assert set(re.findall(r"`(\w+)`", text[begin:middle])) == HARMLESS
    assert set(re.findall(r"`(\w+)`", text[middle:end])) == NEUTRAL.keys()


def test_sections_that_docstrings_cite_exist() -> None:
    headings = {
        path: set(re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in documents()
    }
    by_name = {f"docs/{path.name}": found for path, found in headings.items()}
    for module in modules(*PACKAGE_FOLDERS):
        text = re.sub(r"\s+", " ", source(module))
        for document, heading in re.findall(r"\((docs/\w+\.md), \"([^\"]+)\"", text):
            assert heading in by_name.get(document, set()), f"{module} cites {document}, {heading!r}"
