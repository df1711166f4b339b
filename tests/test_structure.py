"""The structure of the code: private names in one place, no circles, short functions, no name for two things."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "thunder_cg"
SOURCES = sorted(PACKAGE.rglob("*.py"))
CORE = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] != "tools"]
SCREEN = 60  # lines of a function

# Packages whose private and version-dependent names only compat may know, and their modules that are internal.
FOREIGN = ("torch", "thunder", "cuda")
INTERNAL = ("thunder.core", "thunder.executors", "thunder.extend", "thunder.plugins", "cuda.bindings")
# Operators have such names; two of them are what a tool measures.
OPERATORS = {"_aten", "aten"}
EXCEPTIONS = {
    "tools/operators/handwritten.py": {"_native_multi_head_attention"},  # an operator under test
    "tools/suite/models.py": {"_fcn_resnet"},  # torchvision has no public function for a small model
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree(path))]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_private_names() -> set[str]:
    """Names with an underscore that the package itself defines: functions, classes, attributes, parameters."""
    names: set[str] = set()
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return set(filter(is_private, names))


def foreign_private_names(nodes: Iterable[ast.AST], own: set[str]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            is_operator = isinstance(node.value, ast.Name) and node.value.id in OPERATORS
            names = [] if is_operator else [f"{ast.unparse(node.value)}.{node.attr}"]
            yield from (f"line {node.lineno}: {name}" for name in names)
            continue
        else:
            continue
        for name in names:
            parts = name.split(".")
            internal = any(name == each or name.startswith(f"{each}.") for each in INTERNAL)
            if parts[0] in FOREIGN and (internal or any(map(is_private, parts))):
                yield f"line {node.lineno}: {name}"


def test_only_compat_touches_private_names_of_other_packages() -> None:
    own = own_private_names()
    found = {}
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] != "compat":
            allowed = EXCEPTIONS.get(name_of(path), set())
            names = [n for n in foreign_private_names(nodes(path), own) if n.rsplit(".", 1)[-1] not in allowed]
            if names:
                found[name_of(path)] = names
    assert found == {}, "give each a function or a type in thunder_cg/compat"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._has_storage(x)", 2),
        ("from torch._dynamo import guards", 1),
        ("from thunder.core.trace import TraceCtx", 1),
        ("from torch.overrides import _get_current_function_mode_stack", 1),
        ("from cuda.bindings import driver", 1),
        ("def f(module): return module._overrides_parameters", 1),
        ("class A:\n    def f(self): return self._mine", 0),
        ("_aten._linalg_svd", 0),
    ],
)
def test_the_check_of_private_names_sees(source: str, found: int) -> None:
    assert len(list(foreign_private_names(ast.walk(ast.parse(source)), {"_mine"}))) == found


def imports_of(path: Path) -> set[str]:
    """The files of the package that a file imports where it runs; imports for annotations alone do not count."""
    annotations = {
        id(child)
        for node in nodes(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    known = files_by_module()
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and id(node) not in annotations:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {known[n] if n in known else known.get(str(node.module), "") for n in names}
        elif isinstance(node, ast.Import):
            found |= {known[alias.name] for alias in node.names if alias.name in known}
    return found - {"", name_of(path)}


@cache
def files_by_module() -> dict[str, str]:
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in SOURCES}
    return {".".join(each).removesuffix(".__init__"): name_of(path) for path, each in parts.items()}


def test_no_files_import_each_other_in_a_circle() -> None:
    edges = {name_of(path): imports_of(path) for path in SOURCES}
    assert sum(map(len, edges.values())) > 200, "the test sees no imports"

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*edges[start]]
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += edges[name]
        return seen

    assert [name for name in edges if name in reachable(name)] == []


def test_a_function_longer_than_a_screen_says_why() -> None:
    found = [
        f"{name_of(path)}:{node.name}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > SCREEN
        and "longer than a screen" not in (ast.get_docstring(node) or "")
        and not is_mostly_docstring(node)
    ]
    assert found == []


def is_mostly_docstring(node: ast.FunctionDef) -> bool:
    body = [each for each in node.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    return bool(body) and (node.end_lineno or 0) - body[0].lineno < SCREEN // 2


def test_no_class_name_means_two_things() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(path))
    # The protocol in the run time, and what implements it, are one thing.
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_each_note_is_there_once() -> None:
    lines = [
        (name_of(path), line.strip()) for path in SOURCES for line in path.read_text(encoding="utf-8").splitlines()
    ]
    notes = [line.removeprefix("# ") for _, line in lines if re.fullmatch(r"(# )?Note \[.+\]", line)]
    cited = {(note, file) for file, line in lines for note in re.findall(r"Note \[[^\]]+\]", line)}
    assert len(notes) == len(set(notes)) > 20
    assert [(note, file) for note, file in sorted(cited) if note not in notes] == []


@pytest.mark.nightly
def test_importing_the_package_builds_and_probes_nothing() -> None:
    source = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import torch, thunder\n"
        "from torch._C._dynamo import guards\n"
        "def fail(*args, **kwargs): raise AssertionError('a guard is built at import')\n"
        "guards.TensorGuards = guards.RootGuardManager = fail\n"
        "import thunder_cg\n"
        "from thunder_cg.compat.guards import attribute_writes_are_reported\n"
        "import thunder_cg.runtime.cuda.copy_nodes as copies\n"
        "assert attribute_writes_are_reported.cache_info().currsize == copies._kernels.cache_info().currsize == 0\n"
        "assert not torch.cuda.is_initialized()\n"
        "import sys; print(*sorted(name for name in sys.modules if name.startswith('thunder_cg.tools')))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""
