"""Names of Thunder's internals, and what it keeps in underscored attributes. Checked with lightning-thunder 0.2.6."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial, wraps
from operator import attrgetter
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import thunder
import torch
import torch.nn.utils.stateless as stateless
from thunder import CacheEntry
from thunder.clang import maybe_convert_to_dtype
from thunder.common import transform_to_torch_types
from thunder.core import dtypes, prims
from thunder.core.baseutils import build_callable
from thunder.core.codeutils import SigInfo, module_shortname
from thunder.core.compile_data import (
    _compile_data,
    get_compile_data,
    reset_compile_data_and_stats,
    set_compile_data_and_stats,
)
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import is_float_dtype, to_torch_dtype
from thunder.core.interpreter import get_interpreterruntimectx, interpreter_needs_wrap, unwrap
from thunder.core.jit_ext import (
    _general_jit_lookaside_map,
    ensure_recursive_proxies,
    is_created_during_tracing,
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
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, _tracectx, from_trace, tracectx
from thunder.core.transform_common import Transform
from thunder.core.transforms import augmented_forward_impls, backward_impls
from thunder.core.update_aliases import insert_alias_updates
from thunder.core.utils import get_computation_dtype
from thunder.distributed import _shard_tensor, get_skip_data_parallel_grad_sync as skips_grad_sync
from thunder.distributed.prims import DistributedReduceOps, PrimIDs as _Communication
from thunder.distributed.transforms import fsdp_v2
from thunder.executors.nvfuserex import nvfuserex
from thunder.executors.passes import _transform_for_operator_executor_execution, del_last_used
from thunder.executors.torch_autograd import connect_to_autograd
from thunder.executors.torch_compile import TorchCompileExecutor
from thunder.executors.torchex import ex as _torch_executor, no_autocast
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
from thunder.transforms.autocast import autocast_impls
from torch.utils import _pytree as torch_pytree

from thunder_cg.compat.torch import library_names
from thunder_cg.errors import FunctionalCallError

_THUNDER = os.path.join(os.path.dirname(thunder.__file__), "")

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


class Handle(AnyProxy):
    """Stands in a trace for an object of the run time, which the trace only hands on."""

    def type_string(self) -> str:
        return f"CUDA graph {self._o}"


def bound_functions(symbol: BoundSymbol) -> dict[str, Callable[..., Any]]:
    """The functions that a bound symbol calls, by the names under which the trace's source has them."""
    return symbol._call_ctx or {}


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


def compilation_began() -> float:
    """When Thunder began the compilation that runs on this thread, in seconds of ``time.perf_counter``; now if none."""
    _, stats = _compile_data.get()
    return float(stats.last_trace_tracing_start) / 1e9 if stats is not None else time.perf_counter()


def leftover_autocast(trace: TraceCtx) -> tuple[BoundSymbol, torch.dtype] | None:
    """The first cast of autocast that an earlier call was under, and its dtype: Thunder (0.2.6) never ends that one.

    Casts of Thunder's own are no operators of PyTorch's. Those of an autocast inside of the function count, too.
    """
    kept = get_compile_data().autocast_stack.get_dtype_for_device_if_enabled
    left = {kind: dtype for kind in ("cpu", "cuda") if not torch.is_autocast_enabled(kind) and (dtype := kept(kind))}
    for symbol in trace.bound_symbols if left else ():
        made = symbol.output if symbol.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE else None
        if isinstance(made, TensorProxy) and left.get(made.device.type) == made.dtype:
            return symbol, to_torch_dtype(made.dtype)
    return None


def end_autocast(trace: TraceCtx) -> None:
    """Ends the autocast around a call if operators in the trace, in which all is cast by now, are not to be cast.

    Thunder (0.2.6) would cast those, too, where it differentiates them, and raise.
    """
    stack = get_compile_data().autocast_stack
    candidates = (s for s in trace.bound_symbols if s.sym.id in autocast_impls) if not stack.is_empty() else ()
    tensors = (proxy for symbol in candidates for proxy in symbol.flat_proxy_args if isinstance(proxy, TensorProxy))
    if any(tensor.dtype == dtypes.float32 for tensor in tensors):
        stack.stack.clear()


def compiled_entries() -> Sequence[CacheEntry]:
    """What Thunder has compiled before of the function that is being compiled on this thread, oldest first."""
    _, stats = _compile_data.get()
    return stats.interpreter_cache if stats is not None else ()


def compile_phase(statistics: Any) -> str:
    """What Thunder does of the compilation under way, by the statistics of what is compiled. Any thread may ask."""
    is_traced = statistics.last_trace_tracing_stop > statistics.last_trace_tracing_start
    return "Thunder transforms the trace" if is_traced else "Thunder traces it"


# Compiled modules

# The module that was given to ``thunder.jit``.
original_module: Callable[[ThunderModule], torch.nn.Module] = attrgetter("_model")
# The dictionaries in which a compiled module looks parameters and buffers up.
module_parameters: Callable[[ThunderModule], dict[str, torch.nn.Parameter]] = attrgetter("_overrides_parameters")
module_buffers: Callable[[ThunderModule], dict[str, torch.Tensor]] = attrgetter("_overrides_buffers")
# The submodules that a compiled module has looked up, by name.
module_cache: Callable[[ThunderModule], dict[str, torch.nn.Module]] = attrgetter("_module_cache")
# Counts and cache entries of a compiled module: ``calls``, ``cache_hits``, ``interpreter_cache``, ``last_*``.
compile_stats: Callable[[ThunderModule], Any] = attrgetter("_lc_cs")
# The options that a module was compiled with: ``cache_option``, ``compile_options``.
compile_data: Callable[[ThunderModule], Any] = attrgetter("_lc_cd")
# The function that a compiled module calls in its forward: Thunder's dispatch, or what was put in its place.
dispatch_of: Callable[[ThunderModule], Callable[..., Any]] = attrgetter("_forward_fn")


def changed_since_compiled(module: ThunderModule) -> dict[str, list[str]]:
    """What was set after Thunder compiled a module, and calls do not see.

    Returns:
        Two lists of names: attributes of the model that the compiled module has besides; and parts of the model that
        are others now: submodules, buffers, hooks, and parameters if no other transform has a say in these.
    """
    model = original_module(module)
    mine, its = ({*vars(each), *each._modules, *each._parameters, *each._buffers} for each in (module, model))
    now = dict(model.named_modules())
    before: ModelParts = getattr(dispatch_of(module), "parts", None) or ModelParts.of(model)
    others = [name for name in {**before.modules, **now} if before.modules.get(name) is not now.get(name)]
    others += [name for name, each in model.named_buffers() if before.buffers.get(name) is not each]
    hooks = before.hooks
    hooked = [name for name, each in now.items() if _hooks_of(each) != hooks.get(name, _hooks_of(each))]
    others += [f"{name}._forward_hooks".lstrip(".") for name in hooked]
    if has_parameters_of(module, model):
        known = module_parameters(module)
        others += [name for name, p in model.named_parameters() if name in known and known[name] is not p]
    outer = [name for name in others if not any(name.startswith(f"{other}.") for other in others)]
    attributes = set() if isinstance(model, ThunderModule) else (mine & its) - vars(torch.nn.Module()).keys()
    return {"attributes": sorted(attributes), "parts": outer}


class ModelParts(NamedTuple):
    """What a model has besides parameters, by name: hooks by numbers, of each submodule. It keeps nothing alive."""

    modules: WeakValueDictionary[str, torch.nn.Module]
    buffers: WeakValueDictionary[str, torch.Tensor]
    hooks: dict[str, list[int]]

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelParts:
        """Those that there are now."""
        hooks = {name: _hooks_of(each) for name, each in model.named_modules()}
        return cls(WeakValueDictionary(model.named_modules()), WeakValueDictionary(model.named_buffers()), hooks)


def _hooks_of(module: torch.nn.Module) -> list[int]:
    """Those around its forward, which Thunder traces."""
    return [*module._forward_hooks, *module._forward_pre_hooks]


def hooks_on_gradients(fn: Any) -> list[str]:
    """The submodules of a module with hooks on their gradients, which Thunder does not call."""
    modules = fn.named_modules() if isinstance(fn, torch.nn.Module) else ()
    return [name for name, each in modules if each._backward_hooks or each._backward_pre_hooks]


def has_parameters_of(module: ThunderModule, model: torch.nn.Module) -> bool:
    """Whether a compiled module's parameters are those that its model had then, as no other transform changes them."""
    return len(compile_data(module).transforms) == 1 and not is_data_parallel(model)


def is_data_parallel(model: torch.nn.Module) -> bool:
    """Whether Thunder's ddp or fsdp has the model's parameters."""
    return bool(getattr(model, "use_ddp", False) or getattr(model, "use_fsdp", False))


def set_dispatch(module: ThunderModule, forward: Callable[..., Any]) -> None:
    """Puts another function in the place of the one that a compiled module calls."""
    module._forward_fn = forward


class _CompileScope:
    """Thunder's ``compile_data_and_stats``, inside of which it compiles, or asks what it has compiled."""

    __slots__ = ("_compiling", "_data", "_statistics", "_token")
    raised: Callable[[Any, Any, Exception], None]
    compiling: Callable[[Any, Any], AbstractContextManager[None]]

    def __init__(self, data: Any, statistics: Any, /) -> None:
        self._data, self._statistics = data, statistics

    def __enter__(self) -> None:
        self._token = set_compile_data_and_stats(self._data, self._statistics)
        compiles = self._statistics.last_trace_cache_stop > self._statistics.last_trace_cache_start
        self._compiling = None
        if compiles and is_ours(self._data):
            self._compiling = type(self).compiling(self._data, self._statistics)
            self._compiling.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if self._compiling is not None:
            self._compiling.__exit__(None, None, None)
        reset_compile_data_and_stats(self._token)
        if isinstance(error, Exception) and is_ours(self._data):
            type(self).raised(self._data, self._statistics, error)


def on_compile(
    compiling: Callable[[Any, Any], AbstractContextManager[None]], raised: Callable[[Any, Any, Exception], None]
) -> None:
    """Has Thunder compile what is ours inside of a context, and a function called with what it raises there.

    Args:
        compiling: makes the context, of Thunder's data and statistics of what it compiles. Thunder enters one while it
            traces, and another one while it transforms the trace.
        raised: gets the data and the statistics, and the error.
    """
    _CompileScope.compiling, _CompileScope.raised = staticmethod(compiling), staticmethod(raised)
    thunder.compile_data_and_stats = _CompileScope


def computation_and_inputs(function: Any, args: Any, kwargs: Any) -> tuple[CacheEntry, Sequence[Any]]:
    """The cache entry that a compiled function has for a call, compiled if need be, and what its computation gets."""
    entry, inputs, _ = function._lc_cd.get_computation_and_inputs(*args, **kwargs)
    return entry, inputs


def drop_self_reference(function: Callable[..., Any]) -> None:
    """Takes a function that Thunder built out of its own globals: the cycle would keep all that it names alive."""
    inner = inspect.unwrap(function)
    inner.__globals__.pop(inner.__name__, None)


def drop_self_references(entry: CacheEntry) -> None:
    """`drop_self_reference` for all functions of a cache entry, so that the entry is freed by reference counting."""
    for function in (entry.prologue_fn, entry.computation_fn, entry.backward_fn, entry.epilogue_fn):
        if function is not None:
            drop_self_reference(function)


def compile_only(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has Thunder compile for these arguments, as a call does if it must. Only the prologue's checks run."""
    compile_data(jitted).get_computation_and_inputs(*args, **kwargs)


OPTIONS = frozenset(inspect.signature(thunder.jit).parameters) - {"fn", "compile_options"} | {
    *("auto_recompute_intermediates", "cudnn_sdpa_bwd_may_cat_grad_qkv", "disable_inplace_copy_check"),
    *("disable_replace_uniform", "early_transforms", "executors_list", "fusion_type", "is_differentiable_outputs"),
    *("nv_disable_options", "nv_enable_embedding", "nv_enable_linear", "nv_enable_matmul", "nv_enable_options"),
    *("nv_enable_scatter", "nv_enable_sdpa", "nv_enable_shape_only_fusion", "nv_save_fake_inputs", "nv_skip_cache"),
    *("nv_store_fusion_inputs", "sdpa_debug", "skip_inplace_alias_updates", "thunderfx_disable_split_autograd"),
    *("torch_compile_fullgraph", "use_apex_cross_entropy", "use_cudagraphs"),
}  # names of the options of ``thunder.jit``, and of those that Thunder and its executors ask for


def options_of(jitted: Any) -> dict[str, Any]:
    """The options that ``thunder.jit`` had been given, but for ``transforms``."""
    data = compile_data(jitted)
    return {
        "executors": [each for each in data.executors_list if not isinstance(each, TemporaryExecutor)],
        "cache": data.cache_option,
        "sharp_edges": data.sharp_edges,
        "disable_torch_autograd": data.disable_torch_autograd_support,
        "debug_options": data.debug_options,
        **data.compile_options,
    }


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


def is_exact(narrow: Any, wide: Any) -> bool:
    """Whether each value of one floating-point type is one of the other."""
    if not (is_float_dtype(narrow) and is_float_dtype(wide)):
        return False
    few, many = torch.finfo(to_torch_dtype(narrow)), torch.finfo(to_torch_dtype(wide))
    return many.eps <= few.eps and many.max >= few.max and many.tiny <= few.tiny


def in_torch(symbols: Sequence[BoundSymbol], inputs: Sequence[Proxy], outputs: Sequence[Proxy]) -> Callable[..., Any]:
    """A function that runs these symbols with PyTorch's operators, one after the other."""
    trace = TraceCtx()
    trace.args = tuple(inputs)
    trace._siginfo = SigInfo("run")
    trace._siginfo.args = [(proxy.name, None) for proxy in inputs]
    inside = [each for symbol in symbols for each in (symbol, *symbol.subsymbols)]
    trace.names = {proxy.name for proxy in (*inputs, *(p for each in inside for p in each.flat_proxy_outs))}
    with tracectx(trace):
        for proxy in inputs:
            prims.unpack_trivial(proxy, name=proxy.name)
    trace.bound_symbols += [*symbols, prims.python_return.bind(tuple(outputs), output=None)]
    # Thunder's whole pass would look for gradients of data parallelism to put into buckets.
    claimed = _transform_for_operator_executor_execution(trace, [_torch_executor])
    return del_last_used(claimed).python_callable(include_decorators=False)


def outside_of_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """As Thunder calls its traces: without gradients and without autocast, whatever the caller has."""
    return no_autocast(torch.no_grad()(function))


# What the ids of symbols end with whose results have no gradient, and what is wrong where a tensor has one.
WITHOUT_GRADIENT = "_without_gradient"
LOST_GRADIENT = (
    "it takes a tensor that has a gradient, which would be lost",
    "call it with x.detach() or under torch.no_grad(), or call the one of torch.distributed._functional_collectives, "
    "whose sums, gathers and exchanges have gradients",
)

in_torchs_language: Any = langctx(Languages.TORCH)  # operators on proxies are PyTorch's inside such a function


def symbol_of(function: Callable[..., Any]) -> Symbol:
    """Thunder's symbol for a function of PyTorch."""
    symbol: Symbol = _torch_to_thunder_function_map[function]
    return symbol


def symbols_of_functions() -> dict[Any, Any]:
    """Thunder's symbol for each function of PyTorch that it knows."""
    return _torch_to_thunder_function_map


def trace_as(function: Any, replacement: Callable[..., Any]) -> None:
    """Has ``thunder.jit`` trace calls of a function of PyTorch's as calls of another, which gets proxies of tensors."""
    named = wraps(function)(lambda *args, **kwargs: replacement(*args, **kwargs))
    located = record_source_loc_in_symbol_header(named)
    _general_jit_lookaside_map[function] = ensure_recursive_proxies(interpreter_needs_wrap(located))


def is_guess(symbol: BoundSymbol) -> bool:
    """Whether it makes a truth value of a number that is known only at run time: Thunder takes the number for false."""
    if symbol.sym.id is not PrimIDs.CONVERT_ELEMENT_TYPE or not isinstance(symbol.output, NumberProxy):
        return False
    number = symbol.args[0]
    return isinstance(number, NumberProxy) and number.value is None and symbol.output.value is not None


def mark_aliases_with(mark: Callable[[TraceCtx, TraceCtx, list[list[int]]], TraceCtx]) -> None:
    """Has another function than Thunder's rename what shares memory with what is written, where ours captures graphs.

    It gets the prologue, the trace, and Thunder's positions of arguments that share a storage.
    """

    def insert(trace: TraceCtx, groups: list[list[int]]) -> TraceCtx:
        compiling = sys._getframe(1).f_locals
        if not owns_regions(compiling["transforms"]):
            return insert_alias_updates(trace, groups)
        return mark(compiling["prologue_trc"], trace, groups)

    thunder.insert_alias_updates = insert


def connect_with(connect: Callable[[CacheEntry, dict[str, Any]], None]) -> None:
    """Has Thunder tie the results of all calls to autograd by a function that gets the cache entry, too."""

    def connect_result(**arguments: Any) -> None:
        connect(sys._getframe(1).f_locals["cache_entry"], arguments)

    thunder.connect_to_autograd = connect_result


def arguments_of_compilation() -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of the call that Thunder compiles for on this thread, which it tells no transform."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "get_computation_and_inputs" and frame.f_globals is thunder.__dict__:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    return None


Change = tuple[str, Sequence[tuple[str, int]]]  # what it is, and the stack: files and lines, the innermost last
_assign = _general_jit_lookaside_map[setattr]
_assignments: WeakKeyDictionary[Any, list[Change]] = WeakKeyDictionary()  # of compilations: the attributes
_changes: WeakKeyDictionary[Any, list[Change]] = WeakKeyDictionary()  # the methods that change a container
_calls: WeakKeyDictionary[Any, list[Change]] = WeakKeyDictionary()  # functions with another result in each call


def _note_assignment(owner: Any, name: Any, value: Any) -> Any:
    """Thunder's assignment of an attribute, which it repeats in few calls if the owner is a module."""
    if isinstance(unwrap(owner), torch.nn.Module) and not is_created_during_tracing(owner.provenance):
        _note(_assignments, unwrap(name))
    return _assign(owner, name, value)


_general_jit_lookaside_map[setattr] = _note_assignment


def note_change(method: str) -> None:
    """Notes that the Python code changes a container of its caller's, which Thunder does while it traces."""
    _note(_changes, method)


def note_call(function: str) -> None:
    """Notes a call of a clock and the like, which Thunder calls while it traces. Its own dispatch calls one, too."""
    frames = get_interpreterruntimectx().frame_stack
    if not (frames and frames[-1].code.co_filename.startswith(_THUNDER)):
        _note(_calls, function)


def _note(changes: WeakKeyDictionary[Any, list[Change]], name: str) -> None:
    _, stats = _compile_data.get()
    if stats is not None:
        frames = [frame for frame in get_interpreterruntimectx().frame_stack if frame.positions is not None]
        stack = [(frame.code.co_filename, frame.positions.lineno) for frame in frames]
        changes.setdefault(stats, []).append((name, stack))


def lost_assignments(epilogue: TraceCtx | None) -> list[Change]:
    """Assignments of the compilation on this thread, to attributes of modules, that no call repeats.

    Args:
        epilogue: the trace of what each call assigns.
    """
    _, stats = _compile_data.get()
    packs = (PrimIDs.PACK_ATTR, PrimIDs.PACK_BUFFER)
    symbols = epilogue.bound_symbols if epilogue is not None else ()
    names = [str(symbol.args[1]) for symbol in symbols if symbol.sym.id in packs]
    # Thunder (0.2.6) calls a buffer of the compiled module itself ".name", which there is not.
    kept = {name.rpartition(".")[2] for name in names if not name.startswith(".")}
    return [each for each in _assignments.pop(stats, ()) if each[0] not in kept]


def lost_changes() -> list[Change]:
    """Changes of the caller's containers in the compilation on this thread, which no call repeats."""
    return _changes.pop(_compile_data.get()[1], [])


def lost_calls() -> list[Change]:
    """Calls of clocks and the like in the compilation on this thread, which no call repeats."""
    return _calls.pop(_compile_data.get()[1], [])


_functional_call = stateless._functional_call


@wraps(_functional_call)
def _refuse_functional_call(module: torch.nn.Module, parameters_and_buffers: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuses to give other parameters to a module that something of ours is compiled in."""
    for name, each in module.named_modules():
        if not isinstance(each, ThunderModule) or not is_ours(compile_data(each)):
            continue
        if any(key == name or key.startswith(f"{name}." if name else "") for key in parameters_and_buffers):
            raise FunctionalCallError(original_module(each))
    return _functional_call(module, parameters_and_buffers, *args, **kwargs)


stateless._functional_call = _refuse_functional_call


NAME = "thunder_cg.name"  # in the `meta` of a graph of Dynamo's that our `thunderfx` compiles: what the report calls it


def has_pytorchs_numbers(data: Any) -> bool:
    """Whether what is compiled has to compute what PyTorch does where uncaptured Thunder does not: in `thunderfx`."""
    return is_ours(data) and isinstance(data.fn, torch.fx.GraphModule) and NAME in data.fn.meta


def is_ours(data: Any) -> bool:
    """Whether our transform is one of those that something is compiled with."""
    return owns_regions(getattr(data, "transforms", None) or ())


def owns_regions(transforms: Iterable[Any]) -> bool:
    """Whether one of the transforms is ours."""
    return any(getattr(each, "owns_regions", False) for each in transforms)


def constant_results(epilogue: TraceCtx | None) -> list[str]:
    """Where in the result of all calls there is a tensor that was there when Thunder traced."""
    returned = [s for s in epilogue.bound_symbols if s.sym.id is PrimIDs.RETURN] if epilogue is not None else []
    paths = [torch_pytree.tree_flatten_with_path(symbol.args)[0] for symbol in returned]
    return [torch_pytree.keystr(path[1:]) for found in paths for path, leaf in found if isinstance(leaf, torch.Tensor)]


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
    executor: OperatorExecutor, id_: str, function: Callable[..., Any], *, differentiable: bool = True
) -> Symbol:
    """A new symbol of the executor that calls ``function``, and whose backward calls it again, under autograd.

    Args:
        id_: of the symbol; traces print it behind the executor's name, since a value of the trace may have its name.
    """

    def register(suffix: str, meta: Callable[..., Any], fn: Callable[..., Any]) -> Symbol:
        name = f"{executor.name}.{id_}{suffix}".replace(".", "_")
        symbol = executor.register_operator(name, meta=meta, fn=fn)
        return replace(symbol, id=id_ + suffix)

    forward = register("", langctx(Languages.TORCH)(meta_adaptor(function)), function)
    augmented_forward_impls[forward.id] = augmented_forward_adaptor(forward)
    if differentiable:
        backward_impls[forward.id] = register("_vjp", backward_adaptor(function), partial(_vjp_impl, function))
    else:
        backward_impls[forward.id] = lambda saved, *gradients: (None,) * len(saved[0])
    return forward


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
