"""Has Dynamo trace a compiled function in ways of its own. Checked with PyTorch 2.11.

Dynamo asks functions and tables of its modules, which are replaced while it compiles something of that function. Other
functions are not affected, since Dynamo compiles under one lock.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch._C import DispatchKey
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo import cache_size, config, convert_frame, guards, pgo
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.variables import ConstantVariable, TensorVariable, builder, misc
from torch.utils._sympy.symbol import SymT, symbol_is_type

from thunder_cg.compat.dynamo_hooks import Hook, leaving_moved_hooks
from thunder_cg.compat.dynamo_records import DynamoBreak
from thunder_cg.compat.thunder import connect_to_autograd

_LOG_METHODS = re.compile(r"(debug|info|warning|warn|error|critical|fatal|log)(_once|_advice)?")  # they return None
_call_method_of_logger = misc.LoggingLoggerVariable.call_method
_wrap_symfloat = builder.VariableBuilder.wrap_symfloat
_method_item = TensorVariable.method_item
_has_same_id_matched_objs = cache_size._has_same_id_matched_objs
_recompilation_reasons = guards.get_and_maybe_log_recompilation_reasons

# Files of the nodes in autograd's graph. A ``torch.autograd.grad`` at a graph break runs them under Dynamo's eyes.
_FASTPATH = Path(__file__).parents[1] / "fastpath"
_OF_NODES = {inspect.getfile(inspect.unwrap(connect_to_autograd)), *map(str, _FASTPATH.glob("*.py"))}
_DECOMPOSED = DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd
_LEAVE = ConvertFrameReturn(_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT), apply_to_code=False)
_SKIP = ConvertFrameReturn(_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP), apply_to_code=False)


def dynamo_callback(fn: Any) -> Any | None:
    """What Dynamo calls for a new frame: a compiled module keeps it in an attribute, a function in its closure."""
    if isinstance(fn, torch.nn.Module):
        return getattr(getattr(fn, "dynamo_ctx", None), "callback", None)
    return inspect.getclosurevars(fn).nonlocals.get("callback") if inspect.isfunction(fn) else None


def scope_dynamo(function: Any, is_moved: Callable[[Hook], bool], left: dict[CodeType, DynamoBreak]) -> None:
    """Has Dynamo trace a compiled function in these ways.

    Sizes, floats and integers, those of modules too, are dynamic by this function's calls alone, floats are constant at
    first, calls of loggers are made after the graph, the limit of recompilations counts the versions of this function
    alone, and nothing is compiled of a backward, nor of a function with hooks that Dynamo would move.

    Args:
        is_moved: says so of a hook.
        left: gets the functions of which nothing is compiled, and why.
    """
    callback = dynamo_callback(function)
    convert = getattr(callback, "_torchdynamo_orig_backend", None)
    if callback is None or convert is None:
        return
    history, backend = _SizeHistory(), callback
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend

    def convert_scoped(frame: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
        if frame.f_code.co_filename in _OF_NODES:
            return _SKIP
        if frame.f_code in left:
            return _LEAVE
        moved: list[DynamoBreak] = []
        with (
            history.in_use(),
            patch.object(misc.LoggingLoggerVariable, "call_method", _log_after_graph),
            _floats_constant_at_first(),
            _reading_constants(),
            _returning_what_is_not_dropped(),
            _counting_versions_of(backend),
            _own_reasons_first(),
            leaving_moved_hooks(is_moved, moved),
            config.patch(allow_unspec_int_on_nn_module=True),
        ):
            result = convert(frame, *args, skip=skip + 1, **kwargs)
        if not moved or result.guarded_code is not None:
            return result
        left[frame.f_code] = moved[-1]
        return _LEAVE  # Dynamo would skip the code, which others may share, for all compiled functions

    # Dynamo looks for the caller of a frame behind the frames of its own file.
    convert_scoped.__code__ = convert_scoped.__code__.replace(co_filename=convert_frame.__file__)
    for name in ("_torchdynamo_orig_backend", "_clone_with_backend"):  # what others read of it
        setattr(convert_scoped, name, getattr(convert, name))
    callback._torchdynamo_orig_backend = convert_scoped


@contextmanager
def _returning_what_is_not_dropped() -> Iterator[None]:
    """A dropout that drops nothing returns its argument, and what is written to one shows in the other.

    Dynamo asks a decomposition (2.11), which returns a copy.
    """
    operator = torch.ops.aten.dropout.default
    decomposed = operator.py_kernels[DispatchKey.Autograd]

    def dropout(tensor: torch.Tensor, p: float, train: bool | None) -> Any:
        return decomposed(tensor, p, train) if train and p != 0 else tensor

    try:
        with patch.dict(operator.py_kernels, dict.fromkeys(_DECOMPOSED, dropout)):
            operator._dispatch_cache.clear()  # of those that it has asked for
            yield
    finally:
        operator._dispatch_cache.clear()


class _SizeHistory:
    """The sizes and Python floats that one function was compiled for.

    Dynamo makes a size or a float dynamic if it was another one when the same code was compiled last. That may have
    been for another model: those of Transformers share code, and the epsilon of a norm would be read on the host. Here
    it goes by the calls of this function alone. If ``torch.compiler.config.job_id`` names a profile, which keeps such a
    history for later processes, all functions share it.
    """

    def __init__(self) -> None:
        self._shared: Any = None
        self._own: Any = None

    def in_use(self) -> AbstractContextManager[Any]:
        if (now := pgo.get_code_state()) is not self._shared:  # at first, and after `torch._dynamo.reset`
            self._shared, self._own = now, defaultdict(pgo.CodeState)
        return patch.object(pgo, "_CODE_STATE", self._own if pgo.get_cache_key() is None else self._shared)


def _counting_versions_of(backend: Any) -> AbstractContextManager[Any]:
    """Has the limit of recompilations count what is compiled for one backend, which one function has.

    Dynamo compiles the same code a few times only, for whatever function: eight blocks of a model, compiled one by one.
    """

    def counts(frame: Any, entry: Any) -> bool:
        return entry.backend is backend and _has_same_id_matched_objs(frame, entry)

    return patch.object(cache_size, "_has_same_id_matched_objs", counts)


def _own_reasons_first() -> AbstractContextManager[Any]:
    """Has Dynamo note what a call did not meet of a version of this function, not that other versions are of others."""

    def reasons(*args: Any, **kwargs: Any) -> list[str]:
        return sorted(_recompilation_reasons(*args, **kwargs), key=lambda reason: "BACKEND_MATCH failure" in reason)

    return patch.object(convert_frame, "get_and_maybe_log_recompilation_reasons", reasons)


def _floats_constant_at_first() -> AbstractContextManager[Any]:
    """Has a Python float be a constant until it changes.

    With ``dynamic=True``, Dynamo makes all of them dynamic, so the epsilon of each norm would be read on the host.
    """

    def wrap(self: Any, value: float) -> Any:
        with config.patch(assume_static_by_default=True):
            return _wrap_symfloat(self, value)

    return patch.object(builder.VariableBuilder, "wrap_symfloat", wrap)


def _reading_constants() -> AbstractContextManager[Any]:
    """Has the value of ``torch.tensor(4).item()`` be a constant. Dynamo would end the graph there.

    PyTorch keeps the value of a small tensor that is made of constants and not written since, also through arithmetic.
    """

    def item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self.proxy.node.meta.get("example_value"), "constant", None)
        return _method_item(self, tx, *args, **kwargs) if value is None else ConstantVariable.create(value.item())

    return patch.object(TensorVariable, "method_item", item)


def specialize(numbers: Iterable[Any]) -> None:
    """Has Dynamo trace the frame anew with the Python floats that these are computed from as constants.

    Inductor does so for each float that it cannot make a tensor of. Sizes are not affected, nor floats that are fixed.

    Raises:
        TensorifyScalarRestartAnalysis: Dynamo is to catch it, and there is a float among them.
    """
    floats = [number for number in numbers if isinstance(number, (torch.SymFloat, torch.SymBool, torch.SymInt))]
    symbols = {symbol for each in floats for symbol in each.node.expr.free_symbols}
    names = {symbol.name for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)}
    if new := [name for name in names if not TensorifyState.should_specialize(name)]:
        for name in new:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def _log_after_graph(logger: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Traces a call of a logger, where Dynamo would end the graph: in each call, it is made after the graph, if its
    arguments cannot change until then."""
    functions = config.ignore_logging_functions
    method = getattr(logger.value, name, None)
    ignored = method in functions or getattr(method, "__func__", None) in functions
    is_later = _LOG_METHODS.fullmatch(name) and not kwargs and all(map(_is_immutable, args))
    if tx.export or ignored or not is_later or logger.source is None:
        return _call_method_of_logger(logger, tx, name, args, kwargs)
    call = misc.DebuggingVariable(method, source=AttrSource(logger.source, name))
    tx.output.root_tx.debug_locals.append((call, [*args]))  # those of an inlined function would be lost
    return ConstantVariable.create(None)


def _is_immutable(argument: Any) -> bool:
    """Whether what a variable of Dynamo's stands for is a constant that is the same after the graph."""
    if not argument.is_python_constant():
        return False
    try:
        hash(argument.as_python_constant())
    except TypeError:
        return False
    return True
