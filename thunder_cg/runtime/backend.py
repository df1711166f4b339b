"""What a backend has to offer: pools that warm up, capture and poison, and graphs that can be replayed.

Note [Kernel scalars]
    A graph bakes in the numbers that its kernels get. Numbers that differ from call to call still fit a graph if its
    kernels get them unchanged, such as the seed and the offset of nvFuser's draws. The capture gets a sentinel for each
    of them, a random number that occurs nowhere else. Each launch puts the call's number where the sentinel was among
    the arguments of the kernels. A number with a fraction goes by its bits. A sentinel that is not found fails the
    capture, unless it may be missing. A number that is also used in another way, for example doubled on the host, shows
    when the first replay is compared with an eager run; of a whole step's, see Note [Numbers of fused optimizers].
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol

import torch

from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.errors import CaptureRefused

Tensors = Sequence[torch.Tensor]
Function = Callable[..., Sequence[Any]]
CopiedOut = Callable[[Sequence[Any]], Tensors]


class Graph(Protocol):
    """A recorded sequence of work."""

    nbytes: int  # device memory that the driver took for the graph itself, outside of the pool
    missing: Set[int]  # sentinels that no kernel got

    def replay(self, sources: Tensors = (), targets: Tensors = (), scalars: Sequence[int] = ()) -> None:
        """Runs the work again, on the caller's current stream, reading and writing the recorded addresses.

        Args:
            sources: are copied to the capture's ``buffers`` first. Their layouts are those of the buffers.
            targets: get copies of what the capture's ``copied_out`` returned, with the same layouts.
            scalars: take the place of the capture's ``sentinels``.

        Raises:
            ReplayRefused: nothing ran but copies to the buffers.
        """

    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that it keeps alive, if it is made of tensors."""

    def counts(self) -> Mapping[str, int]:
        """How many nodes it has of each kind, in CUDA's words, or recorded ops; nothing if that is not known."""

    def write_dot(self, path: str) -> None:
        """Writes a picture of it, in the language of Graphviz.

        Raises:
            CudagraphError: what can draw it is missing, or the graph has been destroyed.
        """

    def close(self, *, may_wait: bool) -> None:
        """Destroys it, after its work is done if that may be waited for. It refuses to be replayed afterwards."""


class Loan(Protocol):
    """Memory of a pool that a graph writes, and that callers get as it is: see Note [Lent results].

    Attributes:
        place: its address, and its bytes.
    """

    place: tuple[int, int]

    def take(self) -> torch.UntypedStorage | None:
        """The memory for a caller, who owns it; None if somebody has it. It was not taken before the first time."""

    def is_held(self) -> bool:
        """Whether somebody has it, or a stream that somebody named still uses it."""

    def has_owner(self) -> bool:
        """Whether tensors have it, and so have had it since it was taken last. Not if ``resize_`` gave it up."""


class Pool(Protocol):
    """The memory of one arena on one device. Only the call that holds the arena may run in it."""

    def enter(self) -> object:
        """Orders the caller's current stream after the last one that used this pool."""

    def reserve(self, nbytes: int) -> None:
        """Has a pool that has little memory get so much in one segment, if there is so much."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """``nbytes`` bytes of the pool, as a flat ``uint8`` tensor that owns them."""

    def warm_up(self, fn: Function, args: Sequence[Any], workspaces_inside: bool = False) -> Sequence[Any]:
        """Runs ``fn`` for real, with its memory in the pool, so that a capture after it can have the same memory.

        ``fn`` gets an `EarlyCopier` as its last argument, whose copies are outside of the pool. If memory runs out, the
        generators are set back, so that ``fn`` can be tried again. With ``workspaces_inside``, those of libraries may
        be in the pool as long as ``fn`` runs.
        """

    def capture(
        self,
        fn: Function,
        args: Sequence[Any],
        buffers: Tensors = (),
        copied_out: CopiedOut | None = None,
        sentinels: Sequence[int] = (),
        may_miss: bool = False,
    ) -> tuple[Graph, Sequence[Any]]:
        """Records ``fn`` without executing it. Returns the graph and the tensors that its replays write.

        What ``fn`` raises passes through. The process is left as if nothing had been tried.

        Args:
            buffers: what replays copy to before they run.
            copied_out: returns, given the outputs, the tensors that replays copy out: first those that were copied
                early, in that order. With it, ``fn`` gets an `EarlyCopier` as its last argument.
            sentinels: those of the arguments that stand for a replay's scalars.
            may_miss: whether some of them may reach no kernel.
        """

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as ``tensor`` without owning it: the pool may hand the memory out again."""

    def loan(self, tensor: torch.Tensor) -> Loan | None:
        """How to lend the memory of a result, which a capture made, and which the loan owns. None if it cannot be."""

    def owned(self, tensors: Tensors) -> Set[int]:
        """Of what a capture returned: the storages of the pool's memory that nothing but these tensors uses."""

    def disown(self, tensors: Tensors) -> None:
        """Has the pool hand the memory of these out again, though they exist. It is mapped as long as they exist."""

    def move(self, tensors: Tensors) -> None:
        """Gives the storages of these memory of their own, outside of the pool, with the same contents."""

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Poisons memory that nobody owns any more, though tensors that do not own it may still exist."""

    def poison(self, spared: Tensors = ()) -> None:
        """Fills all memory of the pool that nobody owns with NaN. A pool that cannot spare tensors fills nothing."""

    def trim(self) -> bool:
        """Gives memory back if no graph needs any. Returns whether that is so."""

    def ranges(self) -> Sequence[tuple[int, int]]:
        """The pool's memory: where each piece begins and ends."""

    def nbytes(self) -> int:
        """Bytes of device memory that the pool occupies."""

    def workspaces(self) -> Mapping[Any, int]:
        """Bytes of the workspaces that libraries keep for its captures, outside of it, by what pools may share."""

    def close(self) -> None:
        """Gives the pool's memory back. No graph recorded in it may be replayed afterwards."""


class Timer(Protocol):
    """Times what runs between marks, as the device does it if the backend can tell."""

    def start(self) -> None:
        """Begins a run. It waits for nothing, so that runs follow one another as calls do."""

    def mark(self) -> None:
        """Ends what has run since the mark before, or the start: on CUDA an event on the device's current stream."""

    def runs(self) -> list[list[float]]:
        """Of each run since this was asked last: the times up to each mark, since the mark before, in microseconds."""


class HostTimer:
    """The host's clock: on a CPU, an operator has run when its call returns."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def start(self) -> None:
        self._runs.append([time.perf_counter_ns()])

    def mark(self) -> None:
        self._runs[-1].append(time.perf_counter_ns())

    def runs(self) -> list[list[float]]:
        runs, self._runs = self._runs, []
        return [[(later - earlier) / 1000 for earlier, later in pairwise(run)] for run in runs]


class Backend(Protocol):
    """What can capture and replay."""

    name: str
    device_type: str
    supports_scalar_updates: bool  # see Note [Kernel scalars]
    runs_captures: bool  # whether a capture runs what it records, so that its inputs need their values
    poisons: bool  # whether to fill an arena with NaN at its release even without debug=True

    @property
    def capture_lock(self) -> AbstractContextManager[Any]:
        """While a thread holds it, no other one captures, warms up, or launches a graph that draws."""

    def pool(self, device: torch.device) -> Pool:
        """A new, empty pool."""

    def device_nbytes(self, device: torch.device) -> int:
        """Bytes of memory that the device has."""

    def allocated_nbytes(self, device: torch.device) -> tuple[int, int]:
        """Bytes that tensors have on the device now, and the most that they had; zeros if that is not known."""

    def give_back(self) -> None:
        """Gives memory that no pool uses any more back to the device, with workspaces of libraries."""

    def memory_apart(self) -> AbstractContextManager[Callable[[], AbstractContextManager[None]]]:
        """Yields a context: what a thread allocates in it shares no segment of the allocator with anything else."""

    def storage_uses(self, storage: int) -> int:
        """How many tensors of graphs have a storage, given its `storage_id`, if graphs are made of tensors."""

    def busy(self) -> bool:
        """Whether the caller is inside a capture already. It is somebody else's, so regions run their ops in it."""

    def captured_addresses(self) -> dict[int, str]:
        """Numbers that may be addresses, among what the operations got that this thread has captured up to now.

        None that is an address is missing, but for addresses in the device's own memory. Each has the name of an
        operation that got it.
        """

    def captured_nodes(self) -> int:
        """How many operations this thread has captured up to now, on its current stream; 0 if that is not known."""

    def fusion(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, a compiled fusion, as a region has to call it."""

    def coalesce(self, group: ProcessGroup) -> AbstractContextManager[Callable[[Any], Any]]:
        """Asynchronous collectives inside become one; see `compat.distributed.coalesce`."""

    def order_gradients(self) -> None:
        """After a backward in Thunder's dispatch: orders what autograd does next after it, whatever stream it ran on.

        The node of Thunder's backward tells autograd no stream. So autograd takes the gradients to be made on the
        default stream, and has the streams of the nodes that accumulate them wait for that one.
        """

    def timer(self, device: torch.device) -> Timer:
        """A new timer, for what the calling thread runs on ``device``."""

    def watch_collectives(self, groups: Sequence[ProcessGroup]) -> None:
        """After a replay that communicates: if it never ends, the process does, with a message."""


def sentinels(count: int) -> list[int]:
    """New sentinels. See Note [Kernel scalars]."""
    return [secrets.randbits(61) | 1 << 61 for _ in range(count)]


def bits_of(numbers: Sequence[float]) -> tuple[int, ...]:
    """The scalars that stand for these."""
    return struct.unpack(f"{len(numbers)}Q", struct.pack(f"{len(numbers)}d", *numbers))


def number_of(bits: int) -> float:
    """The number with these bits. That of a sentinel is above 0 and below 2."""
    return float(struct.unpack("d", struct.pack("Q", bits))[0])


def refuse_missing(sentinels: Sequence[int], missing: Set[int]) -> None:
    """Raises `CaptureRefused` if some of ``sentinels`` are ``missing`` among the arguments of what was captured."""
    if missing:
        raise CaptureRefused(f"{len(missing)} of {len(sentinels)} numbers of the call reach no kernel as they are")
