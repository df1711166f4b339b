"""Has the user's code see what PyTorch has of tensors and settings, where something of ours is compiled.

Thunder (0.2.6) has dtypes and devices of its own, and the tensors that the code sees while Thunder traces have these.
None of them is, equals or has the hash of PyTorch's, and ``str`` of them is another one, so that a model takes the
wrong branch, silently. Thunder's operators take PyTorch's, as the user writes them.

Of inputs alone, it knows whether they require a gradient. What the code sets, such as no gradients or autocast, it
keeps beside PyTorch's settings, where the code that asks does not find it. ``torch.no_grad`` inside of another one asks
as well, and so ended both: what came before the end of the other one had gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from thunder.core import interpreter, jit_ext
from thunder.core.compile_data import _compile_data
from thunder.core.devices import to_device, to_torch_device
from thunder.core.dtypes import is_inexact_dtype, to_dtype, to_torch_dtype
from thunder.core.interpreter import get_interpreterruntimectx, interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map
from thunder.core.prims import PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, get_tracectx

from thunder_cg.compat.thunder import is_ours, symbols_of_functions

_dtype: Any = TensorProxy.dtype.fget
_device: Any = TensorProxy.device.fget
_requires_grad: Any = TensorProxy.requires_grad.fget
_thunders_set_grad_enabled: Any = symbols_of_functions()[torch._C._set_grad_enabled]
_in_functions: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # of a compilation: whether gradients are on there


def _instead_of(function: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """What Thunder's interpreter calls for a function: ours where something of ours is compiled."""
    of_ours = interpreter_needs_wrap(ours)
    thunders = _general_jit_lookaside_map.get(function, interpreter_needs_wrap(function))

    def call(*args: Any, **kwargs: Any) -> Any:
        return (of_ours if is_ours(_compile_data.get()[0]) else thunders)(*args, **kwargs)

    return call


def _asks(module: ModuleType) -> bool:
    """Whether it is code of the module that asks. In between, Thunder interprets code of its own."""
    files = (frame.code.co_filename for frame in reversed(get_interpreterruntimectx().frame_stack))
    return next((file for file in files if file != interpreter.__file__), None) == module.__file__


def _needs_gradient(tensor: TensorProxy) -> bool:
    """Whether it is, or was computed from, an input that requires a gradient.

    PyTorch's hooks on gradients, which no call runs, do without those of what is computed, and would raise with them.
    """
    if _asks(torch.utils.hooks):
        return bool(_requires_grad(tensor))
    if _requires_grad(tensor):
        return True
    derived = {tensor.name}  # what it was computed from
    for prim in _latest_first([symbol for scope in get_tracectx().scopes for symbol in scope]):
        written = [prim.args[1]] if prim.sym.id is PrimIDs.COPY_ and _is_differentiable(prim.output) else []
        made = [each for each in (*prim.flat_proxy_outs, *written) if each.name in derived]
        args = prim.flat_proxy_args if any(map(_is_differentiable, made)) else ()
        for arg in (arg for arg in args if isinstance(arg, TensorProxy)):
            if _requires_grad(arg):
                return not (torch.is_inference_mode_enabled() or _is_in_function())
            derived.add(arg.name)
    return False


def _latest_first(symbols: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Without what takes no more than the shape, or detaches."""
    for symbol in reversed(symbols):
        name = symbol.sym.name
        if name != "detach" and not name.startswith("new_") and not name.endswith("_like"):
            yield from _latest_first(symbol.subsymbols) if symbol.subsymbols else (symbol,)


def _is_differentiable(tensor: TensorProxy) -> bool:
    return ProxyTag.DETACHED_AUTOGRAD_GRAPH not in tensor.tags and is_inexact_dtype(tensor.dtype)


def _is_in_function() -> bool:
    """Whether Thunder traces an autograd function, whose forward and backward PyTorch calls without gradients."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not jit_ext._convert_pytorchfunc_to_thundertrace.__code__:
        frame = frame.f_back
    return frame is not None


def _is_grad_enabled() -> bool:
    """As Thunder's trace has it, which ``torch.inference_mode`` does not change. ``torch.no_grad`` asks, too."""
    data = _compile_data.get()[0]
    is_on: bool = _in_functions.get(data, False) if _is_in_function() else data.is_grad_enabled
    return is_on and (_asks(torch.autograd.grad_mode) or not torch.is_inference_mode_enabled())


def _set_grad_enabled(enabled: bool) -> None:
    """Is no part of the trace of a function, which has its backward in either case."""
    if _is_in_function():
        _in_functions[_compile_data.get()[0]] = enabled
    else:
        _thunders_set_grad_enabled(enabled)


def _autocast(kind: str) -> tuple[torch.dtype, bool]:
    """That of a type of device: its dtype, and whether it is on. Others may be left, below what the code entered."""
    entered = sum(_ENTERS.get(symbol.sym.id, 0) for scope in get_tracectx().scopes for symbol in scope)
    for device, dtype, is_on in islice(reversed(_compile_data.get()[0].autocast_stack.stack), entered):
        if device == kind:
            return to_torch_dtype(to_dtype(dtype)), is_on
    return torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _named_members(method: Callable[..., Any], get: str) -> Callable[..., Any]:
    """Parameters or buffers of a module in PyTorch's order. Thunder has them in that of a set, by chance."""
    thunders = _general_jit_lookaside_map[method]

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(_compile_data.get()[0]):
            return thunders(module, *args, **kwargs)
        values = [interpreter.unwrap(arg) for arg in (module, *args)]
        named = {interpreter.unwrap(name): interpreter.unwrap(arg) for name, arg in kwargs.items()}
        prefix = [*values[1:], named.get("prefix", "")][0]
        find = getattr(values[0], get)

        def members(names: Any) -> Any:
            for name in names:
                yield name, find(name.removeprefix(f"{prefix}.") if prefix else name)

        source = interpreter.ProvenanceRecord(
            interpreter.PseudoInst.LOOKASIDE, inputs=[interpreter.wrap_const(method).provenance]
        )
        names = [name for name, _ in method(*values, **named)]
        return interpreter._interpret_call(members, interpreter.wrap(names, provenance=source))

    return call


_ENTERS = {"torch.amp.autocast_mode._enter_autocast": 1, "torch.amp.autocast_mode._exit_autocast": -1}
_OURS: dict[Any, Callable[..., Any]] = {
    _dtype: lambda tensor: to_torch_dtype(_dtype(tensor)),
    _device: lambda tensor: to_torch_device(_device(tensor)),
    _requires_grad: _needs_gradient,
    torch.device: torch.device,
    torch.is_grad_enabled: _is_grad_enabled,
    torch._C._set_grad_enabled: _set_grad_enabled,
    torch.is_autocast_enabled: lambda kind="cuda": _autocast(kind)[1],
    torch.is_autocast_cpu_enabled: lambda: _autocast("cpu")[1],
    torch.get_autocast_dtype: lambda kind: _autocast(kind)[0],
    torch.get_autocast_cpu_dtype: lambda: _autocast("cpu")[0],
    torch.get_autocast_gpu_dtype: lambda: _autocast("cuda")[0],
}
_type: Any = interpreter._default_lookaside_map[type]


def _type_of_tensor(value: Any, *others: Any) -> Any:
    """That of PyTorch's tensor, unless Thunder's interpreter asks."""
    is_tensor = isinstance(interpreter.unwrap(value), TensorProxy) and is_ours(_compile_data.get()[0])
    if not is_tensor or get_interpreterruntimectx().frame_stack[-1].code.co_filename == interpreter.__file__:
        return _type(value, *others)
    known = value.python_typ  # what Thunder has in the place of a tensor, if it was computed
    return interpreter.wrap_const(known if issubclass(known, torch.Tensor) else torch.Tensor)


_MEMBERS = {torch.nn.Module.named_parameters: "get_parameter", torch.nn.Module.named_buffers: "get_buffer"}
_LOOKASIDES = {
    type: _type_of_tensor,
    **{function: _instead_of(function, ours) for function, ours in _OURS.items()},
    **{method: _named_members(method, get) for method, get in _MEMBERS.items()},
}
_repeat_assignments = jit_ext.process_recorded_modifications


def _repeat_assignments_of_devices(context: Any, epilogue: TraceCtx) -> None:
    """Thunder has calls assign devices of its own alone to attributes of arguments, and these are PyTorch's then."""
    for changes in context._additional_outputs.values() if is_ours(_compile_data.get()[0]) else ():
        for index, (*change, value) in enumerate(changes):
            if isinstance(value.value, torch.device):
                changes[index] = (*change, SimpleNamespace(value=to_device(value.value)))
    _repeat_assignments(context, epilogue)


def see_attributes_of_pytorch() -> None:
    """See the module's docstring."""
    _general_jit_lookaside_map.update(_LOOKASIDES)
    jit_ext.process_recorded_modifications = _repeat_assignments_of_devices
