"""Read a Thunder trace once, into frozen records that the rest of the analysis can hold on to.

This is the only module of the analysis that knows Thunder: a new Thunder release that changes traces changes this file.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import thunder
import torch
from thunder.core.proxies import (
    CollectionProxy,
    DictProxy,
    FutureTensorProxy,
    ListProxy,
    NumberProxy,
    Proxy,
    ProxyTag,
    TensorProxy,
    TupleProxy,
)
from thunder.core.pytree import tree_flatten_with_dataclass
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx

__all__ = ["Op", "Ops", "Value", "computing", "read"]

_DROPPED = frozenset({"DEL", "COMMENT"})  # recomputed after the plan is made, and text

_BOOKKEEPING = frozenset(
    {
        "RETURN",
        "CONSTRUCT_TUPLE",
        "DATACLASS_NEW",
        "PACK_ATTR",
        "PACK_BUFFER",
        "PACK_LIST",
        "PACK_SETITEM",
        "PYTHON_VARS",
        "ASSERT_COMPARE",
        "ASSERT_TENSOR_METADATA",
    }
)
_BOOKKEEPING_PREFIXES = ("UNPACK_", "CHECK_")
_PYTHON_BOOKKEEPING = frozenset({"clear_mutable_collection", "construct_tuple", "unpack_list", "unpack_tuple"})


@dataclass(frozen=True, slots=True)
class Value:
    """A proxy of the trace."""

    name: str
    kind: str
    """``"tensor"``, ``"number"``, ``"future"`` (a tensor that a collective is still filling), ``"collection"`` or
    ``"other"``."""
    device: str | None = None
    """``"cpu"``, ``"cuda:0"``, ``"meta"``; None unless tensor or future."""
    nbytes: int = 0
    """Elements times bytes per element; 0 if unknown."""
    symbolic: bool = False
    """A dimension is a number known only at run time."""
    static: bool = False
    """A parameter or buffer of the module: its address outlives the call."""
    dtype: str | None = None
    """Thunder's name of the element type, such as ``"float32"`` or ``"bool8"``; None unless tensor or future."""
    proxy: Any = field(default=None, compare=False, repr=False)
    """The proxy itself, for the transform."""


@dataclass(frozen=True, slots=True)
class Op:
    """A bound symbol of the trace."""

    index: int
    """Position among its siblings, dropped symbols not counted."""
    name: str
    """As the trace prints it: ``"torch.add"``, ``"Tensor.item"``, ``"TorchCompile0"``."""
    executor: str | None
    """None for prims and Thunder's own torch symbols."""
    id: str | None
    """A prim's is its enum name, such as ``"RETURN"``; None for fusions."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    bookkeeping: bool = False
    """Unpacks, collections and the return: the frame around the computation."""
    is_fusion: bool = False
    subs: tuple[Op, ...] = ()
    line: str | None = None
    """``"model.py:12"``, where the user's code called it; None if Thunder does not know."""
    tags: frozenset[str] = frozenset()
    """Names of Thunder's tags on this symbol alone. Most opaque symbols have none: prove nothing from their absence."""
    traits: frozenset[str] = frozenset()
    """What the literal arguments say that the id does not; see `_traits`."""
    keywords: tuple[tuple[str, str], ...] = ()
    """Keyword arguments that are proxies, and the names of those."""
    symbol: Any = field(default=None, compare=False, repr=False)
    """The bound symbol itself, for the transform."""


@dataclass(frozen=True, slots=True)
class Ops:
    """One trace, read once."""

    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    """Every proxy by name, those inside of subsymbols too."""
    args: tuple[str, ...]
    """Names that come from outside: the trace's arguments and whatever unpacks produce from them."""
    near: Mapping[str, Op] = field(default_factory=dict)
    """Of each value, an op whose line is known: the one that made it, or one close to that, or one that uses it."""

    def origin(self, op: Op) -> Op | None:
        """The op whose line says where this one comes from: itself, or one close to it where Thunder has lost that."""
        values = op.inputs if op.bookkeeping else (*op.inputs, *op.outputs)
        return op if op.line else next((self.near[name] for name in values if name in self.near), None)

    def line(self, op: Op) -> str | None:
        """``"file.py:12"`` in the user's source, or ``"near file.py:12"``."""
        origin = self.origin(op)
        return op.line or (f"near {origin.line}" if origin is not None else None)


def read(trace: TraceCtx, static_names: frozenset[str] = frozenset(), forward: Ops | None = None) -> Ops:
    """Reads ``trace`` in one pass; ``del``s and comments are dropped.

    Args:
        trace: A forward or backward trace, as ``transform_trace_post_optimization`` gets it.
        static_names: Names of proxies that the prologue unpacked as parameters or buffers. The proxies' own tags are
            lost on the way through several of Thunder's passes, so they alone are not enough.
        forward: Of a backward trace, its forward: it made what was saved, and the results that gradients come in for.
    """
    reader = _Reader(static_names)
    arguments = reader.names(_proxies((trace.args or (), trace.kwargs or {})))
    ops = reader.ops(trace.bound_symbols)
    unpacked = (name for op in ops if op.bookkeeping for name in op.outputs)
    args = tuple(dict.fromkeys((*arguments, *unpacked)))
    return Ops(ops=ops, values=reader.values, args=args, near=_near(ops, forward))


def _near(ops: Sequence[Op], forward: Ops | None) -> dict[str, Op]:
    """See `Ops.near`."""
    near: dict[str, Op] = {}
    if forward is not None:
        near.update(forward.near)
        results = _results(forward.ops[-1].symbol)
        gradients = next((op.outputs for op in ops if op.inputs == ("cotangents",) and op.outputs), ())
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


def _results(returned: BoundSymbol | None) -> list[str]:
    """Names of the results that a forward trace ties to autograd, in the order of the gradients that come in."""
    data = returned.args[0] if returned is not None and returned.args else None
    flat = data.get("flat_output", ()) if isinstance(data, dict) else ()
    return [result.name if isinstance(result, Proxy) else "" for result in flat]


def computing(trace: TraceCtx) -> Iterator[BoundSymbol]:
    """The symbols of ``trace`` but for its frame, ``del``s and comments."""
    for bound in trace.bound_symbols:
        executor = None if bound.sym.executor is None else str(bound.sym.executor.name)
        if _id(bound.sym) not in _DROPPED and not _is_bookkeeping(executor, _id(bound.sym)):
            yield bound


class _Reader:
    """Collects values by name while it turns bound symbols into ops."""

    def __init__(self, static_names: frozenset[str]) -> None:
        self.static_names = static_names
        self.values: dict[str, Value] = {}

    def ops(self, bound_symbols: Iterable[BoundSymbol]) -> tuple[Op, ...]:
        kept = (b for b in bound_symbols if _id(b.sym) not in _DROPPED)
        return tuple(self.op(index, bound) for index, bound in enumerate(kept))

    def op(self, index: int, bound: BoundSymbol) -> Op:
        symbol = bound.sym
        executor = None if symbol.executor is None else str(symbol.executor.name)
        id_ = _id(symbol)
        return Op(
            index=index,
            name=bound.name_with_module(),
            executor=executor,
            id=id_,
            inputs=self.names(bound.flat_proxy_args),
            outputs=self.names(bound.flat_proxy_outs),
            bookkeeping=_is_bookkeeping(executor, id_),
            is_fusion=bool(symbol.is_fusion),
            subs=self.ops(bound.subsymbols),
            line=_line(bound),
            tags=frozenset(tag.name for tag in symbol.tags or ()),
            traits=frozenset(_traits(bound, id_)),
            keywords=tuple((key, p.name) for key, p in bound.kwargs.items() if isinstance(p, Proxy)),
            symbol=bound,
        )

    def names(self, proxies: Iterable[Proxy]) -> tuple[str, ...]:
        """Their names, each once, in order; registers their values."""
        found: dict[str, None] = {}
        for proxy in proxies:
            found[proxy.name] = None
            if proxy.name not in self.values:
                self.values[proxy.name] = self.value(proxy)
        return tuple(found)

    def value(self, proxy: Proxy) -> Value:
        if not isinstance(proxy, (TensorProxy, FutureTensorProxy)):
            return Value(name=proxy.name, kind=_kind(proxy), proxy=proxy)
        symbolic = any(isinstance(size, NumberProxy) for size in proxy._shape)
        return Value(
            name=proxy.name,
            kind=_kind(proxy),
            device=proxy.device.device_str(),
            nbytes=0 if symbolic else _nbytes(proxy),
            symbolic=symbolic,
            static=proxy.name in self.static_names or ProxyTag.STATIC_MEMORY_LOCATION in proxy.tags,
            dtype=_dtype(proxy),
            proxy=proxy,
        )


def _proxies(tree: Any) -> Iterator[Proxy]:
    leaves, _ = tree_flatten_with_dataclass(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Proxy))


def _id(symbol: Symbol) -> str | None:
    if isinstance(symbol.id, enum.Enum):
        return symbol.id.name
    return None if symbol.id is None else str(symbol.id)


def _is_bookkeeping(executor: str | None, id_: str | None) -> bool:
    if id_ is None:
        return False
    if executor is None:
        return id_ in _BOOKKEEPING or id_.startswith(_BOOKKEEPING_PREFIXES)
    return executor == "python" and (id_ in _PYTHON_BOOKKEEPING or id_.startswith("check_"))


def _kind(proxy: Proxy) -> str:
    match proxy:
        case FutureTensorProxy():
            return "future"
        case TensorProxy():
            return "tensor"
        case NumberProxy():
            return "number"
        case CollectionProxy() | ListProxy() | TupleProxy() | DictProxy():
            return "collection"
        case _:
            return "other"


def _nbytes(proxy: TensorProxy | FutureTensorProxy) -> int:
    count = 1
    for size in proxy._shape:
        count *= int(size)
    return count * int(proxy.dtype.bytes)


def _dtype(proxy: TensorProxy | FutureTensorProxy) -> str:
    return str(proxy.dtype).removeprefix("thunder.dtypes.").rstrip("_")


_THUNDER = os.path.dirname(thunder.__file__) + os.sep  # its lines are nobody's own


def _line(bound: BoundSymbol) -> str | None:
    if bound.source_filename is None or bound.source_positions is None or bound.source_filename.startswith(_THUNDER):
        return None
    return f"{os.path.basename(bound.source_filename)}:{bound.source_positions.lineno}"


# Note [Traits]
# Whether an indexing or a random operator can be captured depends on its arguments as well: ``x[mask]`` asks the GPU
# how many elements are set, ``x[[0, 2]]`` copies the list to the GPU, and a seed makes a new generator on the host.
# Rules are data and see no arguments, so what they need is read here, as words:
#   bool_index               an index tensor is boolean or bytes: the size of the result depends on its contents
#   host_index               an index is a Python list of numbers
#   scalar_index             an index is a 0-dim tensor of an integer, which PyTorch reads on the host
#   number_at_tensor_index   a number is stored where a tensor of indices says
#   tensor_value             the value to fill in is a tensor
#   seeded                   a seed or a generator is given
#   dropout                  a dropout probability other than zero
#   renorm                   max_norm is given, which rewrites the embedding's rows
#   sorter                   a permutation that sorts is given
#   inplace                  the result is to be written over the first tensor
#   sparse                   gradients are to be sparse
#   beyond                   a view may show memory of the storage that is none of the tensor's own elements
#   empty_range              a running minimum or maximum has no elements yet
#   on_cpu                   tensors are on a CPU, where some derivatives have another formula
#   batched                  matrices on a GPU with more than 16 rows or columns come in a batch
#   plan                     a Fourier transform on a GPU, which cuFFT makes a plan for
_INDEXING = frozenset({"__getitem__", "copy_with_setitem_impl", "index_put", "INDEX_PUT", "COPY_WITH_SETITEM"})
_FILLS = frozenset({"index_fill", "index_fill_vjp", "masked_fill", "masked_fill_vjp"})
_STRIDED = frozenset({"as_strided", "as_strided_scatter", "as_strided_vjp", "as_strided_scatter_vjp"})
_PLANNED = frozenset({"stft", *(f"{kind}fft{n}" for kind in ("", "i", "r", "ir", "h", "ih") for n in ("", "2", "n"))})
_SOLVERS = frozenset({"det", "inv_ex", "logdet", "lu_solve", "slogdet", "solve_ex"})
_OTHERS_ON_CPU = frozenset({"median_vjp", "min_vjp", "nanmedian_vjp", "ormqr_vjp"})
_BYTES = frozenset({"bool8", "uint8"})


def _traits(bound: BoundSymbol, id_: str | None) -> Iterator[str]:
    if id_ is None:
        return
    name = id_.rsplit(".", 1)[-1]
    if name in _INDEXING and len(bound.args) > 1:
        yield from _index_traits(bound.args)
    if name in _FILLS and any(isinstance(p, TensorProxy) for p in (*bound.args[-1:], bound.kwargs.get("value"))):
        yield "tensor_value"
    named = _named_arguments(bound, name)
    if named.get("seed") is not None or named.get("generator") is not None:
        yield "seeded"
    if _is_set(named.get("dropout_p")):
        yield "dropout"
    if named.get("max_norm") is not None:
        yield "renorm"
    if named.get("sorter") is not None:
        yield "sorter"
    if _is_set(named.get("inplace")):
        yield "inplace"
    if _is_set(named.get("sparse")):
        yield "sparse"
    if name in _STRIDED and not _stays_inside(named):
        yield "beyond"
    ranges = (named.get("running_min"), named.get("running_max"))
    if any(isinstance(p, TensorProxy) and 0 in p._shape for p in ranges):
        yield "empty_range"
    if name in _OTHERS_ON_CPU and any(_is_on(p, "cpu") for p in _proxies(bound.args)):
        yield "on_cpu"
    on_gpu = [p for p in _proxies((bound.args, bound.output)) if _is_on(p, "cuda")]
    if name.removesuffix("_vjp") in _PLANNED and on_gpu:
        yield "plan"
    if name.removesuffix("_vjp") in _SOLVERS and any(len(p._shape) > 2 and max(p._shape[-2:]) > 16 for p in on_gpu):
        yield "batched"


def _is_on(proxy: Proxy, kind: str) -> bool:
    return isinstance(proxy, TensorProxy) and proxy.device.device_str().split(":")[0] == kind


def _index_traits(args: tuple[Any, ...]) -> Iterator[str]:
    tensors = [p for p in _proxies(args[1]) if isinstance(p, TensorProxy)]
    if any(not p._shape and _dtype(p) not in _BYTES for p in tensors):
        yield "scalar_index"
    if any(_dtype(p) in _BYTES for p in tensors):
        yield "bool_index"
    elif tensors and len(args) > 2 and isinstance(args[2], (int, float, complex)):
        yield "number_at_tensor_index"
    if _has_number_list(args[1]):
        yield "host_index"


def _is_set(number: Any) -> bool:
    """Is a probability other than zero, or a flag other than False?"""
    return number is not None and (isinstance(number, Proxy) or number != 0)


def _stays_inside(named: Mapping[str, Any]) -> bool:
    """Does a strided view show the tensor's own elements only? An offset counts from where its storage begins."""
    match named:
        case {"input": TensorProxy(_shape=shape), "size": [*size], "stride": [*stride]}:
            if named.get("storage_offset") is None and all(isinstance(n, int) for n in (*size, *stride, *shape)):
                return 1 + sum((n - 1) * step for n, step in zip(size, stride)) <= math.prod(shape)
    return False


def _has_number_list(key: Any) -> bool:
    """Is a list (or a tuple inside a tuple) of numbers among the indices, as opposed to plain numbers and slices?"""
    if isinstance(key, list):
        return any(isinstance(k, (int, float, list, tuple)) for k in key)
    nested = key if isinstance(key, tuple) else (key,)
    return any(
        isinstance(k, Sequence)
        and not isinstance(k, (str, Proxy))
        and any(isinstance(i, (int, list, tuple)) for i in k)
        for k in nested
    )


# Arguments that rules are about.
_NAMED = ("seed", "generator", "dropout_p", "max_norm", "sorter", "inplace", "sparse", "input", "size", "stride",
          "storage_offset", "running_min", "running_max")  # fmt: skip
# Where they stand: Thunder wraps most meta functions in a way that hides their signatures, and PyTorch's functions in C
# have none.
_POSITIONS = {
    "EMBEDDING": {"max_norm": 3},
    "EMBEDDING_BACKWARD": {"sparse": 5},
    "MULTINOMIAL": {"seed": 3},
    "as_strided": {"input": 0, "size": 1, "stride": 2, "storage_offset": 3},
    "as_strided_scatter": {"input": 0, "size": 2, "stride": 3, "storage_offset": 4},
    "embedding_backward": {"sparse": 5},
    "fused_moving_avg_obs_fake_quant": {"running_min": 3, "running_max": 4},
    "multinomial": {"seed": 3},
    "multinomial_helper": {"seed": 3},
    "scaled_dot_product_attention": {"dropout_p": 4},
}


def _named_arguments(bound: BoundSymbol, name: str) -> dict[str, Any]:
    """Those of `_NAMED` that are given. A derivative saves what its operator was given."""
    match bound.args:
        case [([*args], dict() as kwargs), *_] if name.endswith("_vjp"):
            name = name.removesuffix("_vjp")
        case _:
            args, kwargs = list(bound.args), bound.kwargs
    found = {argument: args[i] for argument, i in _positions(bound.sym.meta, name) if i < len(args)}
    return found | {argument: kwargs[argument] for argument in _NAMED if argument in kwargs}


@functools.lru_cache(maxsize=4096)
def _positions(meta: Any, name: str) -> tuple[tuple[str, int], ...]:
    """Where the arguments of `_NAMED` stand among the positional ones."""
    found: dict[str, int] = {}
    functions: tuple[Any, ...] = (getattr(torch.nn.functional, name, None), meta)
    for function in functions:
        try:
            parameters = [*inspect.signature(function).parameters]
        except (TypeError, ValueError):  # there is none, or a builtin one
            continue
        found |= {argument: parameters.index(argument) for argument in _NAMED if argument in parameters}
    return tuple((found | _POSITIONS.get(name, {})).items())
