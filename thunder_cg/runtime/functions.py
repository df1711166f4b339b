"""A region's ops as a Python function: each is written by Thunder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import thunder
import torch
from thunder.core.baseutils import build_callable
from thunder.core.codeutils import module_shortname
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx

from thunder_cg.analysis.ops import Op
from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.verify import fingerprints


def region_function(
    name: str,
    ops: Sequence[Op],
    inputs: Sequence[Proxy],
    results: Sequence[Proxy],
    leaving: Mapping[str, int],
    backend: Backend,
) -> Callable[..., Sequence[Any]]:
    """A region's Python function: its ops, each variable deleted after its last use.

    It takes its inputs in a list, which it empties, so that their memory can be freed on the way, and a function that
    it gives each result that may leave early; what that returns is the result then.

    Args:
        leaving: names of results that may leave early, and the position of the op after which they may.
    """
    proxies = {proxy.name: proxy for proxy in results}
    after: dict[int, list[Proxy]] = {}
    for each, position in leaving.items():
        after.setdefault(position, []).append(proxies[each])
    body: list[_Step] = []
    with tracectx(TraceCtx()):  # where names are free
        leave = AnyProxy(None, name=_unused("leave", _names(ops, inputs)))
        for i, op in enumerate(ops):
            body.append(_step(op, backend))
            for proxy in after.get(i, ()):
                leaves = BoundSymbol(_LEAVE, (leave, proxy), {}, proxy, _call_ctx={})
                body.append((leaves, (proxy.name, leave.name)))
    function = _function(name, body, inputs, results, leave)
    function.__defaults__ = (_stay,)
    return function


def _stay(result: Any) -> Any:
    return result


def _write_leave(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    leave, result = bsym.args
    return f"{result.name} = {leave.name}({result.name})"


_LEAVE = Symbol("cudagraph_leave", meta=None, is_fusion=True, python_printer=_write_leave)


_Step = tuple[BoundSymbol, tuple[str, ...]]  # what is called, and the variables that it names, results first


def _step(op: Op, backend: Backend) -> _Step:
    """The op's symbol, calling its compiled fusion the way the backend needs."""
    symbol = op.symbol
    if symbol.sym.is_fusion and symbol._call_ctx:
        symbol = symbol.from_bsym()
        symbol._call_ctx = {name: backend.fusion(fn) for name, fn in symbol._call_ctx.items()}
    return symbol, (*op.outputs, *op.inputs)


def _names(ops: Sequence[Op], inputs: Sequence[Proxy]) -> set[str]:
    return {name for op in ops for name in (*op.outputs, *op.inputs)} | {p.name for p in inputs}


def _unused(wish: str, names: Collection[str]) -> str:
    """``wish``, with as many underscores after it as it takes for no name to begin so."""
    return next(f"{wish}{'_' * n}" for n in count() if not any(name.startswith(f"{wish}{'_' * n}") for name in names))


def watched_function(
    name: str, ops: Sequence[Op], inputs: Sequence[Proxy], device: torch.device, backend: Backend
) -> Callable[[list[Any]], Sequence[Any]]:
    """Like `region_function`, but it returns the fingerprints of what each op made."""
    prefix = _unused("print", _names(ops, inputs))
    take = Symbol("cudagraph_fingerprints", meta=None, is_fusion=True)
    body: list[_Step] = []
    taken = []
    with tracectx(TraceCtx()):
        for i, op in enumerate(ops):
            made = [proxy for proxy in op.symbol.flat_proxy_outs if isinstance(proxy, TensorProxy)]
            taken.append(AnyProxy(None, name=f"{prefix}{i}"))
            context = {take.name: partial(fingerprints, device)}
            takes = BoundSymbol(take, tuple(made), {}, taken[-1], _call_ctx=context)
            body += [_step(op, backend), (takes, (taken[-1].name, *op.outputs))]
    return _function(f"{name}_watched", body, inputs, taken)


def _function(
    name: str, body: Sequence[_Step], inputs: Sequence[Proxy], results: Sequence[Proxy], *others: Proxy
) -> Any:
    """Of the inputs in a list, and of ``others``."""
    lines = [f"def {name}({', '.join(['inputs', *(p.name for p in others)])}):"]
    lines += [f"  [{', '.join(p.name for p in inputs)}] = inputs", "  inputs.clear()"]
    context: dict[str, Any] = {"torch": torch, "thunder": thunder}  # as in what Thunder compiles
    with tracectx(TraceCtx()):
        for (symbol, _), spent in zip(body, _last_used(body, results)):
            lines += symbol.python(indent=1)
            modules, functions, objects = symbol.gather_ctxs()
            context |= {module_shortname(path): module for path, module in modules.items()} | functions | objects
            if spent:
                lines.append(f"  del {', '.join(spent)}")
    lines.append(f"  return ({''.join(f'{p.name}, ' for p in results)})")
    return build_callable(name, python_str="\n".join(lines), file_name=f"thunder.{name}", ctx=context)


def _last_used(body: Sequence[_Step], results: Sequence[Proxy]) -> list[list[str]]:
    """For each step, the variables that nothing after it needs."""
    needed = {proxy.name for proxy in results}
    found: list[list[str]] = []
    for _, names in reversed(body):
        found.append([name for name in dict.fromkeys(names) if name not in needed])
        needed.update(names)
    return found[::-1]
