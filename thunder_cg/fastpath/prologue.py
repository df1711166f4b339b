"""What a prologue of Thunder's checks and looks up, read once.

Thunder's prologue checks a call's arguments, the module's attributes and parameters, and the state of the thread, and
returns the inputs of the computation.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any, NamedTuple

import torch

from thunder_cg.analysis.ops import Value
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.containers import CHECKS_OF_CONTAINERS, check_constant, essence, expected_constant
from thunder_cg.compat.guards import TensorGuards, tensor_guards
from thunder_cg.compat.thunder import BoundSymbol, PrimIDs, Proxy, TraceCtx, TraceProvenance, from_trace
from thunder_cg.executor import executor
from thunder_cg.runtime.compilation import NAMES, OF_MODULES
from thunder_cg.runtime.functions import unused

_TENSOR_CHECKS = (PrimIDs.CHECK_TENSOR_SHAPE_AND_METADATA, "check_tensor_metadata")  # before and after execution
_VALUE_CHECKS = frozenset({"check_len", "check_literal_like", "check_string_value", *CHECKS_OF_CONTAINERS})
_CONSTANTS = ("check_string_value", "constant")
_VALUES = {PrimIDs.UNPACK_ATTR, PrimIDs.UNPACK_CACHE_INFO, PrimIDs.UNPACK_FUNCTION_OBJ, PrimIDs.UNPACK_GETITEM}
_MODULES = {PrimIDs.UNPACK_BUFFER, PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_SUBMODULE, PrimIDs.UNPACK_THUNDER_MODULE}
_LOOKUPS = _VALUES | _MODULES
_CELL = re.compile(r"function\.__closure__\[(\d+)\]\.cell_contents(.*)")
_DYNAMOS_SIZE = re.compile(r"s\d+")  # what Dynamo calls a size that varies

Path = tuple[Any, ...]
"""The look-ups that lead to a value. In one call, the same look-ups lead to the same value."""


class Metadata(NamedTuple):
    """What a compiled function relies on of a tensor."""

    shape: tuple[Any, ...]
    device: str
    dtype: torch.dtype
    requires_grad: bool

    @property
    def is_static(self) -> bool:
        """Whether all sizes are known when the prologue is made."""
        return all(type(size) is int for size in self.shape)

    def check(self, tensor: Any) -> None:
        """AssertionError if ``tensor`` is anything else: Thunder then tries the next compiled function."""
        assert isinstance(tensor, torch.Tensor), f"expected a tensor, got a {type(tensor).__name__}"
        found = Metadata(tuple(tensor.shape), str(tensor.device), tensor.dtype, tensor.requires_grad)
        assert found == self, f"expected {self}, got {found}; convert or move a model before thunder.jit compiles it"


@dataclass(frozen=True, slots=True)
class Lookup:
    """How a prologue gets one value."""

    symbol: BoundSymbol
    prim: Any  # the symbol's id
    owner: str | None  # the name of the value that it is looked up in; None if it is looked up in nothing
    key: Any  # the item, attribute, parameter or submodule there
    path: Path | None  # None if another call may get another value in the same way


@dataclass(frozen=True)
class PrologueChecks:
    """What one prologue checks and looks up: read once, and then the same for all that ask."""

    trace: TraceCtx
    lookups: dict[str, Lookup] = field(default_factory=dict, init=False)  # by value, in the prologue's order
    tensor_checks: dict[str, BoundSymbol] = field(default_factory=dict, init=False)  # by tensor, of its metadata
    metadata: dict[str, Metadata] = field(default_factory=dict, init=False)  # by tensor, what is expected
    cache_info: dict[str, Any] = field(default_factory=dict, init=False)  # by key; "" for a check of no such key
    others: list[BoundSymbol] = field(default_factory=list, init=False)  # all other checks
    expected: dict[tuple[Path, str], Any] = field(default_factory=dict, init=False)  # by path and kind of the check

    def __post_init__(self) -> None:
        for symbol in self.trace.bound_symbols[:-1]:
            if symbol.flat_proxy_outs:
                self.lookups.update(_lookups(symbol, self.lookups))
                continue
            names = [proxy.name for proxy in symbol.flat_proxy_args]
            for name, kind, value in _expectations(symbol, names):
                if name in self.lookups and (path := self.lookups[name].path) is not None:
                    self.expected[path, kind] = value
                if kind == "tensor":
                    self.metadata[name] = value
                    self.tensor_checks[name] = symbol
            path = self.lookups[names[0]].path if names and names[0] in self.lookups else None
            if path is not None and _is_of_cache_info(path):
                is_item = path[0] is PrimIDs.UNPACK_GETITEM and path[1][0] is PrimIDs.UNPACK_CACHE_INFO
                self.cache_info[str(path[2]) if is_item else ""] = symbol.args[1]
            elif not names or self.tensor_checks.get(names[0]) is not symbol:
                self.others.append(symbol)

    def attributes_of_modules(self, function: Any) -> Iterator[str]:
        """Values that attributes of modules lead to; of a graph of Dynamo's, parameters and buffers, too.

        Args:
            function: the module or the function that was compiled.
        """
        if isinstance(function, torch.fx.GraphModule):
            yield from function.meta.get(OF_MODULES, ())
        modules = PrimIDs.UNPACK_THUNDER_MODULE, PrimIDs.UNPACK_SUBMODULE
        leads = {name for name, lookup in self.lookups.items() if lookup.prim in modules}
        for name, lookup in self.lookups.items():  # what is looked up in another one comes after it
            if lookup.prim in (PrimIDs.UNPACK_ATTR, PrimIDs.UNPACK_GETITEM) and lookup.owner in leads:
                leads.add(name)
                yield name

    def arity_name(self, symbol: BoundSymbol) -> str | None:
        """``args`` or ``kwargs`` if ``symbol`` checks how many of these a call has; else None."""
        lookup = self.lookups.get(getattr(symbol.args[0], "name", "")) if symbol.sym.id == "check_len" else None
        return symbol.args[0].name if lookup is not None and lookup.prim is PrimIDs.UNPACK_TRIVIAL else None

    @property
    def returned(self) -> list[list[str]]:
        """The names of what the computation gets, and of what the epilogue gets."""
        inputs_and_passed_on = self.trace.bound_symbols[-1].args[0]
        return [[x.name if isinstance(x, Proxy) else "" for x in values] for values in inputs_and_passed_on]

    def users_values(self, function: Any) -> Iterator[tuple[str, str, Any]]:
        """What may differ from call to call, as (kind, the user's name, value); bools, which have few values, do not.

        Args:
            function: the module or the function that was compiled.
        """
        arguments, cells = _Arguments(function), getattr(getattr(function, "__code__", None), "co_freevars", ())
        for (path, check), value in self.expected.items():
            if _is_of_cache_info(path) or path[0] in _MODULES:
                continue
            name, is_number = _users_name(path, arguments), check == "number" and not isinstance(value, bool)
            if (cell := _CELL.fullmatch(name)) is not None:
                name = dict(enumerate(cells)).get(int(cell[1]), name) + cell[2]
            if check == "tensor" and value.is_static:
                yield "shape", name, value.shape
            elif check in CHECKS_OF_CONTAINERS:
                yield "items", name, value
            elif is_number and not _DYNAMOS_SIZE.fullmatch(name):  # a shape says the same
                is_attribute = path[0] is PrimIDs.UNPACK_ATTR and name.startswith("self.")
                yield "attribute" if is_attribute else "number", name, value
            elif check in _CONSTANTS:
                yield "constant", name, repr(value)

    def users_names(self, function: Any) -> dict[str, str]:
        """What the user calls the tensors that are no parameters or buffers: by their names in the trace.

        Args:
            function: the module or the function that was compiled.
        """
        arguments = _Arguments(function)
        paths = {name: self.lookups[name].path for name in self.metadata if name in self.lookups}
        return {n: _users_name(p, arguments) for n, p in paths.items() if p is not None and p[0] not in _MODULES}

    def value(self, path: Path | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call's arguments have at the end of a path; None if the path begins elsewhere."""
        if path in (("args",), ("kwargs",)):
            return args if path == ("args",) else kwargs
        if path is None or path[0] is not PrimIDs.UNPACK_GETITEM or not isinstance(path[1], tuple):
            return None
        owner = self.value(path[1], args, kwargs)
        return None if owner is None else owner[path[2]]

    def excludes(self, other: PrologueChecks) -> bool:
        """Whether no call can pass the checks of both.

        Thunder asks the newest entry first, and a prologue checks only what was read when it was made. So an older
        entry may hold, too, where a newer one does, unless both check one value and expect different things of it.
        """
        shared = self.expected.keys() & other.expected.keys()
        pairs = ((self.expected[key], other.expected[key]) for key in shared)
        # A value that is not equal to itself proves nothing.
        return any(bool(mine != theirs and mine == mine and theirs == theirs) for mine, theirs in pairs)


def _is_of_cache_info(path: Any) -> bool:
    is_path = isinstance(path, tuple) and bool(path)
    return is_path and (path[0] is PrimIDs.UNPACK_CACHE_INFO or any(map(_is_of_cache_info, path)))


class _Arguments:
    """The names of the arguments that a function, or a module's forward, takes by position."""

    def __init__(self, function: Any) -> None:
        self._is_dynamos = isinstance(function, torch.fx.GraphModule)
        self._dynamos = function.meta.get(NAMES, {}) if isinstance(function, torch.fx.GraphModule) else {}
        function = function.forward if isinstance(function, torch.nn.Module) else function
        try:
            parameters = [*inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):  # it is written in C
            parameters = []
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [each.name for each in parameters if each.kind in kinds]
        self._rest = next((each.name for each in parameters if each.kind is Parameter.VAR_POSITIONAL), "args")

    def name(self, index: int) -> str:
        if index < len(self._names):
            name = self._names[index]
            return self._dynamos.get(name) or Value(name, "", is_dynamos=self._is_dynamos).users_name
        return f"{self._rest}[{index - len(self._names)}]"


def _users_name(path: Path, arguments: _Arguments) -> str:
    """How the user's code refers to a value: ``x``, ``options['rate']``, ``self.step``."""
    prim, *steps = path
    if prim is PrimIDs.UNPACK_THUNDER_MODULE:
        return "self"
    if prim is PrimIDs.UNPACK_FUNCTION_OBJ:
        return "function"
    if len(steps) < 2:
        return str(steps[-1] if steps else prim)
    owner, key, *_ = steps
    if not isinstance(owner, tuple):
        return str(key)
    if prim in (PrimIDs.UNPACK_ATTR, PrimIDs.UNPACK_SUBMODULE):
        return f"{_users_name(owner, arguments)}.{key}"
    if owner == ("args",) and isinstance(key, int):
        return arguments.name(key)
    if owner == ("kwargs",) or owner[-1] == "__globals__":
        return str(key)
    return f"{_users_name(owner, arguments)}[{key!r}]"


def _lookups(symbol: BoundSymbol, lookups: Mapping[str, Lookup]) -> dict[str, Lookup]:
    """The look-ups of the values that ``symbol`` makes, given those before it."""
    prim = symbol.sym.id
    key = symbol.args[1] if len(symbol.args) > 1 else None
    path: Path | None = None
    if prim in _LOOKUPS:
        steps = [lookups[a.name].path if isinstance(a, Proxy) and a.name in lookups else a for a in symbol.args]
        if all(step is not None and not isinstance(step, Proxy) for step in steps):
            path = (prim, *steps)
    owner = next((proxy.name for proxy in symbol.flat_proxy_args), None)
    names = [proxy.name for proxy in symbol.flat_proxy_outs]
    return {n: Lookup(symbol, prim, owner, key, (n,) if prim is PrimIDs.UNPACK_TRIVIAL else path) for n in names}


def _expectations(symbol: BoundSymbol, names: list[str]) -> Iterator[tuple[str, str, Any]]:
    """What a check expects: the name of the value, the kind of the check, and what is expected."""
    name = symbol.sym.name
    check = compat.bound_functions(symbol).get(name)
    if isinstance(check, ParameterCheck):
        yield from ((tensor, "tensor", metadata) for tensor, metadata in zip(names, check.expected))
    elif symbol.sym.id in _TENSOR_CHECKS:
        _, shape, *rest = symbol.args
        yield names[0], "tensor", Metadata(tuple(shape), *rest)
        yield names[0], "type", torch.Tensor
    elif name == check_constant.name:
        constant = expected_constant(symbol.args[1])
        yield names[0], "type", type(constant)
        yield names[0], "constant", essence(constant)
    elif name == "check_number_type_and_value":
        yield names[0], "type", type(symbol.args[1])
        yield names[0], "number", symbol.args[1]
    elif name in _VALUE_CHECKS:
        yield names[0], name, symbol.args[1]


class ParameterCheck:
    """One C++ check of all parameters and buffers, in place of Python checks, which are much of a call's host time.

    Where the C++ check does not hold, the checks are made one by one.
    """

    def __init__(self, expected: tuple[Metadata, ...]) -> None:
        self.expected = expected
        self._fast: dict[bool, TensorGuards] = {}  # by inference mode, in which PyTorch dispatches differently

    def __call__(self, *tensors: Any) -> None:
        inference = torch.is_inference_mode_enabled()
        fast = self._fast.get(inference)
        if fast is not None and fast.check(*tensors):
            return
        for tensor, metadata in zip(tensors, self.expected):
            metadata.check(tensor)
        # Thunder ignores strides. Tied weights occur twice, which TensorGuards never admits.
        if len(set(map(id, tensors))) == len(tensors):
            self._fast[inference] = tensor_guards(tensors, strides=False)


def with_one_check(prologue: TraceCtx, names: Set[str]) -> TraceCtx:
    """``prologue`` with one symbol in place of the metadata checks of all parameters, and of the tensors ``names``."""
    checks = PrologueChecks(prologue)
    names = names | {name for name, symbol in checks.tensor_checks.items() if compat.is_parameter(symbol.args[0])}
    tensors = [name for name in checks.tensor_checks if name in names and checks.metadata[name].is_static]
    if not tensors:
        return prologue
    replaced = {id(checks.tensor_checks[name]) for name in tensors}
    last = id(checks.tensor_checks[tensors[-1]])
    trace = from_trace(prologue)
    check = ParameterCheck(tuple(checks.metadata[name] for name in tensors))
    proxies = [checks.tensor_checks[name].args[0] for name in tensors]
    name = unused_name("cudagraph_check_parameters", prologue)
    combined = executor.bind(name, check, proxies, None, has_effect=True)
    kept = (s for s in prologue.bound_symbols if id(s) not in replaced or id(s) == last)
    trace.bound_symbols = [combined if id(symbol) == last else symbol for symbol in kept]
    trace.set_provenance(TraceProvenance("One check of all parameters and buffers"))
    return trace


def unused_name(wish: str, trace: TraceCtx) -> str:
    """A name like ``wish`` for a function, which no value and no function of the trace has: these may be the user's."""
    symbols = trace.bound_symbols
    names = {p.name for s in symbols for p in (*s.flat_proxy_args, *s.flat_proxy_outs)} | {s.sym.name for s in symbols}
    return unused(wish, names | trace.names)
