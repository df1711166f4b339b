"""What keeps a call from replaying graphs, whatever its tensors are: what is active on its thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from thunder_cg.compat.settings import (
    dispatch_mode_count,
    forward_ad_level,
    function_mode_count,
    is_traced,
    only_device_modes,
    saved_tensors_hooks,
)
from thunder_cg.errors import SkipReason
from thunder_cg.runtime.backend import Backend

WATCHED = SkipReason(
    "a torch dispatch or function mode is active, which has to see each operator, and a replay shows it none",
    "take the mode off the calls that it need not see; give a FlopCounterMode the module that is not compiled",
)
RETAINED = SkipReason(
    "the autograd graph is retained, so what its forward saved has to outlive this backward",
    "sum the losses and call backward once, without retain_graph=True; leave out create_graph=True, as Thunder has no "
    "second derivatives, with and without graphs, and a backward through gradients raises",
)
HOOKS = SkipReason(
    "saved-tensor hooks are active (activation checkpointing, offloading), and they keep what a forward saves",
    "call torch.utils.checkpoint inside of the compiled function, where Thunder traces it, such as in the forward of a "
    "module around the model, and compile that one; or give it use_reentrant=True, which needs an input that requires "
    "grad; offload only what is not compiled",
)
FORWARD_AD = SkipReason(
    "forward-mode AD is active, and a graph computes no tangents",
    "call the compiled function outside of torch.func.jvp and torch.autograd.forward_ad",
)
TRACED = SkipReason(
    "torch.jit.trace records each operator, and a replay shows it none", "trace the function that was not compiled"
)
WRITTEN_LEAF = SkipReason(
    "an input that is written in place is a leaf that requires grad, which PyTorch does not allow"
)
WRITTEN_OUTSIDE = SkipReason(
    "an input that is written in place is an inference tensor, which PyTorch allows in torch.inference_mode only",
    "make it outside of torch.inference_mode, or call the function inside",
)
IN_CAPTURE = SkipReason("inside another capture")
IN_STEP = SkipReason("inside a graphed step or a warm-up, whose own graph is to hold it")
TIMED = SkipReason('select="measured" times the ops without graphs')
DESELECTED = SkipReason('no region pays, and select="measured" leaves such regions eager')
RAISED = SkipReason("the replay raised an error")
FORWARD_WAS_EAGER = SkipReason("the forward of this backward ran eagerly")
NO_FORWARD = SkipReason("something has replaced what the forward saved for this backward, so its forward is unknown")
GROUP_IS_GONE = SkipReason("the process group of its collectives has been destroyed or aborted")
OTHERS_WAIT = SkipReason(
    "another call uses the memory pool, which did not when the backward was captured",
    "run backwards in the opposite order of their forwards, and drop or detach() what needs none",
)

# What is active around the call, so that its line says what to change.
AROUND_CALLS = frozenset({WATCHED, RETAINED, HOOKS, FORWARD_AD, TRACED})
# A graph around the call is to hold what it does, or the forward has said why: no mistake for ``strict=True``.
HELD_ELSEWHERE = frozenset({IN_CAPTURE, IN_STEP, FORWARD_WAS_EAGER})

_thread = threading.local()


@contextmanager
def held_back(yes: bool) -> Iterator[None]:
    """Inside, if ``yes``, calls on this thread capture nothing, because a step around them is captured, or will be."""
    before, _thread.is_held_back = is_held_back(), yes
    try:
        yield
    finally:
        _thread.is_held_back = before


def is_held_back() -> bool:
    """Whether `held_back` is in force."""
    return getattr(_thread, "is_held_back", False)


def skip_reason(backend: Backend, *, saves: bool) -> SkipReason | None:
    """Why a call that ``saves`` tensors for a backward, or not, can replay no graph now."""
    if backend.busy():
        return IN_CAPTURE
    if (dispatch_mode_count() or function_mode_count()) and is_watched():
        return WATCHED
    if saves and saved_tensors_hooks() is not None:  # they may keep it for longer than the graph lives
        return HOOKS
    if forward_ad_level() >= 0:
        return FORWARD_AD
    if is_traced():
        return TRACED
    return None


def is_watched() -> bool:
    """Whether a mode of the user's, such as a counter of operations, is active. A default device is none of them."""
    return bool(dispatch_mode_count() or (function_mode_count() and not only_device_modes()))


def pools_in_use(limit: int) -> SkipReason:
    """The reason where calls in flight hold all memory pools that a function may have."""
    held = f"all {limit} memory pools are in use, each" if limit > 1 else "the only memory pool is in use"
    fix = "drop or detach() what needs no backward, call it under torch.no_grad() if none follows, or raise max_arenas"
    return SkipReason(f"{held} until its backward", fix)
