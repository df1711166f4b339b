"""A region's ops as a Python function, written and compiled by Thunder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
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
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], results: Sequence[Proxy], backend: Backend
) -> Callable[[list[Any]], Sequence[Any]]:
    """A region's Python function, as Thunder writes it: its symbols, each variable deleted after its last use.

    It takes its inputs in a list, which it empties, so that their memory can be freed on the way.
    """
    return _function(name, [_called_by(backend, symbol) for symbol in symbols], inputs, results)


def watched_function(
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], device: torch.device, backend: Backend
) -> Callable[[list[Any]], Sequence[Any]]:
    """Like `region_function`, but it returns the fingerprints of what each symbol made."""
    names = {p.name for s in symbols for p in (*s.flat_proxy_args, *s.flat_proxy_outs)} | {p.name for p in inputs}
    prefix = next(f"print{'_' * n}" for n in count() if not any(name.startswith(f"print{'_' * n}") for name in names))
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
    name: str, symbols: Sequence[Any], inputs: Sequence[Proxy], results: Sequence[Proxy]
) -> Callable[[list[Any]], Sequence[Any]]:
    def region_fn(inputs: Any) -> None:
        """Stands for the signature alone."""

    region_fn.__name__ = name
    trace = TraceCtx(region_fn)
    with tracectx(trace):
        collection = CollectionProxy(list(inputs), name="inputs")
        trace.args = (collection.collection(),)
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
