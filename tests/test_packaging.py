"""What is installed: every package and data file, usable from a directory that has our folders' names."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .sources import PACKAGE_FOLDERS, ROOT, absolute_imports, files, modules, source, tree

PROJECT = tomllib.loads(source("pyproject.toml"))


def installed_name(path: Path) -> str:
    """Where a file of the tree stands below site-packages."""
    relative = str(path.relative_to(ROOT))
    return relative if relative.startswith("flare/") else f"flare/{relative}"


def canonical(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


def test_every_folder_with_modules_is_a_listed_package() -> None:
    folders = {str(Path(installed_name(ROOT / path)).parent).replace("/", ".") for path in modules(*PACKAGE_FOLDERS)}
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)
    for folder in folders:
        assert (ROOT / folder.replace(".", "/") / "__init__.py").is_file(), f"{folder} has no __init__.py"


def test_the_links_are_relative() -> None:
    for name in ("config", "graphs", "machines"):
        assert os.readlink(ROOT / "flare" / name) == f"../{name}"


def test_constraints_pin_each_dependency_within_its_range() -> None:
    lines = [line for line in source("constraints.txt").splitlines() if not line.startswith("#")]
    pins = {canonical(name): version for name, version in (line.split("==") for line in lines)}
    project = PROJECT["project"]
    optional = project["optional-dependencies"]
    extras = [text for extra in optional for text in optional[extra] if extra != "cuda"]  # it follows torch's build
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        assert canonical(requirement.name) in pins, f"{requirement.name} is not pinned"
        version = pins[canonical(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"
    assert pins["torch"].count("+") == 0, "a build suffix would refuse every other build of torch"


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    nodes = [node for path in modules(*PACKAGE_FOLDERS) for node in ast.walk(tree(path))]
    roots = {name.split(".")[0] for node in nodes for name in absolute_imports(node)} - sys.stdlib_module_names
    owners = packages_distributions()
    used = {canonical(owners[root][0]) for root in roots - {"flare"}}
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["plots"]]
    declared = {canonical(Requirement(text).name) for text in wanted}
    assert used == declared


def test_one_module_alone_asks_for_cuda_and_only_when_a_card_is_opened() -> None:
    """Elsewhere it is not installed."""
    asking = [path for path in modules(*PACKAGE_FOLDERS) if "cuda.bindings" in source(path)]
    assert asking == ["graphs/cuda/driver.py"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, as pip builds it."""
    copy, out = tmp_path_factory.mktemp("tree") / "flare", tmp_path_factory.mktemp("wheel")
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in PACKAGE_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(copy)], check=True)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {installed_name(path) for folder in PACKAGE_FOLDERS for path in files(ROOT / folder)}


def test_the_command_works_where_our_folders_names_are_taken(wheel: Path, tmp_path: Path) -> None:
    site, hostile = tmp_path / "site", tmp_path / "hostile"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True)
    (hostile / "graphs").mkdir(parents=True)
    for name in ("config.py", "machines.py", "graphs/__init__.py"):
        (hostile / name).write_text("raise RuntimeError('the wrong module')\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(site)}
    check = "import flare.machines.scheduler, flare.graphs.catalog, flare.config.loader as l; print(l.__file__)"
    for arguments in (["-c", check], ["-m", "flare", "--help"], [str(site / "bin" / "flare"), "--help"]):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=hostile, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Usage" in done.stdout or str(site) in done.stdout
