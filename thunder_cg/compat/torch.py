"""Private names of PyTorch. Checked with torch 2.9, 2.10 and 2.11.

Functions that a steady call uses are PyTorch's own objects under another name: a wrapper would cost host time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import CodeType
from typing import Any, TypeVar

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed._composable_state import _module_state_mapping
from torch.utils._python_dispatch import TorchDispatchMode

_Result = TypeVar("_Result")


# What ``torch.ops`` has: operators, which look up their overloads, and keep them, when they are first called.
OPERATORS = torch._ops.OpOverloadPacket, torch._ops.OpOverload

# As ``__torch_function__`` of a subclass of Tensor: PyTorch's functions take it for a plain tensor.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl


# What ``fully_shard`` and the like were applied to: an application of any of them is a write to this dictionary.
composable_states: dict[Any, Any] = vars(_module_state_mapping)["data"]


def fully_sharded_modules() -> Iterator[torch.nn.Module]:
    """The modules whose own parameters ``fully_shard`` shards. Its package takes long to import, so it is not imported.

    In a forward, such parameters are plain ones, so only ``fully_shard`` knows them.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in [*_module_state_mapping]:
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from (each._module_info.module for each in (group.fsdp_params if group is not None else ()))


# Whether a profiler of PyTorch is active: ``profiler_state[IS_PROFILING]``. To read it costs a steady call 10 ns.
profiler_state: dict[str, Any] = vars(torch.autograd.profiler)
IS_PROFILING = "_is_profiler_enabled"


def in_profile(name: str, function: Callable[..., _Result], *args: Any) -> _Result:
    """Calls a function, in a range of that name while a profiler is active."""
    if not profiler_state[IS_PROFILING]:
        return function(*args)
    with torch.profiler.record_function(name):
        return function(*args)


# A range of a profile, by its name, that no dispatch mode sees, unlike `torch.profiler.record_function`.
ProfilerRange: Any = torch._C._profiler._RecordFunctionFast


@contextmanager
def making_states_in(
    memory: Callable[[], AbstractContextManager[None]], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[None]:
    """Inside, PyTorch's own optimizers make what state they lack inside of ``memory``."""

    def make(init: Callable[..., Any], *args: Any) -> Any:
        with memory():
            return init(*args)

    own = [each for each in optimizers if type(each).__module__.startswith("torch.optim.")]
    makers = [each for each in own if hasattr(each, "_init_group") and "_init_group" not in vars(each)]
    for each in makers:
        vars(each)["_init_group"] = partial(make, each._init_group)
    try:
        yield
    finally:
        for each in makers:
            del vars(each)["_init_group"]


def code_of_fused_steps() -> Iterator[CodeType]:
    """What runs in a step of fused Adam, AdamW or SGD, and reads their groups.

    Of the numbers in them, ``step`` reads some, which it passes to the kernels unchanged.
    """
    kind: Any = torch.optim.Optimizer
    known: list[Any] = [torch.optim.Adam.step, torch.optim.SGD.step, kind.zero_grad, GradScaler._unscale_grads_]
    # The second name is that of torch before 2.11.
    names = "_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"
    known += [vars(kind)[name] for name in names if name in vars(kind)]
    codes = (inspect.unwrap(each).__code__ for each in known)
    yield from (code for code in codes if code.co_filename.startswith(torch.__path__[0]))  # others have replaced one
