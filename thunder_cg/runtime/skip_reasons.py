"""What keeps a call from replaying graphs, whatever its tensors are: what is active on its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from thunder_cg.compat import torch as compat
from thunder_cg.runtime.backend import Backend

WATCHED = "a torch dispatch or function mode is active, which has to see each operator, and a replay shows it none"
RETAINED = "the autograd graph is retained, so what its forward saved has to outlive this backward"

IN_STEP = "inside a graphed step, whose own graph is to hold it"
HOOKS = "saved-tensor hooks are active (activation checkpointing, offloading), and they own what a forward saves"
FORWARD_AD = "forward-mode AD is active, and a graph computes no tangents"
TRACED = "torch.jit.trace records each operator, and a replay shows it none"

_FIXES = {
    WATCHED: "leave the mode before the call, if it need not see what the call does",
    RETAINED: "leave retain_graph=True out, if no other backward follows",
    HOOKS: "leave them out, or let thunder_cg.thunderfx compile the part that uses them as a whole",
    FORWARD_AD: "call the function that was compiled for tangents, not the compiled one",
    TRACED: "trace the function that was compiled, not the compiled one",
}


class _OfThread(threading.local):
    is_held_back = False


_thread = _OfThread()


@contextmanager
def held_back(yes: bool) -> Iterator[None]:
    """Inside, if ``yes``, calls on this thread capture nothing, because a step around them is to be captured."""
    before, _thread.is_held_back = _thread.is_held_back, yes
    try:
        yield
    finally:
        _thread.is_held_back = before


def is_held_back() -> bool:
    """Whether `held_back` is in force."""
    return _thread.is_held_back


def skip_reason(backend: Backend, *, saves: bool) -> str | None:
    """Why a call that ``saves`` tensors for a backward, or not, can replay no graph now."""
    if backend.busy():
        return "inside another capture"
    if (compat.dispatch_mode_count() or compat.function_mode_count()) and is_watched():
        return WATCHED
    if saves and compat.saved_tensors_hooks() is not None:  # they may keep it for longer than the graph lives
        return HOOKS
    if compat.forward_ad_level() >= 0:
        return FORWARD_AD
    if compat.is_traced():
        return TRACED
    return None


def is_watched() -> bool:
    """Whether a mode of the user's, such as a counter of operations, is active. A default device is none of them."""
    return bool(compat.dispatch_mode_count() or (compat.function_mode_count() and not compat.only_device_modes()))


def fix_of(reason: str) -> str:
    """What changes a reason for an eager call; "" if it needs no change, or nothing changes it.

    Reasons about a call's inputs end with theirs: "...; pass separate tensors".
    """
    return _FIXES.get(reason) or reason.partition("; ")[2]
