"""House rules that no linter knows (docs/architecture.md, "House rules")."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .sources import FOLDERS, PACKAGE_FOLDERS, absolute_imports, modules, source, texts, tree

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

FUNCTION_LEVEL_IMPORTS: dict[str, str] = {
    "flare/graphs_command.py": "planning a catalog loads torch; the table of a running server does not wait for it",
    "flare/run_command.py": "the server loads torch; no other command waits for it",
}
"""Modules that may import inside functions, and why."""

IMPURE_MODULES = {
    *("time", "datetime", "random", "secrets", "uuid", "os", "io", "pathlib", "tempfile", "subprocess", "socket"),
    *("threading", "asyncio", "anyio", "logging", "structlog", "torch", "starlette", "contextvars"),
}
IMPURE_CALLS = {"open", "print", "input", "id", "hash"}
"""Inside machines/: `id` and `hash` differ from run to run."""

MACHINE_PATH = re.compile(r"(?<![\w.:/~$}<-])/(?:home|root|opt|mnt|srv|work|Users)/")
PACKAGE_INDEX = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.org|download\.pytorch\.org", re.IGNORECASE)
UNFINISHED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")

ALL_MODULES = modules(*FOLDERS)
PACKAGE_MODULES = modules(*PACKAGE_FOLDERS)
PURE_MODULES = modules("machines")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(module) if isinstance(node, Function))


@pytest.mark.parametrize("path", ALL_MODULES)
def test_every_module_says_what_it_is(path: str) -> None:
    assert ast.get_docstring(tree(path)), f"{path} has no docstring"


@pytest.mark.parametrize("path", ALL_MODULES)
def test_modules_and_functions_stay_small(path: str) -> None:
    lines = source(path).count("\n")
    assert lines <= MODULE_LINES_MAX, f"{path} has {lines} lines"
    for function in functions(tree(path)):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= FUNCTION_LINES_MAX, f"{path}: {function.name} has {length} lines"


@pytest.mark.parametrize("path", PURE_MODULES)
def test_machines_read_no_clock_and_do_no_io(path: str) -> None:
    for node in ast.walk(tree(path)):
        for name in absolute_imports(node):
            assert name.split(".")[0] not in IMPURE_MODULES, f"{path} imports {name}"
        if isinstance(node, ast.Attribute) and node.attr == "random":
            pytest.fail(f"{path}:{node.lineno} uses {ast.unparse(node)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in IMPURE_CALLS, f"{path}:{node.lineno} calls {node.func.id}"


@pytest.mark.parametrize("path", ALL_MODULES)
def test_the_linked_folders_have_one_name(path: str) -> None:
    for node in ast.walk(tree(path)):
        for name in absolute_imports(node):
            assert name.split(".")[0] not in {"config", "graphs", "machines"}, (
                f"{path} imports {name}: a second name makes a second copy of each class; import flare.{name}"
            )


@pytest.mark.parametrize("path", PACKAGE_MODULES)
def test_imports_are_at_the_top(path: str) -> None:
    inside = [
        node
        for function in functions(tree(path))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    if path not in FUNCTION_LEVEL_IMPORTS:
        assert not inside, f"{path}:{inside[0].lineno} imports inside a function"


@pytest.mark.parametrize("path", PACKAGE_MODULES)
def test_no_import_is_for_the_type_checker_alone(path: str) -> None:
    assert "TYPE_CHECKING" not in source(path), f"{path} hides an import from the running program"


def test_exceptions_to_the_import_rule_are_needed() -> None:
    for path in FUNCTION_LEVEL_IMPORTS:
        nodes = [node for function in functions(tree(path)) for node in ast.walk(function)]
        assert any(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes), f"{path} needs no exception"


@pytest.mark.parametrize("path", texts())
def test_texts_are_finished_and_speak_of_no_particular_machine(path: str) -> None:
    for number, line in enumerate(source(path).split("\n"), 1):
        assert not UNFINISHED.search(line), f"{path}:{number} is unfinished"
        assert not MACHINE_PATH.search(line), f"{path}:{number} names a path of one machine"
        if path != "tests/test_tidy.py":
            assert not PACKAGE_INDEX.search(line), f"{path}:{number} names a package index; pip knows its own"
