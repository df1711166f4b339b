"""`python -m thunder_cg explain FILE`: runs a script, and prints the reports of what it compiled."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from thunder_cg import NotCompiledError, explain
from thunder_cg.report.html import render


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 1 if the script compiled nothing with the transform."""
    description = (
        "Runs a Python script as `python FILE ARGS` does, and then prints explain(...) of each compiled function or "
        "module among its global variables. Exits with 1 if there is none."
    )
    parser = argparse.ArgumentParser("python -m thunder_cg explain", description=description)
    parser.add_argument("--html", type=Path, metavar="HTML", help="write the reports there as HTML, too")
    parser.add_argument("file", type=Path, metavar="FILE", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    arguments = parser.parse_args(argv)
    if not arguments.file.is_file():
        parser.error(f"{arguments.file}: there is no such file")
    reports = _reports(_run_script(arguments.file, arguments.arguments))
    if not reports:
        problem = "no global variable has a function or module that was compiled with cudagraph_transform()"
        fix = "assign it to one, as in: jmodel = thunder.jit(model, transforms=[cudagraph_transform()])"
        print(f"{arguments.file}: {problem}; {fix}", file=sys.stderr)
        return 1
    for name, report in reports.items():
        print(f"{name}:\n{report}\n")
    if arguments.html is not None:
        head = f'<head><meta charset="utf-8"><title>{escape(arguments.file.name)}</title></head>'
        body = "".join(f"<h2>{escape(name)}</h2>{render(report)}" for name, report in reports.items())
        page = f"<!DOCTYPE html><html>{head}<body>{body}</body></html>\n"
        arguments.html.write_text(page, encoding="utf-8")
    return 0


def _run_script(file: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a script as `__main__`, and returns its global variables. `SystemExit` if it ends with an error status.

    `runpy.run_path` would lose the variables of a script that calls `sys.exit(0)`.
    """
    module = ModuleType("__main__")
    module.__file__ = str(file)
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path = [str(file), *arguments], [str(file.resolve().parent), *sys.path]
    sys.modules["__main__"] = module
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path, sys.modules["__main__"] = before
    return vars(module)


def _reports(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The report of each variable that was compiled with the transform; under its first name, if it has several."""
    reports: dict[int, tuple[str, Any]] = {}
    for name, value in variables.items():
        if not name.startswith("__") and callable(value) and id(value) not in reports:
            try:
                reports[id(value)] = name, explain(value)
            except NotCompiledError:
                continue
    return dict(reports.values())
