"""The checkout is the package: what pyproject.toml lists is what lies in the tree, and installs where it says."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
FOLDERS = ("storage", "coordinator", "workers", "client")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(project: dict[str, Any], *extras: str) -> list[Requirement]:
    optional = project["project"]["optional-dependencies"]
    lines = [*project["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    lines = (line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def test_the_list_of_packages_is_the_tree(project: dict[str, Any]) -> None:
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    in_tree = {"lastgood", *(".".join(("lastgood", *folder.relative_to(ROOT).parts)) for folder in folders)}
    assert set(project["tool"]["setuptools"]["packages"]) == in_tree
    without_init = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not without_init


def test_no_other_python_file_lies_at_the_root() -> None:
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"], "it would be installed as part of lastgood"


def test_the_package_says_that_it_is_typed(project: dict[str, Any]) -> None:
    assert project["tool"]["setuptools"]["package-data"]["lastgood"] == ["py.typed"]
    assert (ROOT / "py.typed").exists()


def test_the_console_script_leads_to_a_function(project: dict[str, Any]) -> None:
    module, _, function = project["project"]["scripts"]["lastgood"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_version_is_the_projects(project: dict[str, Any]) -> None:
    import lastgood

    assert lastgood.__version__ == project["project"]["version"]


def test_the_tests_run_on_this_checkout() -> None:
    import lastgood

    assert lastgood.__file__ is not None
    assert Path(lastgood.__file__).resolve() == ROOT / "__init__.py"


def test_what_is_installed_by_the_readmes_commands_is_pinned_within_the_bounds(project: dict[str, Any]) -> None:
    pinned = pins()
    for requirement in requirements(project, "demo", "dev"):
        name = canonical(requirement.name)
        assert name in pinned, f"{name} is not in constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{requirement} does not admit the pin {pinned[name]}"


def test_the_oldest_python_that_is_promised_can_install_the_dependencies(project: dict[str, Any]) -> None:
    oldest = project["project"]["requires-python"].removeprefix(">=")
    for requirement in requirements(project, "demo", "dev"):
        needs = importlib.metadata.metadata(requirement.name)["Requires-Python"] or ""
        assert SpecifierSet(needs).contains(oldest), f"{requirement} needs Python {needs}"


def test_ci_runs_what_a_newcomer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


def test_git_ignores_what_setting_up_and_testing_leaves_behind() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"/.venv", "/build", "*.egg-info/", "__pycache__/"} <= set(ignored)
