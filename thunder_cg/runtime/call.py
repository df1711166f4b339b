"""One call of a program: how its regions run, and the memory that it holds.

Note [Four ways through a call]
    ``WARMUP``   a layout's first call: everything runs eagerly, regions with their memory in the arena.
    ``CAPTURE``  its second call: each region is recorded, which executes nothing, and then replayed.
    ``REPLAY``   every later call for which the recording's guard holds.
    ``EAGER``    whatever cannot be one of these, with the reason counted: regions run their ops, nothing is kept.

Note [Who owns a recording's memory]
    In warm-ups and captures, the trace's variables hold addresses in the arena and the call owns the memory, so that it
    can give each value up the moment the last region that needs it begins, and the memory is reused as in an eager
    call. Afterwards nobody owns it: the recording keeps addresses. What a forward saved for a backward that has not
    been captured yet must not be reused before it has: the recording owns it until then. What an eager operator makes
    of such memory, a view or what it wrote to, owns none of it, so no region gets any: see `_aliased_by_eager_ops`.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from thunder_cg.runtime.arena import Arena
from thunder_cg.runtime.recording import Recording, TraceRecording


class Mode(enum.Enum):
    """See Note [Four ways through a call]."""

    WARMUP = "warm-up"
    CAPTURE = "capture"
    REPLAY = "replay"
    EAGER = "eager"


class Call:
    """One call of a trace pair: the arena that it holds and how its regions run."""

    __slots__ = ("__weakref__", "arena", "key", "mode", "owned", "part", "recording", "verifies")

    def __init__(self) -> None:
        self.mode = Mode.EAGER
        self.verifies = False  # whether replays are compared with eager runs
        self.arena: Arena | None = None  # that it holds
        self.recording: Recording | None = None
        self.part: TraceRecording | None = None
        self.key: Any = None  # the layout that a warm-up is for
        self.owned: dict[str, torch.Tensor] = {}  # Note [Who owns a recording's memory]

    @classmethod
    def replaying(cls, recording: Recording, kind: str) -> Call:
        """A call that replays ``recording``, whose arena the caller has taken."""
        call = cls()
        call.arena, call.recording, call.part = recording.arena, recording, recording.parts[kind]
        call.mode = Mode.REPLAY
        return call

    def give_up(self) -> None:
        """Drops what the call recorded, with the memory of what failed."""
        self.recording = self.part = None
        if self.arena is not None:
            self.arena.trim()

    def release(self) -> None:
        """Gives the arena back. Nothing in its memory may be used any more."""
        arena, self.arena = self.arena, None
        self.owned = {}
        if arena is not None:
            arena.release()

    def owns(self, name: str, tensor: Any) -> bool:
        """Whether ``tensor`` is the arena's value of that name. One that a saved-tensor hook replaced is not."""
        owned = self.owned.get(name)
        return owned is not None and isinstance(tensor, torch.Tensor) and owned.data_ptr() == tensor.data_ptr()

    def __del__(self) -> None:
        if hasattr(self, "arena"):  # not so of a copy that was never finished
            self.release()


class SavedState(tuple):
    """The non-tensors that a forward saves for its backward, and the call that holds their arena."""

    call: Call | None = None
