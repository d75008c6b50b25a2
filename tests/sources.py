"""The project's own files, as the tests about the project read them.

Owns the lists of modules and texts. Surprising rule: `flare/` holds links to the top-level folders; they are skipped
here, so that each file is seen once, under its real path.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = ("config", "machines", "graphs", "flare")
FOLDERS = (*PACKAGE_FOLDERS, "tests", "tools")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".cpp", ".hpp", ".html", ".js", ".css"}


def files(folder: Path) -> Iterator[Path]:
    """Files below `folder` in name order, without links and caches."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or path.name == "__pycache__" or path.name.endswith(".egg-info"):
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


@functools.cache
def modules(*folders: str) -> tuple[str, ...]:
    """Python files below these folders, relative to the root."""
    found = (path for folder in folders for path in files(ROOT / folder))
    return tuple(str(path.relative_to(ROOT)) for path in found if path.suffix == ".py")


@functools.cache
def texts() -> tuple[str, ...]:
    """Every file that people read: sources, documents, settings and scripts, relative to the root."""
    folders = [path for folder in (*FOLDERS, "docs") for path in files(ROOT / folder) if path.suffix in TEXT_SUFFIXES]
    top = [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.suffix in TEXT_SUFFIXES]
    return tuple(str(path.relative_to(ROOT)) for path in (*top, ROOT / ".ci" / "run", *folders))


@functools.cache
def source(path: str) -> str:
    """The text of a file, named relative to the root."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree(path: str) -> ast.Module:
    """The syntax tree of a module, named relative to the root."""
    return ast.parse(source(path), path)


def absolute_imports(node: ast.AST) -> list[str]:
    """Modules that an absolute import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
        return [node.module]
    return []
