"""A region's ops as a Python function. Thunder writes each op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast

import thunder
import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op, process_groups
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compiled import drop_self_reference
from thunder_cg.compat.torch import ProfilerRange
from thunder_cg.runtime.backend import Backend

_MODULES = {"torch": torch, "thunder": thunder}  # that Thunder's functions can name


def region_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[str],
    results: Sequence[str],
    copied_early: Mapping[str, int],
    launches: Sequence[Sequence[int]],
    backend: Backend,
    ranges: Sequence[str] = (),
    donated: Sequence[Collection[str]] = (),
) -> Callable[..., Sequence[Any]]:
    """A region's Python function: its ops, each variable deleted after its last use.

    The function takes its inputs in a list, which it empties, so that their memory can be freed on the way, and a
    function to which it gives each result that may be copied early. What that returns is the result then.

    Args:
        copied_early: results that may be copied out early, and the position of the op after which they may.
        launches: the positions of all ops, those of collectives that are coalesced in one list.
        ranges: for each op the name of its range in a profile; empty for a function without ranges.
        donated: for each op the inputs that it may write over; empty for a function that leaves its inputs.
    """
    after: dict[int, list[str]] = {}
    for result, position in copied_early.items():
        after.setdefault(position, []).append(result)
    lines = _lines_of(ops, backend, donated)
    names = _names_in(lines, inputs)
    parameter, copier = unused("inputs", names), unused("copy_early", names)
    body = []
    for launch in launches:
        calls = [lines[i] for i in launch]
        call = calls[0] if len(launch) == 1 else _coalesced([ops[i] for i in launch], calls, names, backend)
        body.append(_in_range(call, ", ".join(ranges[i] for i in launch), names) if ranges else call)
        for result in [result for i in launch for result in after.get(i, ())]:
            body.append(_Lines([f"  {result} = {copier}({result})"], (result, copier)))
    function = _build(unused(name, names), body, inputs, results, (parameter, copier))
    function.__defaults__ = (lambda result: result,)
    return function


def hash_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[str],
    aliasing: Aliasing,
    backend: Backend,
    hash_values: Callable[..., torch.Tensor],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Like `region_function`, but it returns the hashes of what each op made, or wrote in place."""
    lines = _lines_of(ops, backend)
    names = _names_in(lines, inputs)
    parameter, hasher = unused("inputs", names), unused("hash_values", names)
    prefix = next(f"hash{'_' * n}" for n in count() if not any(each.startswith(f"hash{'_' * n}") for each in names))
    body, hashes = [], []
    for i, (op, line) in enumerate(zip(ops, lines)):
        values = [proxy.name for proxy in op.symbol.flat_proxy_outs if isinstance(proxy, compat.TensorProxy)]
        written = aliasing.writes[op.index]
        values += [name for name in op.inputs if aliasing.sets.get(name) in written]
        hashes.append(f"{prefix}{i}")
        call = f"  {hashes[-1]} = {hasher}({', '.join(values)})"
        body += [line, _Lines([call], (hashes[-1], *op.outputs, *values), {hasher: hash_values})]
    return _build(unused(f"{name}_hashes", names), body, inputs, hashes, (parameter,))


def unused(wish: str, taken: Collection[str]) -> str:
    """``wish``, or with a number after it where that name is taken."""
    return next(name for i in count() if (name := wish if i == 0 else f"{wish}_{i}") not in taken)


@dataclass(frozen=True, slots=True)
class _Lines:
    """Lines of a function, the variables in them, results first, and what else they name."""

    lines: Sequence[str]
    variables: tuple[str, ...]
    context: Mapping[str, Any] = field(default_factory=dict)


def _lines_of(ops: Sequence[Op], backend: Backend, donated: Sequence[Collection[str]] = ()) -> list[_Lines]:
    """The ops, calling their compiled fusions the way the backend needs. Some may write over what is ``donated``."""
    found = []
    with compat.tracectx(compat.TraceCtx()):  # one for all, as it names the objects that cannot be written
        for i, op in enumerate(ops):
            symbol = op.symbol
            if symbol.sym.is_fusion and (functions := compat.bound_functions(symbol)):
                if donated and (given := donated[i]):
                    places = tuple(j for j, arg in enumerate(symbol.args) if getattr(arg, "name", None) in given)
                    functions = {name: cast(Any, fn).donating(places) for name, fn in functions.items()}
                symbol = compat.rebind(symbol, {name: backend.fusion(fn) for name, fn in functions.items()})
            lines = symbol.python(indent=1)
            modules, called, objects = symbol.gather_ctxs()
            context = {compat.module_shortname(path): module for path, module in modules.items()} | called | objects
            found.append(_Lines(lines, (*op.outputs, *op.inputs), context))
    return found


def _coalesced(ops: Sequence[Op], calls: Sequence[_Lines], taken: set[str], backend: Backend) -> _Lines:
    """Collectives of one kind that become one. Adds its names to those that are taken."""
    (group,) = process_groups(ops)
    manager, real = unused("coalesce", taken), unused("real", taken)
    taken.update((manager, real))
    lines = [f"  with {manager}() as {real}:", *(f"  {line}" for call in calls for line in call.lines)]
    lines += [f"  {future} = {real}({future})" for op in ops for future in op.outputs]
    variables = (real, *(name for call in calls for name in call.variables))
    context: dict[str, Any] = {manager: partial(backend.coalesce, group)}
    for call in calls:
        context |= call.context
    return _Lines(lines, variables, context)


def _in_range(call: _Lines, name: str, taken: set[str]) -> _Lines:
    """A call in a range of a profile. Adds the name that it uses for that to those that are taken."""
    profiled = unused("in_range", taken)
    lines = [f"  with {profiled}({name!r}):", *(f"  {line}" for line in call.lines)]
    return _Lines(lines, call.variables, {**call.context, profiled: ProfilerRange})


def _names_in(lines: Iterable[_Lines], inputs: Iterable[str]) -> set[str]:
    return {*inputs, *_MODULES, *(name for each in lines for name in (*each.variables, *each.context))}


def _build(
    name: str, body: Sequence[_Lines], inputs: Sequence[str], results: Sequence[str], parameters: Sequence[str]
) -> Any:
    """The function ``name``; the first of its parameters is the list of inputs."""
    source = [f"def {name}({', '.join(parameters)}):"]
    source += [f"  [{', '.join(inputs)}] = {parameters[0]}", f"  {parameters[0]}.clear()"]
    context: dict[str, Any] = dict(_MODULES)
    for lines, spent in zip(body, _last_used(body, results)):
        source += lines.lines
        context |= lines.context
        if spent:
            source.append(f"  del {', '.join(spent)}")
    source.append(f"  return ({''.join(f'{result}, ' for result in results)})")
    function = compat.build_callable(name, python_str="\n".join(source), file_name=f"thunder.{name}", ctx=context)
    drop_self_reference(function)
    return function


def _last_used(body: Sequence[_Lines], results: Sequence[str]) -> list[list[str]]:
    """For each of the lines, the variables that nothing after them needs."""
    needed = set(results)
    names_of_line: list[list[str]] = []
    for lines in reversed(body):
        names_of_line.append([name for name in dict.fromkeys(lines.variables) if name not in needed])
        needed.update(lines.variables)
    return names_of_line[::-1]
