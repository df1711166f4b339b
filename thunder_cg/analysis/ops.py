"""Read a Thunder trace once, into frozen records for the rest of the analysis.

A Thunder release that changes traces changes this file.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from thunder_cg.analysis import rules
from thunder_cg.analysis.rules.record import Arguments, TensorArgument
from thunder_cg.analysis.sources import SourceLine, Stacks, line_behind, user_frames
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.compat.lines import arguments_at, is_called_by_torch
from thunder_cg.compat.operators import is_cudagraph_unsafe
from thunder_cg.compat.settings import Settings

_DROPPED = frozenset({"DEL", "COMMENT"})  # the transform computes dels again; comments do nothing
_BOOKKEEPING = frozenset({
    "RETURN", "CONSTRUCT_TUPLE", "DATACLASS_NEW", "PACK_ATTR", "PACK_BUFFER", "PACK_LIST", "PACK_SETITEM",
    "PYTHON_VARS", "ASSERT_COMPARE", "ASSERT_TENSOR_METADATA",
})  # fmt: skip
_BOOKKEEPING_PREFIXES = ("UNPACK_", "CHECK_")
_PYTHON_BOOKKEEPING = frozenset({"clear_mutable_collection", "construct_tuple", "unpack_list", "unpack_tuple"})
# Thunder's PyTorch executor calls some operators by names of its own.
_THUNDERS = re.compile(r"torch_(?:prims_)?(\w+?)(?:_prim)?_impl")
_COLLECTIVES = {"all_gather", "all_reduce", "broadcast", "reduce_scatter", "wait"}
_USERS = {
    "copy_with_setitem_impl": "Tensor.__setitem__",
    "torch_pad_prim_impl": "torch.nn.functional.pad",
    "torch_slice_prim_impl": "Tensor.__getitem__",
}
_DYNAMOS = re.compile(r"l_kwargs_(\w+?)_?|[lg]_(\w+)_")


@dataclass(frozen=True, slots=True)
class Value:
    """A proxy of the trace."""

    name: str
    kind: str  # "tensor", "number", "future" (a tensor that a collective is still filling) or "other"
    device: str | None = None  # "cpu", "cuda:0", "meta"; None unless tensor or future
    nbytes: int = 0  # elements times bytes per element; 0 if unknown
    symbolic: bool = False  # a dimension is a number known only at run time
    static: bool = False  # a parameter or buffer of the module: its address outlives the call
    dtype: str | None = None  # Thunder's name, such as "float32" or "bool8"; None unless tensor or future
    proxy: Any = field(default=None, compare=False, repr=False)  # for the transform
    label: str = ""  # what the user calls it, where the prologue tells
    is_dynamos: bool = False  # whether Dynamo has named it, which knows the user's name

    @property
    def users_name(self) -> str:
        """What the user calls an argument: Thunder calls ``args[1]["a"]`` ``t_1_a``, Dynamo calls ``x`` ``l_x_``."""
        if self.label:
            return self.label
        if self.is_dynamos and (dynamos := _DYNAMOS.fullmatch(self.name)) is not None:
            name = re.sub("^fn(?=_(modules|parameters|buffers)_)", "self", dynamos[1] or dynamos[2])  # a Sequential
            return re.sub("_(modules|parameters|buffers)_", ".", name) if name.startswith("self_") else name
        if self.static or (nested := re.fullmatch(r"t_(\d+)((?:_\d+)*)(?:_(\w+))?", self.name)) is None:
            return self.name
        argument, indices, key = nested.groups()
        inside = "".join(f"[{index}]" for index in indices.split("_")[1:]) + (f"[{key!r}]" if key else "")
        return f"args[{argument}]{inside}" if inside else self.name


@dataclass(frozen=True, slots=True)
class Op:
    """A bound symbol of the trace."""

    index: int  # position among its siblings, dropped symbols not counted
    name: str  # as the user writes it, or the trace prints it: "torch.add", "Tensor.item", "TorchCompile0"
    executor: str | None  # None for prims and Thunder's own torch symbols
    id: str | None  # a prim's is its enum name, such as "RETURN"; None for fusions
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    bookkeeping: bool = False  # it only unpacks arguments, builds or clears collections, checks, or returns
    is_fusion: bool = False
    subs: tuple[Op, ...] = ()
    line: str | None = None  # "model.py:12", where the user's code called it; None if Thunder does not know
    library_line: str | None = None  # the line in a module of PyTorch's, if no code of the user's calls that module
    module: str | None = None  # "self.up", that module by its parameters; None if it has none
    at: SourceLine | None = None  # the one line or the other
    # Names of Thunder's tags on this symbol alone. Most opaque symbols have none: prove nothing from their absence.
    tags: frozenset[str] = frozenset()
    is_tagged_unsafe: bool = False  # its author has tagged it `torch.Tag.cudagraph_unsafe`
    conditions: frozenset[str] = frozenset()  # names of the conditions of its rule that hold for its arguments
    keywords: tuple[tuple[str, str], ...] = ()  # keyword arguments that are proxies, and the names of those
    symbol: Any = field(default=None, compare=False, repr=False)  # the bound symbol, for the transform

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def deny_name(self) -> str:
        """The name by which ``deny=`` takes it."""
        return self.id if self.id and self.executor else self.name

    @property
    def rule(self) -> rules.Rule | None:
        return rules.find(self.executor, self.id)

    @property
    def settings(self) -> Settings:
        """The settings by which its kernels may be chosen. A fusion's compiler may put other operators in its place."""
        if self.rule is not None:
            return self.rule.settings if self.rule.captures else Settings.ALL
        inside = [sub.settings for sub in self.subs]
        return Settings.ALL if any(inside) or not inside else Settings.NONE

    @property
    def communicates(self) -> bool:
        """Whether it is a collective that may be captured, or the wait for one."""
        return self.rule is not None and self.rule.communicates


@dataclass(frozen=True, slots=True)
class Ops:
    """One trace, read once."""

    ops: tuple[Op, ...]
    values: Mapping[str, Value]  # every proxy by name, those inside of subsymbols too
    args: tuple[str, ...]  # names that come from outside: the trace's arguments and the values unpacked from them
    # For each value, an op with a known line: the op that made it, or one close to that op, or one that uses it.
    near: Mapping[str, Op] = field(default_factory=dict)
    made_by: Mapping[str, Op] = field(default_factory=dict)  # for each value that an op of it, or of its forward, made
    is_backward: bool = False

    def origin(self, op: Op) -> Op | None:
        """The op whose line is reported for this one: itself, or a close one where Thunder has lost the line."""
        if op.module is not None:
            return op
        values = op.inputs if op.bookkeeping else op.names
        near = (self.near[name] for name in values if name in self.near)
        return op if op.line else next(near, op if op.library_line else None)

    def line(self, op: Op) -> str | None:
        """``"file.py:12"`` in the user's source, or ``"near file.py:12"``; a line of PyTorch's if there is none.

        Of an op in a module of PyTorch's with parameters, the module and the line that calls it: "self.up (a.py:12)".
        """
        if op.module is not None:
            return f"{op.module} ({op.line or op.library_line})"
        origin = self.origin(op)
        if origin is None or origin.line is None:
            return op.library_line
        return op.line or f"near {origin.line}"

    def source(self, op: Op) -> str | None:
        """The text of the line that is reported for this op; None if the line surely is another op's."""
        return at.text if (at := self.at(op)) is not None else None

    def at(self, op: Op) -> SourceLine | None:
        """That line."""
        origin = self.origin(op)
        return origin.at if origin is not None and (origin is op or op.library_line is None) else None

    def place(self, op: Op) -> str:
        """``"at file.py:12"``, ``"near file.py:12"``, or that the line is unknown.

        What a backward adds and no line has are the gradients of a value that was used more than once.
        """
        line = self.line(op) or "a line unknown to Thunder"
        if not line.startswith("near "):
            return f"at {line}"
        return f"in a sum of gradients {line}" if self.is_backward and op.name == "torch.add" else line

    def described(self, name: str) -> str:
        """A value as the user knows it: an argument by its name, any other by what made it and where."""
        op = self.made_by.get(name)
        if op is not None and op.name == "update_aliases":  # Thunder's: what it returns are its arguments
            return self.described(op.inputs[op.outputs.index(name)])
        if op is not None:
            return f"the result of {op.name} {self.place(op)}"
        return f"input {self.values[name].users_name!r}"


def read(
    trace: compat.TraceCtx,
    static_names: frozenset[str] = frozenset(),
    forward: Ops | None = None,
    stacks: Stacks | None = None,
    stand_in: str | None = None,
    names: Mapping[str, str] | None = None,
) -> Ops:
    """Reads ``trace`` in one pass; ``del``s and comments are dropped.

    Args:
        trace: A forward or backward trace, as ``transform_trace_post_optimization`` gets it.
        static_names: Names of proxies that the prologue unpacked as parameters or buffers. The proxies' own tags are
            lost on the way through several of Thunder's passes, so they alone are not enough.
        forward: Of a backward trace, its forward. The forward made the saved values and the results of which the
            backward gets the gradients, so it knows their lines.
        stacks: where code that Dynamo generated comes from.
        stand_in: A type of device, "cpu" or "meta", that stands for "cuda:0" in a trace that is only planned.
        names: What the module calls its parameters and buffers, and the user the inputs, by the names of their proxies.
    """
    reader = _TraceReader(static_names, stacks or {}, stand_in, names or {})
    leaves, _ = compat.tree_flatten_with_dataclass((trace.args or (), trace.kwargs or {}))
    arguments = reader.names(leaf for leaf in leaves if isinstance(leaf, compat.Proxy))
    ops = reader.ops(trace.bound_symbols)
    unpacked = (name for op in ops if op.bookkeeping for name in op.outputs)
    made_by = dict(forward.made_by) if forward is not None else {}
    made_by |= {name: op for op in ops if not op.bookkeeping for name in op.outputs}
    args, near = tuple(dict.fromkeys((*arguments, *unpacked))), _near(ops, forward)
    for name in args:  # Thunder has no lines for comparisons
        if frames := user_frames((stacks or {}).get((name, 0))):
            line = str(frames[-1])
            near.setdefault(name, Op(-1, "an argument", None, None, outputs=(name,), line=line, at=frames[-1]))
    return Ops(ops, reader.values, args, near, made_by, is_backward=forward is not None)


def op_of(symbol: compat.BoundSymbol) -> Op:
    """One symbol, read by itself."""
    return _TraceReader(frozenset(), {}, None, {}).op(0, symbol)


def names_in(tree: Any) -> set[str]:
    """Names of the proxies in a tree of arguments or results."""
    return {leaf.name for leaf in compat.tree_flatten_with_dataclass(tree)[0] if isinstance(leaf, compat.Proxy)}


def process_groups(ops: Iterable[Op]) -> list[ProcessGroup]:
    """The groups that the ops communicate in, in order of first use."""
    symbols = (op.symbol for op in ops if op.communicates and op.symbol is not None)
    leaves = (leaf for s in symbols for leaf in compat.tree_flatten_with_dataclass((s.args, s.kwargs))[0])
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, ProcessGroup)))


def _near(ops: Sequence[Op], forward: Ops | None) -> dict[str, Op]:
    near: dict[str, Op] = {}
    if forward is not None:
        near.update(forward.near)
        results = _results(forward.ops[-1].symbol)
        gradients = gradients_in(ops)
        if len(results) == len(gradients):
            near.update((g, near[result]) for g, result in zip(gradients, results) if result in near)
    for op in ops:
        origin = op if op.line else next((near[name] for name in op.inputs if name in near), None)
        if origin is not None:
            near.update(dict.fromkeys(op.outputs, origin))
        if op.line:
            for name in op.inputs:
                near.setdefault(name, op)
    return near


def gradients_in(ops: Iterable[Op]) -> tuple[str, ...]:
    """Names of the gradients that a backward gets, in the order of the results of its forward."""
    return next((op.outputs for op in ops if op.inputs == ("cotangents",) and op.outputs), ())


def _results(returned: compat.BoundSymbol | None) -> list[str]:
    """Names of the results that a forward trace ties to autograd, in the order of the gradients that come in."""
    data = returned.args[0] if returned is not None and returned.args else None
    flat = data.get("flat_output", ()) if isinstance(data, dict) else ()
    return [result.name if isinstance(result, compat.Proxy) else "" for result in flat]


def computing(trace: compat.TraceCtx) -> Iterator[compat.BoundSymbol]:
    """The symbols of ``trace`` without bookkeeping, ``del``s and comments."""
    for bound in trace.bound_symbols:
        executor, id_ = _key(bound.sym)
        if id_ not in _DROPPED and not _is_bookkeeping(executor, id_):
            yield bound


class _TraceReader:
    """Collects values by name while it turns bound symbols into ops."""

    def __init__(
        self, static_names: frozenset[str], stacks: Stacks, stand_in: str | None, names: Mapping[str, str]
    ) -> None:
        self.static_names, self.stacks, self.stand_in = static_names, stacks, stand_in
        self.known_names = names
        self.values: dict[str, Value] = {}
        self._same: set[tuple[str, ...]] = set()  # inputs and results that are one tensor, of collectives in place

    def ops(self, bound_symbols: Iterable[compat.BoundSymbol]) -> tuple[Op, ...]:
        kept = (each for b in bound_symbols if _key(b.sym)[1] not in _DROPPED for each in compat.by_device(b))
        return tuple(self.op(index, bound) for index, bound in enumerate(kept))

    def op(self, index: int, bound: compat.BoundSymbol) -> Op:
        executor, id_ = _key(bound.sym)
        if id_ == "copy_" and tuple(reversed(self.names(bound.flat_proxy_args))) in self._same:
            bound = compat.without_copy(bound)
            executor, id_ = _key(bound.sym)
        line, functions = self.line(bound), compat.bound_functions(bound).values()
        in_library = compat.library_names_of(bound)
        inputs = self.names(bound.flat_proxy_args)
        library_line = str(line) if line is not None and not line.is_users else None
        op = Op(
            index=index,
            name=in_library[1] if in_library else _name(bound, id_),
            executor=executor,
            id=id_,
            inputs=inputs,
            outputs=self.names(bound.flat_proxy_outs),
            bookkeeping=_is_bookkeeping(executor, id_),
            is_fusion=bool(bound.sym.is_fusion),
            subs=self.ops(bound.subsymbols),
            line=str(line) if line is not None and line.is_users else None,
            library_line=library_line,
            module=self.module((*inputs, *arguments_at(bound))) if library_line or is_called_by_torch(bound) else None,
            at=line,
            tags=frozenset(tag.name for tag in bound.sym.tags or ()),
            is_tagged_unsafe=any(map(is_cudagraph_unsafe, functions)),
            conditions=_conditions(bound, executor, id_, self.stand_in),
            keywords=tuple((key, p.name) for key, p in bound.kwargs.items() if isinstance(p, compat.Proxy)),
            symbol=bound,
        )
        if rules.REDUCES_IN_PLACE.name in op.conditions:
            self._same.add(op.names)
        return op

    def line(self, bound: compat.BoundSymbol) -> SourceLine | None:
        if bound.source_filename is None or bound.source_positions is None:
            return None
        return line_behind(bound.source_filename, bound.source_positions.lineno, self.stacks)

    def module(self, names: Sequence[str]) -> str | None:
        """``"self.up"`` for the first of the values that is a parameter or buffer of a submodule."""
        parameters = (self.known_names.get(name, "") for name in names if name in self.static_names)
        return next((f"self.{name.rpartition('.')[0]}" for name in parameters if "." in name), None)

    def names(self, proxies: Iterable[compat.Proxy]) -> tuple[str, ...]:
        """Their names, each once, in order; registers their values."""
        unique: dict[str, None] = {}
        for proxy in proxies:
            unique[proxy.name] = None
            if proxy.name not in self.values:
                self.values[proxy.name] = self.value(proxy)
        return tuple(unique)

    def value(self, proxy: compat.Proxy) -> Value:
        if not isinstance(proxy, (compat.TensorProxy, compat.FutureTensorProxy)):
            return Value(proxy.name, "number" if isinstance(proxy, compat.NumberProxy) else "other", proxy=proxy)
        shape = compat.proxy_shape(proxy)
        symbolic = any(isinstance(size, compat.NumberProxy) for size in shape)
        return Value(
            name=proxy.name,
            kind="future" if isinstance(proxy, compat.FutureTensorProxy) else "tensor",
            device=_device(proxy, self.stand_in),
            nbytes=0 if symbolic else math.prod(map(int, shape)) * int(proxy.dtype.bytes),
            symbolic=symbolic,
            static=proxy.name in self.static_names or compat.is_parameter(proxy),
            dtype=_dtype(proxy),
            proxy=proxy,
            label="" if proxy.name in self.static_names else self.known_names.get(proxy.name, ""),
            is_dynamos=bool(self.stacks) and proxy.name.startswith(("l_", "g_")),
        )


def _key(symbol: compat.Symbol) -> tuple[str | None, str | None]:
    """The executor and the id, as in `Op`."""
    executor = None if symbol.executor is None else str(symbol.executor.name)
    if isinstance(symbol.id, enum.Enum):
        return executor, symbol.id.name
    return executor, None if symbol.id is None else str(symbol.id)


def _name(bound: compat.BoundSymbol, id_: str | None) -> str:
    """What the user calls it, as far as that is known."""
    if id_ in _USERS:
        return _USERS[id_]
    if (thunders := _THUNDERS.fullmatch(id_ or "")) is not None:
        return thunders[1] if thunders[1] in _COLLECTIVES else f"torch.{thunders[1]}"
    name = str(bound.name_with_module())
    return name.removeprefix("torch.") if name.startswith("torch.torch.") else name  # Thunder's torch.torch.ops.ns.op


def _is_bookkeeping(executor: str | None, id_: str | None) -> bool:
    if id_ is None:
        return False
    if executor is None:
        return id_ in _BOOKKEEPING or id_.startswith(_BOOKKEEPING_PREFIXES)
    return executor == "python" and (id_ in _PYTHON_BOOKKEEPING or id_.startswith("check_"))


def _device(proxy: compat.TensorProxy | compat.FutureTensorProxy, stand_in: str | None) -> str:
    name = str(proxy.device.device_str())
    return name if stand_in is None or name.split(":")[0] != stand_in else "cuda:0"


def _dtype(proxy: compat.TensorProxy | compat.FutureTensorProxy) -> str:
    return str(proxy.dtype).removeprefix("thunder.dtypes.").rstrip("_")


def _conditions(
    bound: compat.BoundSymbol, executor: str | None, id_: str | None, stand_in: str | None
) -> frozenset[str]:
    """Names of the conditions that hold, of those that the symbol's rule names."""
    rule = rules.find(executor, id_)
    asked = rule.conditions if rule is not None else (rules.IN_PLACE,)  # it may still be told to write in place
    if id_ is None or not asked:
        return frozenset()
    arguments = _arguments(bound, id_.rsplit(".", 1)[-1], partial(_literal, stand_in=stand_in))
    return frozenset(condition.name for condition in asked if condition.predicate(arguments))


def _arguments(bound: compat.BoundSymbol, name: str, literal: Callable[[Any], Any]) -> Arguments:
    """The arguments of a symbol of this name, as conditions see them."""
    operator = None
    if name.endswith(rules.VJP):
        match bound.args:
            case [([*args], dict() as kwargs), *_]:  # a derivative saves its operator's arguments
                name = name.removesuffix(rules.VJP)
                operator = Arguments(literal(tuple(args)), literal(kwargs))
    return Arguments(
        positional=literal(tuple(bound.args)),
        keywords=literal(bound.kwargs),
        results=literal(bound.output),
        operator=operator,
        positions=rules.positions(bound.sym.meta, name),
    )


def _literal(value: Any, stand_in: str | None) -> Any:
    """The value with records in the place of proxies."""
    match value:
        case compat.TensorProxy():
            sizes = tuple(size if isinstance(size, int) else _RUNTIME_VALUE for size in compat.proxy_shape(value))
            return TensorArgument(sizes, _dtype(value), _device(value, stand_in).split(":")[0])
        case compat.Proxy():
            return _RUNTIME_VALUE
        case dict():
            return {key: _literal(item, stand_in) for key, item in value.items()}
        case list():
            return [_literal(item, stand_in) for item in value]
        case str():
            return value
        case Sequence():
            return tuple(_literal(item, stand_in) for item in value)
    return value


_RUNTIME_VALUE = object()  # equal to nothing else, as predicates may compare it
