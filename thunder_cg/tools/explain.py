"""`python -m thunder_cg explain FILE`: runs a script or a model, and prints the reports of what was compiled."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from thunder_cg.files import MARK, refuse_foreign, replace
from thunder_cg.tools.arguments import Parser, is_interruption, positive, print_interruption

if TYPE_CHECKING:
    from thunder_cg import Report
    from thunder_cg.report import StepReport, TraceReport

_DESCRIPTION = """\
Says what was captured, what was not, and why.

FILE: runs a Python script as `python FILE ARGS` does, and then prints explain(...) of each compiled function or module
among its global variables, in lists and dictionaries there, and of each compiled part of a module there.

FILE:NAME: calls the function NAME of the file, without arguments. It returns a model or a function, and its inputs:

    def make_model():
        return Net().cuda(), (torch.randn(8, 64, device="cuda"),)

The inputs are a tuple of positional arguments, a dict of keyword arguments, or a single argument. The model is compiled
with thunder.jit(model, transforms=[cudagraph_transform()]), unless it is compiled already. It is called --calls times;
if a result requires grad, each call is followed by a backward of the sum of the results.

If FILE raises, ends with an error or is interrupted, the reports say what happened until then.

Exits with 0 if all operators are captured, 1 if some are eager or left to Python, a region or a step has no graph, or
no call replays one, nothing is compiled, something is not as in PyTorch, or FILE raises, with the reasons on the
standard error, 2 for wrong arguments, 130 if interrupted, and as FILE does if that calls sys.exit with an error."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 if all that was compiled is captured, else 1."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    file, name = _split(arguments.file)
    if name:  # what follows it is for this command, too
        arguments = _parser(of_script=False).parse_args(argv)
    _check(arguments, file, parser)
    variables, raised = _run_file(file, () if name else arguments.arguments, file.stem if name else "__main__")
    if raised and is_interruption(raised[0]) and "explain" not in vars(sys.modules["thunder_cg"]):
        return 130  # it has compiled nothing, and an import that was interrupted may not be made again
    if name and not raised:
        make = _maker(variables, name, parser)
        with _printing_errors() as raised:
            made = make()
        if raised:  # by the user's function, and nothing is compiled
            return _status(raised[0])
        call = _compiled(made, name, parser)
        variables, raised = {name: call.func}, _make_calls(call, arguments.calls)
    reports = _reports(variables)
    if not reports and (not raised or isinstance(raised[0], SystemExit)):
        problem = "no global variable has a function or module that was compiled with cudagraph_transform()"
        fix = "assign it to one, as in: jmodel = thunder.jit(model, transforms=[cudagraph_transform()])"
        inside = "where it is a variable of a function, such as main(), have that print thunder_cg.explain(jmodel)"
        print(f"{file}: {problem}; {fix}; {inside}", file=sys.stderr)
        return _status(raised[0]) if raised else 1
    for label, report in reports.items():
        print(f"{label}:")
        report.show()
        print()
    _write(reports, file.name, arguments.html, arguments.json)
    if raised:
        return _status(raised[0])
    why = _not_captured(reports)
    for said in why:
        print(said, file=sys.stderr)
    return int(bool(why))


def _status(raised: BaseException) -> int:
    """The exit status of a file that has raised this, as Python would end."""
    if isinstance(raised, SystemExit):
        raise raised
    return 130 if is_interruption(raised) else 1


def _parser(of_script: bool = True) -> Parser:
    parser = Parser(
        "python -m thunder_cg explain", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--html", type=Path, metavar="HTML", help="write the reports there as HTML, too")
    parser.add_argument("--json", type=Path, metavar="JSON", help="write them there as JSON, by name")
    parser.add_argument("--calls", type=positive, default=3, metavar="N", help="calls of FILE:NAME (default: 3)")
    parser.add_argument("file", metavar="FILE[:NAME]", help="a script, or a function that makes a model")
    if of_script:
        words = parser.add_argument(
            "arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script: all that follows FILE"
        )
        words.required = False
    return parser


def _check(arguments: argparse.Namespace, file: Path, parser: Parser) -> None:
    """Ends the process if the arguments cannot be meant, before the file runs."""
    if not file.is_file():
        parser.error(f"{file}: there is no such file")
    try:
        for path in (arguments.html, arguments.json):
            refuse_foreign(path)
    except ValueError as error:
        parser.error(str(error))
    html_file, json_file = arguments.html, arguments.json
    if html_file and json_file and html_file.resolve() == json_file.resolve():
        parser.error(f"--html and --json are both {html_file}; give each a file of its own")


def _split(text: str) -> tuple[Path, str]:
    """File and name in "FILE:NAME"; the name is "" if there is none."""
    file, colon, name = text.rpartition(":")
    return (Path(file), name) if colon and name.isidentifier() and not Path(text).exists() else (Path(text), "")


@contextmanager
def _printing_errors(is_reported: Callable[[], bool] = bool) -> Iterator[list[BaseException]]:
    """Ends the block where it raises, and prints that as Python does, without the lines of this file.

    Args:
        is_reported: whether a report says where it was raised, so that the stack, which is Thunder's, is left out.
    """
    raised: list[BaseException] = []
    try:
        yield raised
    except (KeyboardInterrupt, SystemExit, Exception) as error:
        raised.append(error)
        if isinstance(error, SystemExit):  # which `main` raises again
            return
        if is_interruption(error):
            print_interruption(error)
            return
        if is_reported():
            said = "".join(traceback.format_exception_only(type(error), error))
            print(said.partition("\n")[0], file=sys.stderr)  # the report has the rest, with what to try
            return
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)


def _run_file(file: Path, arguments: Sequence[str], name: str) -> tuple[dict[str, Any], list[BaseException]]:
    """The global variables of a file after it ran as a module of that name, and what it raised."""
    module = ModuleType(name)
    module.__file__ = str(file)
    before = sys.argv, sys.path, sys.modules["__main__"]
    sys.argv, sys.path = [str(file), *arguments], [str(file.resolve().parent), *sys.path]
    if name == "__main__":
        sys.modules["__main__"] = module
    with _printing_errors() as raised:
        try:
            # `runpy.run_path` would lose the variables of a script that calls `sys.exit(0)`.
            exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finally:
            sys.argv, sys.path, sys.modules["__main__"] = before
    return vars(module), raised


def _make_calls(call: partial[Any], times: int) -> list[BaseException]:
    """Makes the calls, each with its backward. Returns what they raised."""
    from thunder_cg import explain

    with _printing_errors(lambda: bool(explain(call.func).compile_failures)) as raised:
        for _ in range(times):
            _train(call())
    return raised


def _maker(variables: Mapping[str, Any], name: str, parser: Parser) -> Callable[[], Any]:
    """The function `name`. Ends the process if there is none that can be called without arguments."""
    if not callable(make := variables.get(name)):
        parser.error(f"the file has no function {name!r}; it has {', '.join(_functions(variables)) or 'none'}")
    if needed := _needed(make):
        problem = f"{name} is called without arguments, and needs {', '.join(needed)}"
        parser.error(f"{problem}; give a function that returns a model and its inputs: def make(): return {name}, (x,)")
    return make


def _compiled(made: Any, name: str, parser: Parser) -> partial[Any]:
    """The compiled model that the function `name` has made, with its inputs."""
    import thunder

    from thunder_cg import NotCompiledError, cudagraph_transform, explain

    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        problem = f"{name}() returned a value of type {type(made).__name__}"
        parser.error(f"{problem}; return a model and its inputs: (model, (x,))")
    model, inputs = made
    try:
        explain(model)
    except NotCompiledError:
        model = thunder.jit(model, transforms=[cudagraph_transform()])
    keywords = inputs if isinstance(inputs, dict) else {}
    positional = inputs if isinstance(inputs, tuple) else () if keywords else (inputs,)
    return partial(model, *positional, **keywords)


def _train(result: Any) -> None:
    """The backward of a call, if its result requires grad."""
    import torch

    from thunder_cg.compat.tensors import tensors_in

    if trained := [tensor for tensor in tensors_in(result) if tensor.requires_grad]:
        torch.autograd.backward([leaf.sum() for leaf in trained])


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters without which it cannot be called, as far as it says so."""
    if hasattr(function, "named_modules") and not isinstance(function, type):
        return ["its inputs"]
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [n for n, each in parameters.items() if each.default is Parameter.empty and each.kind not in kinds]


def _functions(variables: Mapping[str, Any]) -> list[str]:
    """Names of the functions that a file defines itself."""
    own = variables["__name__"]
    return [name for name, value in variables.items() if callable(value) and getattr(value, "__module__", "") == own]


def _reports(variables: Mapping[str, Any]) -> dict[str, Report | StepReport]:
    """The report of each step, and of each variable that was compiled with the transform; under its first name."""
    from thunder_cg import NotCompiledError, Report, explain

    reports: dict[int, tuple[str, Report | StepReport]] = {}
    for name, value in _callables(variables):
        if id(value) not in reports:
            try:
                reports[id(value)] = name, explain(value)
            except NotCompiledError:
                continue
    return dict(sorted(reports.values(), key=lambda named: isinstance(named[1], Report)))  # steps first


def _callables(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What variables, and lists and dictionaries there, have that may be compiled, and compiled parts of modules."""
    from thunder_cg.report.programs import compiled_parts

    for name, value in variables.items():
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for label, each in ((name, value), *((f"{name}[{key!r}]", each) for key, each in items)):
            if not name.startswith("__") and callable(each):
                yield label, each
                yield from ((f"{label}.{part}", module) for part, module in compiled_parts(each).items())


def _not_captured(reports: Mapping[str, Report | StepReport]) -> list[str]:
    """Why the command exits with 1: operators that are eager, regions and steps without a graph, and what is lost.

    The graph of a step holds all that ran inside of the step, so nothing else has to be captured then.
    """
    from thunder_cg import Report

    of_steps = {label: report for label, report in reports.items() if not isinstance(report, Report)}
    why = [f"not captured: {label}: no call was captured" for label, report in of_steps.items() if not report.captures]
    steps_are_captured = bool(of_steps) and not why
    for label, report in reports.items():
        if isinstance(report, Report):
            why += (f"not captured: {label}: {said}" for said in _not_in_graphs(report, steps_are_captured))
            why += (f"other than in PyTorch: {label}: {said}" for said in report.differs)
    return why


def _not_in_graphs(report: Report, steps_are_captured: bool) -> Iterator[str]:
    from thunder_cg.report.units import count

    in_steps = {(t.function, t.entry) for t in report.traces if t.is_in_steps and steps_are_captured}
    traces = [trace for trace in report.traces if (trace.function, trace.entry) not in in_steps]
    if not (in_steps or any(trace.regions for trace in traces)):
        yield "no region was compiled, so there is no graph"
    if eager := sum(trace.counts["eager"] for trace in traces):
        yield f"{count(eager, 'op')} eager"
    if report.outside:
        yield f"{count(sum(each.count for each in report.outside), 'op')} left to Inductor"
    if not in_steps:
        yield from (f"{each.part} is left to plain Python" for each in report.breaks if each.part)
        if report.python_calls:
            yield f"{count(report.python_calls, 'call')} ran in plain Python"
        yield from (f"{count(each.calls, 'call')} of {each.function} ran in PyTorch" for each in report.new_sizes)
    alike: dict[tuple[str, str, int, int], list[tuple[TraceReport, str]]] = {}  # versions of one function
    for trace in traces:
        if trace.fallbacks and trace.captures and not trace.replays:
            why = max(trace.fallbacks, key=lambda reason: trace.fallbacks[reason])
            why = "; ".join(filter(None, (why, trace.fixes.get(why))))
            yield f"the {trace.kind} of {trace.function}, which ran {count(trace.calls, 'time')}, never replayed: {why}"
        if without := [region for region in trace.regions if not region.captures or region.failure is not None]:
            same = trace.kind, trace.function, trace.calls, len(without)
            alike.setdefault(same, []).append((trace, without[0].name))
    for (kind, function, calls, regions), ((first, name), *others) in alike.items():
        which = f"{len(others) + 1:,} compiled versions" if others else f"compiled version {first.entry}"
        ran = f"which ran {count(calls, 'time')}{' each' * bool(others)}" if calls else "which never ran"
        graph = f"{count(regions, 'region')}{' each' * bool(others)} without a graph ({name})"
        yield f"the {kind} of {function}, {which}, {ran}: {graph}"


def _write(
    reports: Mapping[str, Report | StepReport], title: str, html_file: Path | None, json_file: Path | None
) -> None:
    if html_file is not None:
        from thunder_cg.report import html

        body = "".join(f"<h2>{escape(name)}</h2>{report._repr_html_()}" for name, report in reports.items())
        replace(html_file, html.page(body, title, f"{MARK} explain"))
    if json_file is not None:
        content = {label: report.to_dict() for label, report in reports.items()}
        replace(json_file, json.dumps({"generator": f"{MARK} explain", "reports": content}, indent=1) + "\n")
