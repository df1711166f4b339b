"""Names of Thunder's internals, and what it keeps in underscored attributes. Checked with lightning-thunder 0.2.6."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from itertools import count
from operator import attrgetter
from typing import Any

import thunder
import torch
from thunder import CacheEntry
from thunder.clang import maybe_convert_to_dtype
from thunder.common import transform_to_torch_types
from thunder.core import dtypes, prims
from thunder.core.baseutils import build_callable
from thunder.core.codeutils import SigInfo, module_shortname
from thunder.core.compile_data import get_compile_data
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import int8, is_float_dtype, to_torch_dtype
from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import (
    _general_jit_lookaside_map,
    ensure_recursive_proxies,
    record_source_loc_in_symbol_header,
)
from thunder.core.langctxs import Languages, langctx
from thunder.core.module import ThunderModule
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import (
    AnyProxy,
    CollectionProxy,
    FutureTensorProxy,
    NumberProxy,
    Proxy,
    ProxyTag,
    TensorProxy,
    unvariableify,
    variableify,
)
from thunder.core.pytree import tree_flatten, tree_flatten_with_dataclass, tree_map
from thunder.core.recipe import Plugin, PluginPolicy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, _tracectx, from_trace, tracectx
from thunder.core.trace_interpreter import TraceSubstitutionProcessor
from thunder.core.transform_common import Transform
from thunder.core.transforms import augmented_forward_impls, backward_impls
from thunder.core.update_aliases import insert_alias_updates
from thunder.core.utils import get_computation_dtype
from thunder.distributed import _shard_tensor, get_skip_data_parallel_grad_sync as skips_grad_sync
from thunder.distributed.prims import DistributedReduceOps, PrimIDs as _Communication
from thunder.distributed.transforms import fsdp_v2
from thunder.executors.custom_op_ex import custom_op_ex
from thunder.executors.nvfuserex import nvfuserex
from thunder.executors.passes import _transform_for_operator_executor_execution, del_last_used
from thunder.executors.torch_autograd import connect_to_autograd
from thunder.executors.torch_compile import TorchCompileExecutor
from thunder.executors.torchex import ex as _torch_executor, no_autocast
from thunder.executors.utils import Region
from thunder.extend import (
    FusionExecutor,
    ImplInfo,
    OperatorExecutor,
    TemporaryExecutor,
    get_default_executors,
    get_executor,
    register_executor,
)
from thunder.plugins import register_plugin
from thunder.torch import (
    _copy_ as write_in_place,
    _syms_returning_views,
    _syms_that_may_return_views,
    _torch_to_thunder_function_map,
    _vjp_impl,
    augmented_forward_adaptor,
    autograd_function_apply,
    backward_adaptor,
    meta_adaptor,
    sum as torch_sum,
    to as torch_to,
    where as torch_where,
)
from thunder.transforms.autodiff import _should_recompute_bsym_in_backward
from thunder.transforms.extraction_only_prologue_transform import ExtractionOnlyPrologueTransform
from torch._library.custom_ops import OPDEFS

from thunder_cg.compat.operators import library_names

# Traces

# The trace that is being made on this thread, if any.
current_trace: Callable[[], TraceCtx | None] = partial(_tracectx.get, None)
# The sizes of a tensor proxy: ints, or number proxies where they are known only at run time. ``proxy.shape`` would add
# a symbol to the trace that is being made.
proxy_shape: Callable[[TensorProxy | FutureTensorProxy], tuple[Any, ...]] = attrgetter("_shape")


def requires_grad(proxy: Any) -> bool:
    """Whether the gradient of a proxy is wanted."""
    return bool(getattr(proxy, "requires_grad", False))


def is_detached(proxy: Any) -> bool:
    """Whether a proxy was made under `torch.no_grad`."""
    return ProxyTag.DETACHED_AUTOGRAD_GRAPH in getattr(proxy, "tags", ())


def is_parameter(proxy: Any) -> bool:
    """Whether a proxy stands for a parameter, wherever the traced function gets it from."""
    return ProxyTag.STATIC_MEMORY_LOCATION in getattr(proxy, "tags", ())


class Handle(AnyProxy):
    """Stands in a trace for an object of the run time, which the trace only hands on."""

    def type_string(self) -> str:
        return f"CUDA graph {self._o}"


def bound_functions(symbol: BoundSymbol) -> dict[str, Callable[..., Any]]:
    """The functions that a bound symbol calls, by the names under which the trace's source has them."""
    return symbol._call_ctx or {}


def library_names_of(symbol: BoundSymbol) -> tuple[str, ...]:
    """The names of the operator of ``torch.library`` that a symbol calls, or is the derivative of; () if of none."""
    functions = [*bound_functions(symbol).values()]
    if symbol.sym.executor is custom_op_ex:  # the derivative is a function of Thunder's, which has the operator's name
        functions += [op for op in OPDEFS.values() if symbol.sym.id == f"{op._qualname.replace('::', '_')}_backward"]
    return next(filter(None, map(library_names, functions)), ()) if not symbol.sym.is_fusion else ()


def rebind(symbol: BoundSymbol, functions: dict[str, Callable[..., Any]]) -> BoundSymbol:
    """A copy of the symbol that calls these functions."""
    copy = symbol.from_bsym()
    copy._call_ctx = functions
    return copy


def without_copy(symbol: BoundSymbol) -> BoundSymbol:
    """In the place of a ``copy_`` of a tensor to itself: the same results, with nothing written."""
    alias = _torch_executor.opmap["update_aliases"]
    results = [symbol.output] if isinstance(symbol.output, Proxy) else symbol.output
    return symbol.from_bsym(
        sym=alias, args=(tuple(symbol.flat_proxy_args[:1]),), kwargs={}, output=(*results,), subsymbols=()
    )


def by_device(symbol: BoundSymbol) -> Sequence[BoundSymbol]:
    """An ``update_aliases``, which only gives tensors new names, as one for each device; any other symbol as it is.

    Thunder (0.2.6) takes a copy of a tensor on another device for a view of it.
    """
    if symbol.sym.name != "update_aliases":
        return [symbol]
    names: dict[Any, list[tuple[Proxy, Proxy]]] = {}
    for old, new in zip(symbol.flat_proxy_args, symbol.flat_proxy_outs, strict=True):
        names.setdefault(getattr(old, "device", None), []).append((old, new))
    if len(names) < 2:
        return [symbol]
    return [
        symbol.from_bsym(args=(tuple(old for old, _ in pairs),), output=tuple(new for _, new in pairs), subsymbols=())
        for pairs in names.values()
    ]


# Operators

# Whether the torch executor has a symbol of that name. It has none for derivatives that Thunder writes out.
torch_executor_has: Callable[[str], bool] = _torch_executor.opmap.__contains__


def torch_implementations() -> Mapping[Any, ImplInfo]:
    """What the torch executor has for each symbol but those that communicate, by the symbol's id."""
    return {id_: found for id_, found in _torch_executor.implmap.items() if not isinstance(id_, _Communication)}


def name_of_operator(operator: Any) -> Any:
    """The name that an operator has in traces, given as an object: a symbol, an operator of ``torch.library``, or a
    function of PyTorch's that Thunder knows. Anything else is returned as it is.
    """
    if isinstance(operator, Symbol):
        return f"{operator.executor.name}.{operator.id}" if operator.executor is not None else str(operator.id)
    if names := library_names(operator):
        return names[0]
    if isinstance(operator, Hashable) and (symbol := _torch_to_thunder_function_map.get(operator)) is not None:
        name = str(getattr(symbol, "id", None) or getattr(operator, "__name__", ""))
        return f"torch.{name.rsplit('.', 1)[-1]}"
    return operator


def torch_operators() -> set[str]:
    """The ids of the torch executor's own symbols but those that communicate."""
    communicate = {found.symbol.id for id_, found in _torch_executor.implmap.items() if isinstance(id_, _Communication)}
    return {*_torch_executor.opmap} - communicate


def conversion_of_tensor(symbol: BoundSymbol) -> tuple[TensorProxy, TensorProxy] | None:
    """What a conversion to another type takes and makes; None if the symbol is no conversion of a tensor."""
    while len(symbol.subsymbols) == 1:
        (symbol,) = symbol.subsymbols
    if symbol.sym.id is not PrimIDs.CONVERT_ELEMENT_TYPE or not isinstance(symbol.output, TensorProxy):
        return None
    return symbol.args[0], symbol.output


def computes_nothing(symbol: BoundSymbol) -> bool:
    """Whether it only converts what it takes to another type, or gives it another shape."""
    if symbol.subsymbols:
        return all(map(computes_nothing, symbol.subsymbols))
    return symbol.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE or OpTags.SHAPE_OP in (symbol.sym.tags or ())


def is_exact(narrow: Any, wide: Any) -> bool:
    """Whether each value of one floating-point type is one of the other."""
    if not (is_float_dtype(narrow) and is_float_dtype(wide)):
        return False
    few, many = torch.finfo(to_torch_dtype(narrow)), torch.finfo(to_torch_dtype(wide))
    return many.eps <= few.eps and many.max >= few.max and many.tiny <= few.tiny


def in_torch(
    symbols: Sequence[BoundSymbol],
    inputs: Sequence[Proxy],
    outputs: Sequence[Proxy],
    known: dict[Hashable, Callable[..., Any]],
) -> Callable[..., Any]:
    """A function that runs these symbols with PyTorch's operators, one after the other.

    Args:
        known: such functions. One of them is returned if it differs in the names of values alone, as of equal layers.
    """
    trace = TraceCtx()
    made = [proxy for symbol in symbols for proxy in proxies_made(symbol)]
    taken = {proxy.name for proxy in (*inputs, *made)}
    free = (name for number in count() if (name := f"v{number}") not in taken)
    with tracectx(trace):
        names: dict[Any, Proxy] = {}
        for each in (*inputs, *made):
            if (variable := variableify(each)) not in names:
                names[variable] = each.replace_name(next(free))
        args, results = ([names[variableify(each)] for each in proxies] for proxies in (inputs, outputs))
        trace.args, trace._siginfo = tuple(args), SigInfo("run")
        trace._siginfo.args = [(proxy.name, None) for proxy in args]
        for proxy in args:
            prims.unpack_trivial(proxy, name=proxy.name)
    renamed = [symbol.from_bsym_swap_proxies(names) for symbol in symbols]
    trace.bound_symbols += [*renamed, prims.python_return.bind(tuple(results), output=None)]
    # Thunder's whole pass would look for gradients of data parallelism to put into buckets.
    claimed = del_last_used(_transform_for_operator_executor_execution(trace, [_torch_executor]))
    claimed._provenance = None  # says how long it took
    for each in claimed.bound_symbols:
        each.source_filename = None  # equal layers are at other lines of Dynamo's graph
    source, context = claimed.python(include_decorators=False), claimed.python_ctx()
    key = source, *((name, id(value)) for name, value in context.items())  # the function keeps the values
    if key not in known:
        known[key] = build_callable("run", source, "thunder.run", {**context, "thunder": thunder})
    return known[key]


def proxies_made(symbol: BoundSymbol) -> Iterator[Proxy]:
    """The results of a symbol and of all that it is made of."""
    yield from symbol.flat_proxy_outs
    for inner in symbol.subsymbols:
        yield from proxies_made(inner)


def outside_of_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """As Thunder calls its traces: without gradients and without autocast, whatever the caller has."""
    return no_autocast(torch.no_grad()(function))


_notes: list[Callable[[Any, Any], None]] = []


def before_symbols(note: Callable[[Any, Any], None]) -> None:
    """From now on, a pass over a trace of ours calls ``note(pass, symbol)`` before it processes a symbol."""
    _notes.append(note)
    TraceSubstitutionProcessor.__init_subclass__ = classmethod(_calling_notes)


def _calling_notes(processor: type[Any]) -> None:
    """Thunder defines a pass when it runs it."""
    if not is_ours(get_compile_data()):
        return
    process = processor.process_bsym

    def process_bsym(self: Any, bound: Any) -> None:
        for note in _notes:
            note(self, bound)
        process(self, bound)

    processor.process_bsym = process_bsym


@cache
def keep_effects_once(has_effect: Callable[[BoundSymbol], bool]) -> None:
    """From now on, what has an effect, such as a draw, runs once, also in a checkpointed function.

    Thunder (0.2.6) draws again where the backward computes the function once more.
    """

    def compute_once(processor: Any, bound: Any) -> None:
        recomputes = type(processor).__name__ == "InsertRecomputationsProcessor"
        if recomputes and _should_recompute_bsym_in_backward(bound) and has_effect(bound):
            bound.tags.discard(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
            for proxy in bound.flat_proxy_outs:
                proxy.tags.discard(ProxyTag.RECOMPUTE_IN_BACKWARD)

    before_symbols(compute_once)


# What the ids of symbols end with whose results have no gradient, and what is wrong where a tensor has one.
WITHOUT_GRADIENT = "_without_gradient"
OVERWRITE = "overwrite"  # the id of the symbol that writes without a gradient to what keeps its own
LOST_GRADIENT = (
    "it takes a tensor that has a gradient, which would be lost",
    "call it with x.detach() or under torch.no_grad(), or call the one of torch.distributed._functional_collectives, "
    "whose sums, gathers and exchanges have gradients",
)

in_torchs_language: Any = langctx(Languages.TORCH)  # operators on proxies are PyTorch's inside such a function


def symbols_of_functions() -> dict[Any, Any]:
    """Thunder's symbol for each function of PyTorch that it knows."""
    return _torch_to_thunder_function_map


def constants(values: Any) -> Any:
    """With numbers in the place of proxies of constants, which ``thunder.core.transforms.grad`` passes."""
    return tree_map(lambda x: x.value if isinstance(x, NumberProxy) and x.is_static_constrained() else x, values)


def trace_as(function: Any, replacement: Callable[..., Any]) -> None:
    """Has ``thunder.jit`` trace calls of a function of PyTorch's as calls of another, which gets proxies of tensors."""
    named = wraps(function)(lambda *args, **kwargs: replacement(*args, **kwargs))
    located = record_source_loc_in_symbol_header(named)
    _general_jit_lookaside_map[function] = ensure_recursive_proxies(interpreter_needs_wrap(located))


def call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function, with proxies, where ``thunder.jit`` traces, and does not trace what is inside."""
    return function(*args)


trace_as(call_untraced, call_untraced)


def is_guess(symbol: BoundSymbol) -> bool:
    """Whether it makes a truth value of a number that is known only at run time: Thunder takes the number for false."""
    if symbol.sym.id is not PrimIDs.CONVERT_ELEMENT_TYPE or not isinstance(symbol.output, NumberProxy):
        return False
    number = symbol.args[0]
    return isinstance(number, NumberProxy) and number.value is None and symbol.output.value is not None


def is_ours(data: Any) -> bool:
    """Whether our transform is one of those that something is compiled with."""
    return owns_regions(getattr(data, "transforms", None) or ())


def owns_regions(transforms: Iterable[Any]) -> bool:
    """Whether one of the transforms is ours."""
    return any(getattr(each, "owns_regions", False) for each in transforms)


def is_known_view(function: Any) -> bool:
    """Whether Thunder knows that the function of PyTorch's may return a view of its argument."""
    symbol = _torch_to_thunder_function_map.get(function)
    return symbol in _syms_returning_views or symbol in _syms_that_may_return_views


def run_without_gradients() -> None:
    """Has Thunder (0.2.6) run tensor parallelism also where nothing needs a gradient: it raises there."""

    def forward(differentiated: Callable[..., Any], tensor: TensorProxy, *args: Any) -> TensorProxy:
        result, _ = differentiated(tensor, *args)
        return prims.shallow_copy(result) if result is tensor else result

    for each in (_Communication.SYNCHRONIZE_TENSOR_PARALLEL_INPUT, _Communication.SYNCHRONIZE_TENSOR_PARALLEL_OUTPUT):
        if each not in _torch_executor.implmap:
            differentiated = partial(forward, augmented_forward_impls[each])
            _torch_executor.register_implementation(each, execution_transform=differentiated)


def pad_shards_with_zeros() -> None:
    """Has `fsdp` pad uneven shards with zeros: Thunder (0.2.6) leaves the memory as it is, and norms, weight decay and
    checkpoints of parameters read it.
    """
    thunder.distributed._shard_tensor = fsdp_v2._shard_tensor = _padded_with_zeros


@wraps(_shard_tensor)
def _padded_with_zeros(param: torch.Tensor, rank: int, *args: Any, **options: Any) -> tuple[torch.Tensor, int | None]:
    shard, padding = _shard_tensor(param, rank, *args, **options)
    if padding:
        shard[max(len(param) - rank * len(shard), 0) :] = 0
    return shard, padding


def register_function(
    executor: OperatorExecutor,
    id_: str,
    function: Callable[..., Any],
    *,
    differentiable: bool = True,
    is_kept: bool = False,
    meta: Callable[..., TensorProxy] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Symbol:
    """A new symbol of the executor that calls ``function``, and whose backward calls it again, under autograd.

    Args:
        id_: of the symbol; traces print it behind the executor's name, since a value of the trace may have its name.
        is_kept: also where nothing uses its results.
        meta: makes the proxy of its result, if it takes what Thunder makes no fake arguments of, such as slices.
        backward: computes the gradients of its arguments from them and from the gradient, in place of autograd.
    """

    def register(suffix: str, meta: Callable[..., Any], fn: Callable[..., Any]) -> Symbol:
        name = f"{executor.name}.{id_}{suffix}".replace(".", "_")
        symbol = executor.register_operator(name, meta=meta, tags=[OpTags.DONT_DCE] if is_kept else None, fn=fn)
        return replace(symbol, id=id_ + suffix)

    forward = register("", meta or langctx(Languages.TORCH)(meta_adaptor(function)), function)
    augmented_forward_impls[forward.id] = augmented_forward_adaptor(forward)
    if backward is not None:
        backward_impls[forward.id] = lambda saved, gradient: backward(*saved[0], gradient)
    elif differentiable:
        backward_impls[forward.id] = register("_vjp", backward_adaptor(function), partial(_vjp_impl, function))
    else:
        backward_impls[forward.id] = lambda saved, *gradients: (None,) * len(saved[0])
    return forward


def proxy_like(proxy: TensorProxy, *, requires_grad: bool, shape: Any = None, dtype: Any = None) -> TensorProxy:
    """A new value like another one, but for what is given."""
    return TensorProxy(like=proxy, shape=shape, dtype=dtype, requires_grad=requires_grad)


def symbol_of_function(
    executor: OperatorExecutor, id_: str, name: str, function: Callable[..., Any], results: Callable[..., Any]
) -> Symbol:
    """A symbol that calls ``function``, and that lives as long as the traces that have it.

    Args:
        name: of the symbol in traces, where no other symbol has it.
        results: makes fake tensors like the results.
    """

    def bind(symbol: BoundSymbol) -> None:
        symbol._call_ctx = {name: function}

    meta = langctx(Languages.TORCH)(meta_adaptor(results))
    return Symbol(name, meta, id=id_, is_prim=True, executor=executor, _bind_postprocess=bind)


def with_derivative(
    forward: Callable[..., tuple[Any, Any]], backward: Callable[..., Any], *args: Any
) -> tuple[TensorProxy, ...]:
    """In a trace, what ``forward`` computes of tensors, with ``backward`` for its derivative.

    Args:
        forward: returns the results and what the backward needs.
        backward: gets the gradients of all results and what it needs, and returns one gradient, or None, per argument.
    """
    mask = [True] * len(args)
    results: tuple[TensorProxy, ...] = autograd_function_apply(
        lambda _, *given: forward(*given), lambda _, *given: backward(*given), *args, args_tensor_mask=mask
    )
    return results
