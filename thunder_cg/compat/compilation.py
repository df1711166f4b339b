"""The compilation that Thunder has under way, and what it does once that no call repeats. Checked with 0.2.6."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import thunder
import torch
from thunder import CacheEntry
from thunder.core import update_aliases
from thunder.core.compile_data import (
    _compile_data,
    get_compile_data,
    reset_compile_data_and_stats,
    set_compile_data_and_stats,
)
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import is_float_dtype, to_torch_dtype
from thunder.core.interpreter import InterpreterError, get_interpreterruntimectx, unwrap
from thunder.core.jit_ext import _general_jit_lookaside_map, is_created_during_tracing
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.transforms.autocast import autocast_impls
from torch.utils import _pytree as torch_pytree

from thunder_cg.compat.thunder import is_ours, owns_regions

_THUNDER = os.path.join(os.path.dirname(thunder.__file__), "")


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
        output = symbol.output if symbol.sym.id is PrimIDs.CONVERT_ELEMENT_TYPE else None
        if isinstance(output, TensorProxy) and left.get(output.device.type) == output.dtype:
            return symbol, to_torch_dtype(output.dtype)
    return None


def end_autocast(trace: TraceCtx) -> None:
    """Ends the autocast around a call if operators in the trace, in which all is cast by now, are not to be cast.

    Thunder (0.2.6) would cast those, too, where it differentiates them, and raise.
    """
    stack = get_compile_data().autocast_stack
    candidates = (s for s in trace.bound_symbols if s.sym.id in autocast_impls) if not stack.is_empty() else ()
    tensors = (proxy for symbol in candidates for proxy in symbol.flat_proxy_args if isinstance(proxy, TensorProxy))
    kept = stack.get_dtype_for_device_if_enabled
    if any(is_float_dtype(tensor.dtype) and tensor.dtype != kept(tensor.device.type) for tensor in tensors):
        stack.stack.clear()


def compiled_entries() -> Sequence[CacheEntry]:
    """What Thunder has compiled before of the function that is being compiled on this thread, oldest first."""
    _, stats = _compile_data.get()
    return stats.interpreter_cache if stats is not None else ()


def compile_phase(statistics: Any) -> str:
    """What Thunder does of the compilation under way, by the statistics of what is compiled. Any thread may ask."""
    is_traced = statistics.last_trace_tracing_stop > statistics.last_trace_tracing_start
    return "Thunder transforms the trace" if is_traced else "Thunder traces it"


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
        if isinstance(error, InterpreterError) and isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None  # whoever goes on after an error of Thunder's would not end
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


def mark_aliases_with(mark: Callable[[TraceCtx, TraceCtx, list[list[int]]], TraceCtx]) -> None:
    """Has another function than Thunder's rename what shares memory with what is written, where ours captures graphs.

    It gets the prologue, the trace, and Thunder's positions of arguments that share a storage.
    """

    def insert(trace: TraceCtx, groups: list[list[int]]) -> TraceCtx:
        compiling = sys._getframe(1).f_locals
        if not owns_regions(compiling["transforms"]):
            return update_aliases.insert_alias_updates(trace, groups)
        return mark(compiling["prologue_trc"], trace, groups)

    thunder.insert_alias_updates = insert


def know_views_by(makes_views: Callable[[BoundSymbol], bool]) -> None:
    """Has Thunder take more for views than its table (0.2.6) does, which lacks ``x.mT``, where ours captures graphs."""
    known = update_aliases._is_view_creation_op

    def is_view(symbol: BoundSymbol) -> bool:
        return known(symbol) or (is_ours(get_compile_data()) and makes_views(symbol))

    update_aliases._is_view_creation_op = is_view


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
# Of compilations: attributes, methods that change a container, and functions with another result in each call.
_lost: WeakKeyDictionary[Any, dict[str, list[Change]]] = WeakKeyDictionary()


def _note_assignment(owner: Any, name: Any, value: Any) -> Any:
    """Thunder's assignment of an attribute, which it repeats in few calls if the owner is a module."""
    if isinstance(unwrap(owner), torch.nn.Module) and not is_created_during_tracing(owner.provenance):
        note_lost("assignments", unwrap(name))
    return _assign(owner, name, value)


_general_jit_lookaside_map[setattr] = _note_assignment


def note_call(function: str) -> None:
    """Notes a call of a clock and the like, which Thunder calls while it traces. Its own dispatch calls one, too."""
    frames = get_interpreterruntimectx().frame_stack
    if not (frames and frames[-1].code.co_filename.startswith(_THUNDER)):
        note_lost("calls", function)


def note_lost(kind: str, name: str) -> None:
    """Notes one of the "assignments", "changes", "calls" or "absent" attributes that `lost_changes` finds."""
    _, stats = _compile_data.get()
    if stats is not None:
        frames = [frame for frame in get_interpreterruntimectx().frame_stack if frame.positions is not None]
        stack = [(frame.code.co_filename, frame.positions.lineno) for frame in frames]
        _lost.setdefault(stats, {}).setdefault(kind, []).append((name, stack))


def lost_changes(epilogue: TraceCtx | None, *, inputs: Container[str] | None) -> dict[str, list[Change]]:
    """What no call repeats of what the compilation on this thread has done: "assignments" to attributes of modules,
    "changes" of the caller's containers, and "calls" of clocks and the like. Attributes of tensors that it has missed:
    "absent". And "refused" assignments to buffers: the next call raises, as Thunder traces with what the buffer was.

    Args:
        epilogue: the trace of what each call assigns.
        inputs: names of tensors that are none of the results, which all require a gradient; None without a backward.
    """
    lost = _lost.pop(_compile_data.get()[1], {})
    packs = (PrimIDs.PACK_ATTR, PrimIDs.PACK_BUFFER)
    symbols = [symbol for symbol in (epilogue.bound_symbols if epilogue is not None else ()) if symbol.sym.id in packs]
    # Thunder (0.2.6) calls a buffer of the compiled module itself ".name", which there is not.
    kept = {str(symbol.args[1]): symbol for symbol in symbols if not str(symbol.args[1]).startswith(".")}
    refused = {name for name, each in kept.items() if each.sym.id is PrimIDs.PACK_BUFFER and _differs(each, inputs)}
    attributes, buffers = ({name.rpartition(".")[2] for name in names} for names in (kept, refused))
    assigned = lost.get("assignments", [])
    lost["assignments"] = [each for each in assigned if each[0] not in attributes]
    lost["refused"] = [each for each in assigned if each[0] in buffers]
    return lost


def _differs(pack: BoundSymbol, inputs: Container[str] | None) -> bool:
    """Whether a buffer is gone after its assignment, has another shape, dtype or device, or requires a gradient."""
    _, name, value = pack.args
    module = get_compile_data().fn
    before = module.get_buffer(name) if isinstance(module, torch.nn.Module) else None
    if not isinstance(before, torch.Tensor) or not isinstance(value, TensorProxy):
        return isinstance(before, torch.Tensor) and value is None
    is_computed = inputs is not None and (value.requires_grad or value.name not in inputs)
    after = (tuple(value.shape), to_torch_dtype(value.dtype), to_torch_device(value.device))
    return (is_computed and before.is_floating_point()) or after != (tuple(before.shape), before.dtype, before.device)


def constant_results(epilogue: TraceCtx | None) -> list[str]:
    """Where in the result of all calls there is a tensor that was there when Thunder traced."""
    returned = [s for s in epilogue.bound_symbols if s.sym.id is PrimIDs.RETURN] if epilogue is not None else []
    paths = [torch_pytree.tree_flatten_with_path(symbol.args)[0] for symbol in returned]
    return [torch_pytree.keystr(path[1:]) for found in paths for path, leaf in found if isinstance(leaf, torch.Tensor)]
