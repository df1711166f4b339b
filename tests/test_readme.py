"""The README: its code runs, its commands and links are there, and its parts are where tools and readers look."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from thunder_cg import cudagraph_transform, explain
from thunder_cg.__main__ import _COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# The page itself, the results beside their files, and what few readers need.
NAMES = ("README.md", "thunder_cg/tools/results/RESULTS.md", "thunder_cg/SEVERAL_GPUS.md", "thunder_cg/THUNDER.md")
NAMES += ("thunder_cg/STEPS.md", "tests/README.md")
PAGES = [ROOT / name for name in NAMES]

# Inductor takes half a minute to compile the fusions, which other tests capture.
INSTEAD = {"executors=executors(), ": ""}


def blocks(language: str) -> Iterator[tuple[int, str]]:
    """Each block of code in this language, with the line that it begins at."""
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        yield README.count("\n", 0, match.start(1)), match[1]


def is_installed(code: str) -> bool:
    """Whether all packages that the code imports are."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    return all(find_spec(alias.name) for node in nodes for alias in node.names)


@pytest.fixture(scope="module")
def variables() -> dict[str, Any]:
    """What the README's Python code defines, run block by block, as a reader does."""
    found: dict[str, Any] = {"__name__": "readme"}
    for line, code in blocks("python"):
        if is_installed(code):
            for text, other in INSTEAD.items():
                code = code.replace(text, other)
            exec(compile("\n" * line + code, "README.md", "exec"), found)
    return found


@pytest.mark.parametrize("name", ["jmodel", "jlayer", "jnet", "jclipped", "jllama"])
def test_each_recipe_replays(name: str, variables: dict[str, Any]) -> None:
    if name == "jllama" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    report = explain(variables[name])
    assert report.traces
    for trace in report.traces:
        assert [op.detail for op in trace.ops if op.verdict == "eager" and name != "jllama"] == []
        assert trace.eager_calls == 1 and all(region.replays >= 2 for region in trace.regions)


def test_every_replaced_text_is_there() -> None:
    assert all(text in README for text in INSTEAD)


def test_what_explain_says_of_the_demo_names_its_lines() -> None:
    lines = (ROOT / "thunder_cg/tools/demo.py").read_text(encoding="utf-8").splitlines()
    ((number, text),) = re.findall(r"demo\.py:(\d+): (.*)", README)
    assert lines[int(number) - 1].strip() == text


def test_first_screen_says_what_to_type() -> None:
    first = "\n".join(README.splitlines()[:40])
    for part in ("cudagraph_transform()", "explain(jmodel)", " -m thunder_cg demo", "pytest"):
        assert part in first


def test_sections() -> None:
    assert re.findall(r"^## (.*)$", README, re.MULTILINE) == [
        "What it does, and when it helps",
        "Recipes",
        "See what happened",
        "Options",
        "What is guaranteed",
        "Measured results",
        "Limits",
        "For contributors",
    ]


def test_the_first_screen_has_numbers_of_the_measured_table() -> None:
    first, measured = README.split("## What it does", 1)[0], README.split("<!-- measured -->", 1)[1]
    rows = [line for line in first.splitlines() if re.match(r"\| [\dt]", line)]
    numbers = [number for row in rows for number in re.findall(r"\| \**(\d[\d,]*)\**(?= \|)", row)]
    assert len(rows) == 2 and len(numbers) == 8
    for number in numbers:
        assert re.search(rf"[ *]{number}[ *]", measured), number


def test_marks_of_tables_are_there_once_and_in_order() -> None:
    pages = (page.read_text(encoding="utf-8") for page in PAGES)
    marks = [mark for page in pages for mark in re.findall(r"^<!-- .* -->$", page, re.MULTILINE)]
    assert marks == [f"<!-- {mark}{name} -->" for name in ("measured", "gpus") for mark in ("", "/")]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if not target.startswith("https://"):
            file = (page.parent / path).resolve() if path else page
            assert file.is_file() and (not anchor or anchor in anchors(file)), target


def test_commands_are_those_of_the_package() -> None:
    used = set(re.findall(r"-m thunder_cg (\w+)", README))
    assert used == set(_COMMANDS)
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for module in re.findall(r"-m\s+thunder_cg\.([\w.]+\w)", pages):
        path = ROOT / "thunder_cg" / Path(*module.split("."))
        assert (path / "__main__.py").is_file() or path.with_suffix(".py").is_file(), module


def test_options_are_those_of_the_transform() -> None:
    (signature,) = re.findall(r"^`cudagraph_transform\(\*, (.*)\)`$", README, re.MULTILINE)
    given = dict(option.split("=") for option in signature.split(", "))
    options = inspect.signature(cudagraph_transform).parameters
    assert {name: ast.literal_eval(value) for name, value in given.items()} == {
        name: option.default for name, option in options.items()
    }
    table = README.split("## Options", 1)[1].split("\n\n|", 1)[1].split("\n\n", 1)[0]
    described = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(described) == sorted(given)
