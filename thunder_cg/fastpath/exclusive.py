"""Which cache entries can never be for the same call, by the checks of their prologues.

Thunder asks the newest entry first, and a prologue checks only what was read when it was made. So an older entry may
hold, too, where a newer one does; unless both check one thing, and expect different values of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_cg.prologue import Metadata, ParameterCheck

_OF_VALUES = frozenset({"check_len", "check_literal_like", "check_string_value"})
_LOOKUPS = frozenset(
    {
        PrimIDs.UNPACK_ATTR,
        PrimIDs.UNPACK_BUFFER,
        PrimIDs.UNPACK_CACHE_INFO,
        PrimIDs.UNPACK_FUNCTION_OBJ,
        PrimIDs.UNPACK_GETITEM,
        PrimIDs.UNPACK_PARAMETER,
        PrimIDs.UNPACK_SUBMODULE,
        PrimIDs.UNPACK_THUNDER_MODULE,
    }
)

Path = tuple[Any, ...]  # of the look-ups that lead to a value: the same ones, in one call, lead to the same value
Checks = dict[tuple[Path, str], Any]  # what is expected there, by the kind of check


def checks(prologue: TraceCtx) -> Checks:
    """What a prologue expects, and where."""
    paths: dict[str, Path] = {}
    found: Checks = {}
    for symbol in prologue.bound_symbols:
        inputs = [proxy.name for proxy in symbol.flat_proxy_args]
        if symbol.sym.id is PrimIDs.UNPACK_TRIVIAL:
            paths.update((proxy.name, (proxy.name,)) for proxy in symbol.flat_proxy_outs)
        elif symbol.sym.id in _LOOKUPS and all(name in paths for name in inputs):
            arguments = [paths[arg.name] if isinstance(arg, Proxy) else arg for arg in symbol.args]
            paths.update((proxy.name, (symbol.sym.id, *arguments)) for proxy in symbol.flat_proxy_outs)
        else:
            for kind, expected in _expected(symbol).items():
                found.update(((paths[name], kind), value) for name, value in zip(inputs, expected) if name in paths)
    return found


def _expected(symbol: BoundSymbol) -> dict[str, Sequence[Any]]:
    """By the kind of a check: what it expects of each of the proxies that it is given."""
    name = symbol.sym.name
    check = (symbol._call_ctx or {}).get(name)
    if isinstance(check, ParameterCheck):
        return {"tensor": check.expected}
    if name == "check_tensor_metadata":
        _, shape, *rest = symbol.args
        return {"tensor": [Metadata(tuple(shape), *rest)]}
    if name == "check_number_type_and_value":
        return {"type": [type(symbol.args[1])], "number": [symbol.args[1]]}
    return {name: [symbol.args[1]]} if name in _OF_VALUES else {}


def are_exclusive(one: Checks, other: Checks) -> bool:
    """Whether no call can pass the checks of both."""
    return any(key in other and _differ(value, other[key]) for key, value in one.items())


def _differ(one: Any, other: Any) -> bool:
    """Whether no value is equal to both: one that is not equal to itself proves nothing."""
    return bool(one != other and one == one and other == other)
