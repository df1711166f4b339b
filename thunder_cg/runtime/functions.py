"""A region's ops as a Python function, written and compiled by Thunder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from itertools import count
from types import FunctionType
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import AnyProxy, CollectionProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import del_last_used
from thunder.executors.pythonex import clear_mutable_collection

from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.verify import fingerprints


def region_function(
    name: str,
    symbols: Sequence[Any],
    inputs: Sequence[Proxy],
    results: Sequence[Proxy],
    leaving: Mapping[str, int],
    backend: Backend,
) -> Callable[..., Sequence[Any]]:
    """A region's Python function, as Thunder writes it: its symbols, each variable deleted after its last use.

    It takes its inputs in a list, which it empties, so that their memory can be freed on the way, and a function that
    it gives each result that may leave early; what that returns is the result then.

    Args:
        leaving: names of results that may leave early, and the position of the symbol after which they may.
    """
    names = {p.name for s in symbols for p in (*s.flat_proxy_args, *s.flat_proxy_outs)} | {p.name for p in inputs}
    proxies = {proxy.name: proxy for proxy in results}
    after: dict[int, list[Proxy]] = {}
    for each, position in leaving.items():
        after.setdefault(position, []).append(proxies[each])
    with tracectx(TraceCtx()):
        leave = AnyProxy(None, name=_unused("leave", names))
        body = []
        for i, symbol in enumerate(symbols):
            body.append(_called_by(backend, symbol))
            body += [BoundSymbol(_LEAVE, (leave, proxy), {}, proxy, _call_ctx={}) for proxy in after.get(i, ())]
    function = _function(name, body, inputs, results, leave)
    function.__defaults__ = (_stay,)
    return function


def _stay(result: Any) -> Any:
    return result


def _write_leave(bsym: BoundSymbol, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    leave, result = bsym.args
    return f"{result.name} = {leave.name}({result.name})"


_LEAVE = Symbol("cudagraph_leave", meta=None, is_fusion=True, python_printer=_write_leave)


def _unused(wish: str, names: Collection[str]) -> str:
    """``wish``, with as many underscores after it as it takes for no name to begin so."""
    return next(f"{wish}{'_' * n}" for n in count() if not any(name.startswith(f"{wish}{'_' * n}") for name in names))


def watched_function(
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], device: torch.device, backend: Backend
) -> Callable[[list[Any]], Sequence[Any]]:
    """Like `region_function`, but it returns the fingerprints of what each symbol made."""
    names = {p.name for s in symbols for p in (*s.flat_proxy_args, *s.flat_proxy_outs)} | {p.name for p in inputs}
    prefix = _unused("print", names)
    take = Symbol("cudagraph_fingerprints", meta=None, is_fusion=True)
    watched, taken = [], []
    with tracectx(TraceCtx()):
        for i, symbol in enumerate(symbols):
            made = [proxy for proxy in symbol.flat_proxy_outs if isinstance(proxy, TensorProxy)]
            taken.append(AnyProxy(None, name=f"{prefix}{i}"))
            context = {take.name: partial(fingerprints, device)}
            watched += [_called_by(backend, symbol), BoundSymbol(take, tuple(made), {}, taken[-1], _call_ctx=context)]
    return _function(f"{name}_watched", watched, inputs, taken)


def _function(
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], results: Sequence[Proxy], *others: Proxy
) -> FunctionType:
    """Of the inputs in a list, and of ``others``."""
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ("inputs", *(p.name for p in others))]

    def region_fn() -> None:
        """Stands for the signature alone."""

    region_fn.__name__ = name
    region_fn.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    trace = TraceCtx(region_fn)
    with tracectx(trace):
        collection = CollectionProxy(list(inputs), name="inputs")
        trace.args = (collection.collection(), *others)
        prims.unpack_trivial(collection, name="inputs")
        prims.unpack_sequence(collection, len(inputs))
        trace.bound_symbols.append(clear_mutable_collection.bind(collection, output=None))
        trace.bound_symbols += symbols
        prims.python_return(tuple(results))
    return del_last_used(trace).python_callable(include_decorators=False)


def _called_by(backend: Backend, symbol: Any) -> Any:
    """The symbol, calling its compiled fusion the way the backend needs."""
    if not (symbol.sym.is_fusion and symbol._call_ctx):
        return symbol
    fusion = symbol.from_bsym()
    fusion._call_ctx = {name: backend.fusion(fn) for name, fn in symbol._call_ctx.items()}
    return fusion
