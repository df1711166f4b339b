"""A region's ops as a Python function: each is written by Thunder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import thunder
import torch
from thunder.core.baseutils import build_callable
from thunder.core.codeutils import module_shortname
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op
from thunder_cg.runtime.backend import Backend


def region_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[str],
    results: Sequence[str],
    leaving: Mapping[str, int],
    backend: Backend,
) -> Callable[..., Sequence[Any]]:
    """A region's Python function: its ops, each variable deleted after its last use.

    It takes its inputs in a list, which it empties, so that their memory can be freed on the way, and a function that
    it gives each result that may leave early; what that returns is the result then.

    Args:
        leaving: results that may leave early, and the position of the op after which they may.
    """
    after: dict[int, list[str]] = {}
    for result, position in leaving.items():
        after.setdefault(position, []).append(result)
    leave = _unused("leave", ops, inputs)
    body = []
    for i, step in enumerate(_steps(ops, backend)):
        body += [step, *(_Step([f"  {result} = {leave}({result})"], (result, leave)) for result in after.get(i, ()))]
    function = _function(name, body, inputs, results, leave)
    function.__defaults__ = (_stay,)
    return function


def _stay(result: Any) -> Any:
    return result


def watched_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[str],
    aliasing: Aliasing,
    device: torch.device,
    backend: Backend,
    hash_values: Callable[..., torch.Tensor],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Like `region_function`, but it returns the fingerprints of what each op made, or wrote in place."""
    prefix = _unused("print", ops, inputs)
    take = "cudagraph_fingerprints"
    context = {take: partial(hash_values, device)}
    body, taken = [], []
    for i, (op, step) in enumerate(zip(ops, _steps(ops, backend))):
        made = [proxy.name for proxy in op.symbol.flat_proxy_outs if isinstance(proxy, TensorProxy)]
        written = aliasing.writes[op.index]
        made += [name for name in op.inputs if aliasing.sets.get(name) in written]
        taken.append(f"{prefix}{i}")
        takes = _Step([f"  {taken[-1]} = {take}({', '.join(made)})"], (taken[-1], *op.outputs, *made), context)
        body += [step, takes]
    return _function(f"{name}_watched", body, inputs, taken)


def _unused(wish: str, ops: Sequence[Op], inputs: Sequence[str]) -> str:
    """``wish``, with as many underscores after it as it takes for no name to begin so."""
    names = {*inputs, *(name for op in ops for name in (*op.outputs, *op.inputs))}
    return next(f"{wish}{'_' * n}" for n in count() if not any(name.startswith(f"{wish}{'_' * n}") for name in names))


@dataclass(frozen=True, slots=True)
class _Step:
    """Lines of a function, the variables in them, results first, and what else they name."""

    lines: Sequence[str]
    variables: tuple[str, ...]
    context: Mapping[str, Any] = field(default_factory=dict)


def _steps(ops: Sequence[Op], backend: Backend) -> list[_Step]:
    """The ops, calling their compiled fusions the way the backend needs."""
    found = []
    with tracectx(TraceCtx()):  # one for all, as it names the objects that cannot be written
        for op in ops:
            symbol = op.symbol
            if symbol.sym.is_fusion and symbol._call_ctx:
                symbol = symbol.from_bsym()
                symbol._call_ctx = {name: backend.fusion(fn) for name, fn in symbol._call_ctx.items()}
            lines = symbol.python(indent=1)
            modules, functions, objects = symbol.gather_ctxs()
            context = {module_shortname(path): module for path, module in modules.items()} | functions | objects
            found.append(_Step(lines, (*op.outputs, *op.inputs), context))
    return found


def _function(name: str, body: Sequence[_Step], inputs: Sequence[str], results: Sequence[str], *others: str) -> Any:
    """Of the inputs in a list, and of ``others``."""
    lines = [f"def {name}({', '.join(['inputs', *others])}):"]
    lines += [f"  [{', '.join(inputs)}] = inputs", "  inputs.clear()"]
    context: dict[str, Any] = {"torch": torch, "thunder": thunder}  # as in what Thunder compiles
    for step, spent in zip(body, _last_used(body, results)):
        lines += step.lines
        context |= step.context
        if spent:
            lines.append(f"  del {', '.join(spent)}")
    lines.append(f"  return ({''.join(f'{result}, ' for result in results)})")
    return build_callable(name, python_str="\n".join(lines), file_name=f"thunder.{name}", ctx=context)


def _last_used(body: Sequence[_Step], results: Sequence[str]) -> list[list[str]]:
    """For each step, the variables that nothing after it needs."""
    needed = set(results)
    found: list[list[str]] = []
    for step in reversed(body):
        found.append([name for name in dict.fromkeys(step.variables) if name not in needed])
        needed.update(step.variables)
    return found[::-1]
