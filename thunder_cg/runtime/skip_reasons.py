"""What keeps a call from replaying graphs, whatever its tensors are: what is active on its thread."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from thunder_cg.runtime.backend import Backend
from thunder_cg.runtime.code import Code

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_is_traced = torch._C._is_tracing
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_HOOKED = "saved-tensor hooks are active (activation checkpointing, offloading), and they own what a forward saves"
_TRACED = "torch.jit.trace writes down each operator, and would see none in a replay"
_DUAL = "forward-mode AD is active, and a graph computes no tangents"
WATCHED = "a torch dispatch or function mode is active, which has to see every operator, and would see none in a replay"
RETAINED = "the autograd graph is retained, so what its forward saved has to outlive this backward"


def skip_reason(backend: Backend, *, saves: bool) -> str | None:
    """Why a call that ``saves`` tensors for a backward, or not, can replay no graph now."""
    if backend.busy():
        return "inside another capture"
    if is_watched():
        return WATCHED
    if saves and _saved_tensors_hooks(False) is not None:  # they may keep what is saved for longer than the graph lives
        return _HOOKED
    if forward_ad._current_level >= 0:
        return _DUAL
    if _is_traced():
        return _TRACED
    return None


def conditions(backend: Backend, code: Code, *, saves: bool) -> list[str]:
    """That there is no `skip_reason`, as expressions."""
    found = [
        f"not {code.name(backend.busy, 'busy')}()",
        f"{code.name(_dispatch_modes, 'dispatch_modes')}() == 0",
        f"{code.name(forward_ad, 'forward_ad')}._current_level < 0",
        f"not {code.name(_is_traced, 'is_traced')}()",
        f"({code.name(_function_modes, 'function_modes')}() == 0 or not {code.name(is_watched, 'is_watched')}())",
    ]
    if saves:
        found.append(f"{code.name(_saved_tensors_hooks, 'saved_tensors_hooks')}(False) is None")
    return found


def is_watched() -> bool:
    """Whether a mode of the user's, such as a counter of operations, is active. A default device is none of them."""
    return _dispatch_modes() > 0 or (
        _function_modes() > 0
        and not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    )


def graph_is_retained() -> bool:
    """Whether the backward under way leaves its graph, and what that saved, for another one."""
    return torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph()
