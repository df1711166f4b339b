"""ARCHITECTURE.md names only what is there, names every part of the package, and each package says what it does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thunder_cg"
PAGE = PACKAGE / "ARCHITECTURE.md"
MOST_LINES = 250
MOST_TERMS = 20

QUOTED = re.compile(r"`([^`\n]+)`")
REFERENCE = re.compile(r"([\w/.-]+\.py)(?::([\w.]+))?")
CLASS_NAME = re.compile(r"[A-Z]\w*[a-z]\w*")
EMITTED = {"CUDAGraphN"}  # a name in traces, with a number for N

PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
TOP_LEVEL = sorted(path.name for path in PACKAGE.glob("*.py"))


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def stale(page: str) -> Iterator[str]:
    """What the page names and the code does not have, with the page's line."""
    is_picture = False
    for number, line in enumerate(page.splitlines(), 1):
        is_picture ^= line.startswith("```")
        in_picture = [word for word in re.split(r"[\s,]+", line) if "/" in word]
        for quoted in in_picture if is_picture else QUOTED.findall(line):
            if match := REFERENCE.fullmatch(quoted):
                file, name = match.groups()
                path = (ROOT if file.startswith("tests/") else PACKAGE) / file
                if not path.is_file():
                    yield f"line {number}: {quoted}: there is no file {path.relative_to(ROOT)}"
                elif name and name not in definitions(path):
                    yield f"line {number}: {quoted}: {file} does not define {name}"
            elif CLASS_NAME.fullmatch(quoted) and quoted not in classes() | EMITTED:
                yield f"line {number}: {quoted}: no class of the package has this name"
            elif "/" in quoted and quoted.endswith("/") and not (PACKAGE / quoted).is_dir():
                yield f"line {number}: {quoted}: there is no such directory"


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions, classes, methods and constants of a file, as ``function``, ``Class.method``, ``function.inner``."""
    return frozenset(_defined(ast.parse(path.read_text(encoding="utf-8")), ""))


def _defined(scope: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{node.name}"
            yield from _defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign) and not isinstance(scope, ast.FunctionDef):
            yield from (f"{prefix}{target.id}" for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield f"{prefix}{node.target.id}"


@cache
def classes() -> frozenset[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    return frozenset(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def section(page: str, title: str) -> list[str]:
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0].splitlines()


def test_every_reference_is_there(page: str) -> None:
    assert [*stale(page)] == []


def test_a_stale_reference_is_found_with_its_line() -> None:
    page = "\n".join(
        [
            "`runtime/program.py:Program.begin`, `options.py:BACKENDS`, `tests/conftest.py`, `Recording`, `compat/`",
            "`runtime/program.py:Program.started`",
            "`runtime/manager.py:Program` and `Manager`",
            "`fastpath/inference.py:inference_fast_path.state_holds`, `fastpath/inference.py:state_holds`, `helpers/`",
            "```",
            "trace ──► analysis/ops.py, analysis/operators.py",
            "```",
        ]
    )
    assert [*stale(page)] == [
        "line 2: runtime/program.py:Program.started: runtime/program.py does not define Program.started",
        "line 3: runtime/manager.py:Program: there is no file thunder_cg/runtime/manager.py",
        "line 3: Manager: no class of the package has this name",
        "line 4: fastpath/inference.py:state_holds: fastpath/inference.py does not define state_holds",
        "line 4: helpers/: there is no such directory",
        "line 6: analysis/operators.py: there is no file thunder_cg/analysis/operators.py",
    ]


def test_it_can_be_read_in_ten_minutes(page: str) -> None:
    assert len(page.splitlines()) <= MOST_LINES
    terms = [line for line in section(page, "Words") if line.startswith("| ")][1:]
    assert 0 < len(terms) <= MOST_TERMS


def test_it_has_the_invariants_the_walks_and_where_to_change_what(page: str) -> None:
    invariants = [line for line in section(page, "Invariants") if re.match(r"\d\. \*\*", line)]
    assert [line[0] for line in invariants] == [*"12345678"]
    for walk in ("1: the first call", "2: the second call", "3: a steady inference call", "4: a training step"):
        steps = [line for line in section(page, f"Walk {walk}") if re.match(r"\d+\. ", line)]
        assert len(steps) >= 5, walk
    changes = "\n".join(section(page, "Where to change what"))
    for change in (
        "rule",
        "backend",
        "form of report",
        "new Thunder or PyTorch",
        "hazard test",
        "check on the fast path",
    ):
        assert re.search(rf"^\*\*[^*]*{change}", changes, re.MULTILINE), change


def test_every_part_of_the_package_is_mentioned(page: str) -> None:
    paths = [*(f"{path.relative_to(PACKAGE).as_posix()}/" for path in PACKAGES if path != PACKAGE), *TOP_LEVEL]
    assert [path for path in paths if f"`{path}" not in page] == []


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_package_says_what_comes_in_what_goes_out_and_who_owns_what(path: Path) -> None:
    said = ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8")))
    assert said is not None and said.count("\n\n") >= 1, "one sentence, and a paragraph after it"
    for what in (r"comes? in\b", r"go(es)? out\b", r"\b(owns?|owned|owner|keeps?|kept)\b"):
        assert re.search(what, _with_usual_order(said)), what


def _with_usual_order(text: str) -> str:
    """With "comes in" for "in comes", and so on."""
    return re.sub(r"\b(in|out)\s+(comes?|go(?:es)?)\b", r"\2 \1", " ".join(text.split()).lower())
