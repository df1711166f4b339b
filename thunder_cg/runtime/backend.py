"""What a backend has to offer: pools that can warm up, capture and poison, and graphs that can be replayed.

Note [Numbers of a graph]
    A graph bakes in the numbers that its kernels get. A few are new in each call and yet fit for a graph: arguments
    that a kernel gets as they are, such as the seed and the offset of nvFuser's random draws. The function is captured
    with a sentinel in the place of each, a number that occurs nowhere else; where a sentinel is found among the kernels'
    arguments, each launch puts the call's number. A sentinel that is not found breaks the capture. That none was used in
    another way, say doubled on the host, is seen when the new graph is replayed beside an eager run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from thunder_cg.errors import CaptureRefused

Function = Callable[..., Sequence[Any]]
Sources = Callable[[Sequence[Any]], Sequence[torch.Tensor]]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, in as few calls as PyTorch can; autograd does not see it."""
    with torch.no_grad():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(list(targets), list(sources))


def sentinels(count: int) -> list[int]:
    """Numbers that stand for others in a capture; see Note [Numbers of a graph]."""
    return [secrets.randbits(61) | 1 << 61 for _ in range(count)]


def check_sentinels(sentinels: Sequence[int], found: Set[int]) -> None:
    """Raises `CaptureRefused` if one of ``sentinels`` was not ``found`` among the arguments of what was captured."""
    if missing := set(sentinels) - found:
        raise CaptureRefused(f"{len(missing)} of {len(sentinels)} numbers of the call reach no kernel as they are")


class Graph(Protocol):
    """A recorded sequence of work."""

    def replay(
        self,
        sources: Sequence[torch.Tensor] = (),
        targets: Sequence[torch.Tensor] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """Runs the work again, on the caller's current stream, reading and writing the recorded addresses.

        Raises `ReplayRefused` if nothing ran but copies in.

        Args:
            sources: are copied to the capture's ``buffers`` first.
            targets: get the tensors that the capture found to be ``leaving``. Both are laid out as those.
            numbers: in the place of the capture's ``sentinels``.
        """


class Pool(Protocol):
    """The memory of one arena on one device. Only the call that holds the arena may use it."""

    def enter(self) -> None:
        """Orders the caller's current stream after the last one that used this pool."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes of the pool, as a flat ``uint8`` tensor that owns them."""

    def warm_up(self, fn: Function, args: Sequence[Any]) -> Sequence[Any]:
        """Runs ``fn`` for real, with its memory in the pool, so that a capture after it can have the same memory.

        Its last argument is a `EarlyCopier`. What departed has its copy outside of the pool.

        Where memory runs out, the generators are left as they were, so that ``fn`` can be tried again.
        """

    def capture(
        self,
        fn: Function,
        args: Sequence[Any],
        buffers: Sequence[torch.Tensor] = (),
        leaving: Sources | None = None,
        sentinels: Sequence[int] = (),
    ) -> tuple[Graph, Sequence[Any]]:
        """Records ``fn`` without executing it. Returns the graph and the tensors that its replays write.

        ``leaving`` says of the outputs what a replay copies out: first what departed, in that order, as ``fn`` gets a
        `EarlyCopier` as its last argument then. ``sentinels`` says which numbers among the arguments stand for those that
        replays get. Whatever ``fn`` raises passes through, with the process left as if nothing had been
        tried.
        """

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as ``tensor`` without owning it: the pool may hand the memory out again."""

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Poisons memory that nobody owns any more, though a tensor that does not own it may still be there."""

    def poison(self) -> None:
        """Fills all memory of the pool that nobody owns with NaN."""

    def trim(self) -> None:
        """Gives memory back if no graph needs any."""

    def nbytes(self) -> int:
        """Bytes of device memory that the pool occupies."""

    def close(self) -> None:
        """Gives the pool's memory back. No graph recorded in it may be replayed afterwards."""


class Backend(Protocol):
    """What can capture and replay."""

    name: str
    device_type: str
    supports_scalar_updates: bool  # see Note [Numbers of a graph]
    runs_captures: bool  # whether a capture runs what it records, so that its inputs have to be there
    poisons: bool  # whether to fill an arena with NaN at its release even without debug=True

    @property
    def capture_lock(self) -> AbstractContextManager[Any]:
        """While a thread is inside, no other one captures, warms up, or launches a graph that draws."""

    def pool(self, device: torch.device) -> Pool:
        """A new, empty pool."""

    def busy(self) -> bool:
        """Whether the caller is inside a capture already (somebody else's: regions then just run their ops)."""

    def fusion(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, a compiled fusion, as a region has to call it."""


def resolve(name: str) -> Backend:
    """The backend called ``name``; ``"auto"`` is ``cuda`` where there is a CUDA device and ``tape`` elsewhere.

    Raises:
        BackendError: ``cuda`` was asked for and there is no usable CUDA device.
    """
    from thunder_cg.runtime.cuda.pool import CudaBackend
    from thunder_cg.runtime.tape import TapeBackend

    if name == "tape" or (name == "auto" and not torch.cuda.is_available()):
        return TapeBackend()
    return CudaBackend()
