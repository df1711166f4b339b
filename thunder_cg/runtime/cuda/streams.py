"""The capture lock, the streams that captures run on, and the order of kernels that draw random numbers.

Note [cuBLAS workspaces]
    PyTorch keeps one cuBLAS workspace for each thread and stream until the process ends, and a graph bakes its address
    in. Graphs that share a workspace would race if they were replayed on two streams at once. A workspace has 32 MiB on
    an H200, so arenas share a capture stream if one thread has made them on one stream, or a backward that runs there,
    and whatever uses its workspaces follows the stream that used them last: launches, warm-ups and captures hold the
    capture stream's lock. No user shares it. ``_cuda_clearCublasWorkspaces``, which Inductor calls, frees the
    workspaces of all streams, those that graphs still use as well. So ours are in a private pool that nothing else
    allocates from, also those of autograd's thread, on which the capture of a whole step runs its backward.

    An idle capture stream keeps its workspaces for the next arena. When all streams are idle, this
    module has PyTorch free the workspaces, unless the process may have graphs of others. A graph that nobody can see,
    such as one of a C++ library, shows in the memory of its private pool. So does one that is gone, if a workspace was
    made in its capture.

    Without graphs, a workspace lies in memory that tensors have had before. So it may in a warm-up of inference before
    the first capture: in the arena's pool, and is freed at the end. No other thread must use its own at that moment.

Note [Draws on several streams]
    All graphs read their seed and offset from one pair of numbers in the device's memory. PyTorch sets the pair on the
    current stream, before it launches a graph and when a capture begins. Kernels of a graph on another stream may still
    read the old pair then. So captures and launches that draw wait for the last graph that drew.

Note [Who destroys graphs]
    PyTorch keeps a set of all graphs without a lock. A capture adds its graph to the set without holding the GIL, and
    the destructor, which runs on any thread, removes it. So a graph is destroyed only while no capture is under way. It
    would break a capture of the user's, too, in which Python's garbage collector may run it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from thunder_cg.compat import cuda
from thunder_cg.compat.autograd import in_backward
from thunder_cg.compat.objects import modules_of_threads, without_garbage_collection


class StreamOrder:
    """The order of what streams of one device use in turn: each use comes after what the last stream had to do.

    Attributes:
        last: the stream of the last use; None before the first one.
        last_raw: its handle.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.last: torch.cuda.Stream | None = None
        self.last_raw = -1  # no stream has this handle

    def follow(self) -> int:
        """Orders the current stream, which is the next user, after the last one. Returns its handle."""
        raw = cuda.current_raw_stream(self._index)
        if raw != self.last_raw:
            current = torch.cuda.current_stream(self._index)
            if self.last is not None:
                current.wait_stream(self.last)
            self.last, self.last_raw = current, raw
        return raw


_draws: dict[int, StreamOrder] = {}  # by device: see Note [Draws on several streams]


class CaptureLock:
    """A reentrant lock for captures, warm-ups, launches that draw, and destructors of graphs. See the notes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no RLock: a destructor on the thread that holds it must not get it
        self._owner = self._depth = 0  # reentrant: an operator that runs in a warm-up may launch, too
        self._dead: list[torch.cuda.CUDAGraph] = []  # see Note [Who destroys graphs]
        self._user_captures = _is_capturing  # for a destructor that runs while the interpreter ends

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Holds it inside if no thread held it, not even this one. Yields whether it does."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        self._owner, self._depth = threading.get_ident(), 1
        try:
            yield True
        finally:
            self.__exit__()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._owner = 0
        self._lock.release()
        if self._dead:
            self.destroy([])

    def destroy(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        """Empties the list and destroys its graphs: now, or after the captures that are under way."""
        self._dead.extend(graphs)
        graphs.clear()
        while self._dead and not self._user_captures() and self._lock.acquire(blocking=False):
            try:
                self._dead.clear()
            finally:
                self._lock.release()


def _is_capturing(
    is_initialized: Callable[[], bool] = torch.cuda.is_initialized,
    is_capturing: Callable[[], bool] = cuda.is_current_stream_capturing,
) -> bool:
    return is_initialized() and is_capturing()


# Threads of these modules run no kernels.
_IDLE = {
    "thunder_cg.progress",
    "thunder_cg.runtime.cuda.watchdog",
    "torch._inductor.compile_worker.subproc_pool",
    "torch._inductor.compile_worker.timer",
}

capture_lock = CaptureLock()
own_pools: set[cuda.PoolId] = set()  # the private pools of this package; those that are gone are dropped later


class CaptureStream:
    """A stream to warm up and capture on, with its workspaces. See Note [cuBLAS workspaces]."""

    _all: ClassVar[list[CaptureStream]] = []  # they live as long as the process; their workspaces may not
    _cleared: ClassVar[int] = 0  # how often PyTorch's workspaces have been freed
    _lock: ClassVar[threading.RLock] = threading.RLock()  # a destructor may give a stream back while we take one
    _process_ends: ClassVar[Any] = staticmethod(sys.is_finalizing)  # for the same destructor

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = cuda.new_stream(index)
        self.spare = cuda.new_stream(index)  # for captures that must not wait for the other stream
        self.lock = threading.RLock()  # of who uses the workspaces: a warm-up may launch a graph that does, too
        self.order = StreamOrder(index)  # of who uses the workspaces, with the lock
        self._users = 0  # pools
        self._made_by = 0  # the thread whose pools these are
        self._pool: cuda.PoolId | None = None
        self._has_graphs = False  # that may use the workspaces
        self._is_inside = False  # whether workspaces may be in an arena's pool, where a warm-up has made them

    @classmethod
    def take(cls, index: int) -> CaptureStream:
        """The one of this thread and the current stream; one that nobody uses, if there is none.

        A backward runs on a thread of autograd's, and has the one of the thread that uses the current stream, if only
        one does. Several could wait for each other.
        """
        with cls._lock:
            thread, raw = threading.get_ident(), cuda.current_raw_stream(index)
            here = [each for each in cls._all if each.index == index]
            used = [each for each in here if each._users and each.order.last_raw == raw]
            if not in_backward() or len({each._made_by for each in used}) > 1:
                used = [each for each in used if each._made_by == thread]
            stream = next(iter(used), None) or next((each for each in here if not each._users), None)
            if stream is None:
                stream = cls(index)
                cls._all.append(stream)
            if not stream._users:
                stream._made_by = thread
            stream._users += 1
        with stream.lock:
            stream.order.follow()
        return stream

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
        if self.all_are_idle() and not self._process_ends():
            free_workspaces()

    def workspace_nbytes(self) -> int:
        return 0 if self._pool is None else cuda.pools_nbytes([self._pool])

    @classmethod
    def forget_workspaces(cls, besides: CaptureStream | None = None) -> None:
        """After PyTorch has freed all workspaces: gives up the pools of those of idle streams, and ``besides``."""
        with cls._lock:
            CaptureStream._cleared += 1
            for stream in [each for each in cls._all if not each._users or each is besides]:
                pool, stream._pool, stream._has_graphs = stream._pool, None, False
                stream._is_inside = stream._is_inside and stream is besides
                if pool is not None:
                    cuda.release_pool(stream.index, pool)

    @classmethod
    def all_are_idle(cls, but: CaptureStream | None = None) -> bool:
        return not any(each._users for each in cls._all if each is not but)

    @contextmanager
    def for_warm_up(self, workspaces_inside: bool) -> Iterator[None]:
        """For a warm-up on the stream, with workspaces of this thread's.

        Args:
            workspaces_inside: they may be where its tensors are.
        """
        begins = workspaces_inside and not self._is_inside and self._may_free()
        if begins:
            self._is_inside = True
        else:
            self.prepare()
        try:
            yield
        finally:
            if begins:
                self._is_inside = not self._free()

    @contextmanager
    def for_capture(self) -> Iterator[None]:
        """For a capture on the stream, with workspaces of this thread's. If it fails, and is the first, they go."""
        if self._is_inside:  # of a warm-up that could not free them, or in which this is a capture
            self._free()
        self.prepare()
        try:
            yield
        except BaseException:
            self._free()
            raise
        self._has_graphs = True

    def _free(self) -> bool:
        """Frees the workspaces, unless that could harm somebody. Then later captures use them where they are."""
        if not self._may_free():
            return False
        cuda.clear_cublas_workspaces()
        self.forget_workspaces(self)
        return True

    def _may_free(self) -> bool:
        if self._has_graphs or in_backward() or not self.all_are_idle(but=self):
            return False
        return modules_of_threads() <= _IDLE and _others_have_no_graphs()

    def prepare(self) -> None:
        """Makes this thread's workspaces for the stream, before anything could make them in an arena's pool.

        Each time, since nothing says whether they are still there: Inductor may have freed them.
        """
        if self._pool is None:
            self._pool = cuda.new_pool(self.index)
            own_pools.add(self._pool)
        with cuda.use_pool(self.index, self._pool):
            self._make_workspaces()

    def _make_workspaces(self) -> None:
        with torch.cuda.device(self.index), torch.cuda.stream(self.stream):
            torch.cuda.current_blas_handle()
            operand = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
            torch.addmm(operand[0], operand, operand)  # by cuBLASLt


def free_workspaces() -> None:
    """Frees the workspaces of cuBLAS, if no graph can use one: see Note [cuBLAS workspaces].

    It waits for nobody, since a destructor may be what calls it.
    """
    with capture_lock.if_free() as is_free:
        if not is_free or not CaptureStream.all_are_idle():
            return
        if _others_have_no_graphs():
            cuda.clear_cublas_workspaces()
            CaptureStream.forget_workspaces()
        own_pools.intersection_update(cuda.pools_with_memory())


def _others_have_no_graphs() -> bool:
    """Whether no graph but those of this package can use workspaces, and PyTorch can free them."""
    if cuda.clear_cublas_workspaces is None:
        return False
    return cuda.pools_with_memory() <= own_pools and not cuda.has_foreign_graphs()


def wait_for_draws(index: int) -> None:
    """Orders the current stream, which draws next, after the one that drew last."""
    if index not in _draws:
        _draws[index] = StreamOrder(index)
    _draws[index].follow()


@contextmanager
def capturing(index: int) -> Iterator[None]:
    """For a capture on a stream that waits for the current one: one capture at a time, after all draws.

    The garbage collector is off, because a `CUDAGraph` that is collected during a capture breaks the capture.
    """
    with capture_lock, without_garbage_collection():
        wait_for_draws(index)
        yield
