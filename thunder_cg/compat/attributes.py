"""Has the user's code see the dtypes and devices of PyTorch's tensors, where something of ours is compiled.

Thunder (0.2.6) has its own, and the tensors that the code sees while Thunder traces have these. None of them is, equals
or has the hash of PyTorch's, and ``str`` of them is another one, so that a model takes the wrong branch, silently.
Thunder's operators take PyTorch's, as the user writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from thunder.core import jit_ext
from thunder.core.compile_data import _compile_data
from thunder.core.devices import to_device, to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.interpreter import interpreter_needs_wrap
from thunder.core.jit_ext import _general_jit_lookaside_map
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx

from thunder_cg.compat.thunder import is_ours


def _instead_of(function: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    """What Thunder's interpreter calls for a function: ours where something of ours is compiled."""
    of_ours, thunders = interpreter_needs_wrap(ours), _general_jit_lookaside_map[function]

    def call(*args: Any, **kwargs: Any) -> Any:
        return (of_ours if is_ours(_compile_data.get()[0]) else thunders)(*args, **kwargs)

    return call


_dtype: Any = TensorProxy.dtype.fget
_device: Any = TensorProxy.device.fget
_LOOKASIDES = {
    function: _instead_of(function, ours)
    for function, ours in {
        _dtype: lambda tensor: to_torch_dtype(_dtype(tensor)),
        _device: lambda tensor: to_torch_device(_device(tensor)),
        torch.device: torch.device,
    }.items()
}


_repeat_assignments = jit_ext.process_recorded_modifications


def _repeat_assignments_of_devices(context: Any, epilogue: TraceCtx) -> None:
    """Thunder has calls assign devices of its own alone to attributes of arguments, and these are PyTorch's then."""
    for changes in context._additional_outputs.values():
        for index, (*change, value) in enumerate(changes):
            if isinstance(value.value, torch.device):
                changes[index] = (*change, SimpleNamespace(value=to_device(value.value)))
    _repeat_assignments(context, epilogue)


def see_attributes_of_pytorch() -> None:
    """See the module's docstring."""
    _general_jit_lookaside_map.update(_LOOKASIDES)
    jit_ext.process_recorded_modifications = _repeat_assignments_of_devices
