"""The project around the package: versions, layout, the direction of imports, README and CI."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from thunder_cg.compat.versions import SUPPORTED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings where the standard library has none

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thunder_cg"

# Each part of the package may import itself and what stands before it.
LAYERS = (
    ("errors", "options", "files", "progress", "compat"),
    ("analysis",),
    ("runtime", "verify", "kernels", "communication"),
    ("step",),
    ("report", "fastpath", "executor"),
    ("emit", "compile_log", "transform", "memory"),
    ("diagnose",),
    ("dynamo",),
    ("__init__",),
    ("tools",),
    ("__main__",),
)
# The tools that only developers run. A wheel does not have them.
DEVELOPER_TOOLS = ("generation", "operators", "results", "suite")
# The modules that may know Thunder's internals, so that a new release of it is a change in few places.
KNOW_THUNDER = {
    "analysis/ops.py",
    "runtime/functions.py",
    "fastpath/accumulate.py",
    "fastpath/dispatch.py",
    "fastpath/inference.py",
    "fastpath/training.py",
    "executor.py",
    "transform.py",
}
PUBLIC = {
    "thunder.distributed",
    "thunder.dynamo.thunderfx",
    "thunder.transforms.cudagraph.CUDAGraphTransform",
}  # what users of Thunder import, too
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("package", "inside", "outside"),
    [
        ("torch", ("2.9.0", "2.10.0", "2.11.0+cu130"), ("2.8.0", "2.12.0", "2.12.1", "2.13.0")),
        ("lightning-thunder", ("0.2.6", "0.2.7"), ("0.2.5", "0.3.0")),
        ("looseversion", ("1.3.0",), ()),
    ],
)
def test_dependencies_are_bounded(
    project: dict[str, Any], package: str, inside: tuple[str, ...], outside: tuple[str, ...]
) -> None:
    (bounds,) = (r.specifier for r in map(Requirement, project["project"]["dependencies"]) if r.name == package)
    assert [version for version in inside if version not in bounds] == []
    assert [version for version in outside if version in bounds] == []


def test_bounds_checked_at_import_are_those_of_the_package(project: dict[str, Any]) -> None:
    declared = {r.name: r.specifier for r in map(Requirement, project["project"]["dependencies"])}
    assert {name: declared[name] for name in SUPPORTED} == {
        name: SpecifierSet(f">={least},<{below}") for name, (least, below) in SUPPORTED.items()
    }
    assert set(SUPPORTED) == {"torch", "lightning-thunder"}


def test_python_versions(project: dict[str, Any]) -> None:
    supported = SpecifierSet(project["project"]["requires-python"])
    assert [minor for minor in range(8, 16) if f"3.{minor}.0" in supported] == [10, 11, 12, 13]
    named = {c.rsplit(" ", 1)[1] for c in project["project"]["classifiers"] if "Python :: 3." in c}
    assert named == {"3.10", "3.11", "3.12", "3.13"}


def test_nvfuser_extra_is_a_pair_that_fails_rather_than_installs_half(project: dict[str, Any]) -> None:
    torch, nvfuser = map(Requirement, project["project"]["optional-dependencies"]["nvfuser"])
    (supported,) = (r.specifier for r in map(Requirement, project["project"]["dependencies"]) if r.name == "torch")
    (pinned,) = nvfuser.specifier
    assert torch.name == "torch" and "2.10.0" in torch.specifier and "2.10.0" in supported
    assert nvfuser.name.endswith("-torch210") and pinned.operator == "=="
    assert torch.marker is None and nvfuser.marker is None, (
        "a marker would make the extra install no nvFuser in silence"
    )


# ------------------------------------------------------------------------------------------------------ layout, imports


def test_top_level_holds_only_what_it_should() -> None:
    built = {"build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.suffix != ".egg-info"}
    assert found - built == {"pyproject.toml", "thunder_cg", "tests", "notebooks", "README.md"}


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").read_bytes() == b""


def test_imports_go_one_way() -> None:
    """No file imports a part that stands after its own in `LAYERS`, where each part has a place."""
    assert {part_of(path) for path in SOURCES} == RANK.keys()
    assert [
        f"{path}:{line}: {name}" for path in SOURCES for line, name in imports(path) if RANK[name] > RANK[part_of(path)]
    ] == []


def test_direction_check_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    source = "def f():\n    from thunder_cg.transform import a\n    import thunder_cg.runtime.tape\n    import torch\n"
    (tmp_path / "x.py").write_text(source)
    assert list(imports(tmp_path / "x.py")) == [(2, "transform"), (3, "runtime")]


def test_few_modules_know_the_internals_of_thunder() -> None:
    knowing = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        if part_of(path) != "compat"
        and any(module.startswith("thunder.") and module not in PUBLIC for _, module in imported(path))
    }
    assert knowing <= KNOW_THUNDER


def test_the_core_imports_no_tool() -> None:
    """By `LAYERS`. `__main__` may, in the function of a command, so that the other commands do not need the tool."""
    body = ast.parse((PACKAGE / "__main__.py").read_text(encoding="utf-8")).body
    top = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [node.lineno for node in top if "thunder_cg" in ast.unparse(node)]


def test_wheel_has_what_users_run_and_no_more(project: dict[str, Any]) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["thunder_cg"], "exclude": [f"thunder_cg/tools/{name}" for name in DEVELOPER_TOOLS]}
    assert all((PACKAGE / "tools" / name).is_dir() for name in DEVELOPER_TOOLS)
    assert "thunder_cg" in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def test_what_is_in_the_wheel_needs_nothing_that_is_not() -> None:
    absent = tuple(f"thunder_cg.tools.{name}." for name in DEVELOPER_TOOLS if name != "results")
    wheel = [
        p for p in SOURCES if p.relative_to(PACKAGE).parts[:2] not in {("tools", name) for name in DEVELOPER_TOOLS}
    ]
    assert [f"{path}:{line}: {n}" for path in wheel for line, n in imported(path) if f"{n}.".startswith(absent)] == []


def part_of(path: Path) -> str:
    """The layer's name: "analysis" for thunder_cg/analysis/ops.py, "transform" for thunder_cg/transform.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and layer of all that a file imports from this package, anywhere in it."""
    for line, module in imported(path):
        package, *rest = module.split(".")
        if package == "thunder_cg":
            yield line, rest[0] if rest and rest[0] in RANK else "__init__"


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """Line and full name of all that a file imports: "thunder_cg.errors.CaptureError", "torch"."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; name the module in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


# ---------------------------------------------------------------------------------------------------- README, CI, tools


def test_readme_has_one_line_for_the_demo_and_one_for_the_tests(readme: str) -> None:
    assert [line.rsplit(" && ", 1)[1] for line in commands(readme)] == [
        ".venv/bin/python -m thunder_cg demo",
        ".venv/bin/pytest -q -n 2 tests",
    ]


def test_ci_runs_the_command_of_the_readme(readme: str, tmp_path: Path) -> None:
    """Runs a copy of .ci/run in a small repository, with a `python3` that prints what it was asked to do and fails."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, env=environment, stderr=subprocess.DEVNULL)
    (tmp_path / "README.md").write_text(readme, encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "python3"
    fake.write_text('#!/bin/sh\necho "python3 $*"; exit 7\n')
    fake.chmod(0o755)
    environment["PATH"] = os.pathsep.join((str(fake.parent), os.environ["PATH"]))

    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False, env=environment)

    assert done.stdout.splitlines() == [f"+ {commands(readme)[1]}", "python3 -m venv .venv"], done.stderr
    assert re.fullmatch(r"installation: \d+ s, tests: \d+ s\n", done.stderr)
    assert done.returncode == 7


def test_ci_script_can_be_executed() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_tools_are_set_up(project: dict[str, Any]) -> None:
    tools = project["tool"]
    assert tools["ruff"]["line-length"] == 120 and tools["ruff"]["target-version"] == "py310"
    assert tools["mypy"]["strict"] is True and tools["mypy"]["python_version"] == "3.10"
    assert tools["pytest"]["ini_options"]["filterwarnings"][0] == "error"
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for hook in ("ruff check", "ruff format", "mypy"):
        assert f"entry: {hook}" in hooks


def commands(readme: str) -> list[str]:
    return [line for line in readme.splitlines() if line.startswith("python3 -m venv ")]
