"""The pool of an arena on a CUDA device: warm-ups and captures in one private pool of the caching allocator.

Note [Warm-up inside the pool]
    The caching allocator reuses a block only on the stream that it was allocated on. So the warm-up and the captures of
    one pool run on the same capture stream, and a capture gets the memory that the warm-up used.

Note [Memory for a pool]
    A private pool gets no memory that the caching allocator keeps cached for others. So this module frees the cache
    before a warm-up, which makes the pool as large as it gets: both together take no more than an eager call. When
    memory runs out, the allocator frees its cache and tries again, but not while this thread allocates from a private
    pool. So this module frees the cache after a warm-up or a capture has failed, and once more before the next
    capture, because what was in the way may be cached by then. What Inductor allocates to time kernels comes from the
    pool if that has room for it, or no graph, since it begins anew with a first one: what is warmed up next uses it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import torch

from thunder_cg.analysis.segments import LEAST_SEGMENT, is_large
from thunder_cg.compat import cuda
from thunder_cg.compat.tensors import WeakStorage, keep_with_storage
from thunder_cg.compat.torch_compile import timing_kernels_in
from thunder_cg.runtime.backend import CopiedOut, Function, Tensors
from thunder_cg.runtime.cuda import copy_nodes
from thunder_cg.runtime.cuda.graph import CudaGraph
from thunder_cg.runtime.cuda.streams import CaptureLock, CaptureStream, StreamOrder, capture_lock, capturing, own_pools
from thunder_cg.runtime.early_outputs import EarlyCopier
from thunder_cg.runtime.tensors import copy_all

EARLY_COPY_BYTES = 32 * 2**20  # results wait until they have so many bytes, and are then copied out together
_broken: list[torch.cuda.CUDAGraph] = []  # kept for good: see CudaPool._recover


def _free_cache() -> None:
    with suppress(RuntimeError):  # while a user captures on another thread
        torch.cuda.empty_cache()


class PrivatePool:
    """A private pool of the caching allocator. It exists as long as an arena or a graph refers to it."""

    # For a destructor that runs when the interpreter has taken the modules apart.
    _capture_lock: ClassVar[CaptureLock] = capture_lock
    _release: ClassVar[Any] = staticmethod(cuda.release_pool)

    def __init__(self, index: int) -> None:
        self._index = index
        self._users = 1
        self.id = cuda.new_pool(index)
        own_pools.add(self.id)
        self.keep_alive: list[torch.cuda.CUDAGraph] = []  # the keep-alive graph: see CudaPool._keep_pool_alive

    def mark_broken(self) -> None:
        """After a capture that CUDA broke off. RuntimeError if the last capture ended in good order."""
        cuda.end_allocate_to_pool(self._index, self.id)
        self._users += 1  # PyTorch counts that capture as a user until somebody releases the pool for it

    def __del__(self) -> None:
        if "keep_alive" in self.__dict__:
            self._capture_lock.destroy(self.keep_alive)
            for _ in range(self._users):
                try:  # noqa: SIM105  (as the process ends, `suppress` may be gone)
                    self._release(self._index, self.id)
                except RuntimeError:
                    pass


class CudaLoan:
    """See `Loan`. The allocator says whether anybody has the memory: it hands out no block that is in use.

    The allocator takes the memory to be used on the capture stream, but callers use it on the stream on which they got
    it. So the stream on which it is found to be free, where a graph may write to it next, is ordered after that one.

    Args:
        storage: of the memory, which nobody else has yet.
        free: of the pool: address and bytes of each free block.
        follow: orders the current stream after the one that was current at the last call; see `StreamOrder`.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        allocate: Callable[[int], torch.UntypedStorage],
        free: Callable[[], Mapping[int, int]],
        follow: Callable[[], object],
    ) -> None:
        self.place = storage.data_ptr(), storage.nbytes()
        self._allocate, self._free, self._follow = allocate, free, follow
        self._tries = 1  # how many blocks it has taken so far until the allocator handed this one out
        self._own: torch.UntypedStorage | None = storage  # before it is lent the first time
        self._lent: WeakStorage | None = None

    def take(self) -> torch.UntypedStorage | None:
        storage, self._own = self._own or self._reallocated(), None
        if storage is not None:
            self._follow()
            self._lent = WeakStorage(storage)
        return storage

    def is_held(self) -> bool:
        return self._own is None and self._reallocated() is None

    def has_owner(self) -> bool:
        return self._lent is not None and self._lent.is_at(self.place[0])

    def _reallocated(self) -> torch.UntypedStorage | None:
        if self._lent is None or not self._lent.expired():
            return None
        address, nbytes = self.place
        others: list[torch.UntypedStorage] = []
        tries = self._tries
        with suppress(RuntimeError):  # too little memory, or a user captures on another thread
            while len(others) < tries:
                storage = self._allocate(nbytes)
                if storage.data_ptr() == address:
                    self._tries = max(self._tries, len(others) + 1)
                    self._follow()
                    return storage
                others.append(storage)
                if len(others) == self._tries and (free := self._free()).get(address, 0) >= nbytes:
                    # The allocator hands out the smallest block first, and may cut it into several.
                    tries += sum(size // nbytes for size in free.values() if size <= free[address])
        return None


class CudaPool:
    """A private pool of PyTorch's caching allocator and the stream that warm-ups and captures run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        copy_nodes.available(self._index)  # compiles its kernels, which would be slow in a capture
        self._order = StreamOrder(self._index)  # of the callers' streams that use the pool
        self.enter: Callable[[], object] = self._order.follow  # without a call between: each call of the user's does it
        self._ran_out = False  # whether the last capture ran out of memory
        self._allocates_inside = True  # whether a warm-up allocates from the private pool
        self._private_pools: weakref.WeakSet[PrivatePool] = weakref.WeakSet()  # the own one and those of old graphs
        self._open_private_pool()
        self._capture_stream = CaptureStream.take(self._index)
        try:
            with capturing(self._index):
                self._keep_pool_alive(torch.cuda.current_stream(self._index))
        except BaseException:
            with suppress(RuntimeError):
                self._private_pool.mark_broken()
            self.close()
            raise

    def _open_private_pool(self) -> None:
        self._private_pool = PrivatePool(self._index)
        self._private_pools.add(self._private_pool)
        self._first_segment = 0  # bytes that it began with: see Note [First segment] in analysis/segments.py
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()  # of this private pool

    @contextmanager
    def _on_capture_stream(self, workspaces: AbstractContextManager[None]) -> Iterator[torch.cuda.Stream]:
        """The capture stream, ordered after the caller's stream, which is yielded, and the caller's stream after it."""
        current = torch.cuda.current_stream(self._index)
        with torch.cuda.device(self._index), self._capture_stream.lock:
            self._capture_stream.order.follow()
            # Captures run kernels, too, which set seed and offset, and so may the making of workspaces.
            self._capture_stream.stream.wait_stream(current)
            with workspaces, torch.cuda.stream(self._capture_stream.stream):
                try:
                    yield current
                finally:
                    current.wait_stream(self._capture_stream.stream)

    def reserve(self, nbytes: int) -> None:
        if self.nbytes() < nbytes and self.nbytes() <= max(LEAST_SEGMENT, nbytes // 8):
            with suppress(RuntimeError):  # while a user captures on another thread, or too little memory
                torch.cuda.empty_cache()  # see Note [Memory for a pool]
                self._allocate(nbytes)
                self._first_segment = nbytes

    def memory(self, nbytes: int) -> torch.Tensor:
        try:
            storage = self._allocate(nbytes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # see Note [Memory for a pool]
            storage = self._allocate(nbytes)
        return _bytes_of(storage)

    def _allocate(self, nbytes: int, private_pool: PrivatePool | None = None) -> torch.UntypedStorage:
        """A storage, since a new tensor is filled where algorithms are to be deterministic, and gradients that are lent
        may be there: see Note [Lent gradients]."""
        stream, pool = self._capture_stream, private_pool or self._private_pool
        # The lock, because PyTorch gives what is allocated on a stream under capture to the pool of that capture.
        with stream.lock, torch.cuda.stream(stream.stream), cuda.use_pool(self._index, pool.id):
            return torch.UntypedStorage(nbytes, device=torch.device("cuda", self._index))

    def warm_up(self, fn: Function, args: Sequence[Any], workspaces_inside: bool = False) -> Sequence[Any]:
        inside = workspaces_inside and self._first_segment <= LEAST_SEGMENT  # they would split a larger one
        workspaces = self._capture_stream.for_warm_up(inside)
        generator = torch.cuda.get_rng_state(self._index)
        try:
            # Note [Warm-up inside the pool]. The lock, because a draw is an error while another thread captures.
            with capture_lock, self._on_capture_stream(workspaces) as current, self._with_free_cache():
                copy = partial(self._copy_to_caller, current)
                copier = EarlyCopier(self._device, copy, EARLY_COPY_BYTES, cuda.has_one_owner, must=False)
                return copier.finish(fn(*args, copier))
        except torch.OutOfMemoryError:
            torch.cuda.set_rng_state(generator, self._index)
            torch.cuda.empty_cache()  # see Note [Memory for a pool]
            raise

    @contextmanager
    def _with_free_cache(self) -> Iterator[None]:
        """Inside, this thread allocates from the private pool, after the cache was freed: Note [Memory for a pool]."""
        _free_cache()
        with cuda.use_pool(self._index, self._private_pool.id), timing_kernels_in(self._with_room_for):
            yield

    @contextmanager
    def _with_room_for(self, nbytes: int) -> Iterator[None]:
        """Inside a warm-up, for so many bytes that are freed soon: this thread allocates from the private pool, or
        elsewhere, where it keeps nothing cached then: see Note [Memory for a pool]. May be used inside of another one.
        """
        was_inside = self._allocates_inside
        is_inside = self._has_room_for(nbytes) if is_large(nbytes) else was_inside
        if is_inside == was_inside:
            yield
            return
        self._allocates_inside = is_inside
        try:
            with (cuda.use_pool if is_inside else cuda.leave_pool)(self._index, self._private_pool.id):
                try:
                    yield
                finally:
                    if was_inside:
                        _free_cache()
        finally:
            self._allocates_inside = was_inside

    def _has_room_for(self, nbytes: int) -> bool:
        """Whether there is no graph yet, or a free block has room for so many bytes, and for small ones beside them."""
        if not self._graphs:
            return True
        blocks = (block for segment in cuda.pool_segments([self._private_pool.id]) for block in segment["blocks"])
        return any(block["state"] == "inactive" and block["size"] >= nbytes + LEAST_SEGMENT for block in blocks)

    def _copy_to_caller(self, stream: torch.cuda.Stream, tensors: Tensors) -> list[torch.Tensor]:
        """Copies of these, in memory of the caller's ``stream`` outside of the private pool."""
        with cuda.leave_pool(self._index, self._private_pool.id), torch.cuda.stream(stream):
            copies = [torch.empty_like(tensor) for tensor in tensors]
        self._capture_stream.stream.wait_stream(stream)
        copy_all(copies, tensors)
        return copies

    def capture(
        self,
        fn: Function,
        args: Sequence[Any],
        buffers: Tensors = (),
        copied_out: CopiedOut | None = None,
        sentinels: Sequence[int] = (),
        may_miss: bool = False,
    ) -> tuple[CudaGraph, Sequence[Any]]:
        with capturing(self._index), self._on_capture_stream(self._capture_stream.for_capture()) as current:
            if self._ran_out:
                torch.cuda.empty_cache()  # see Note [Memory for a pool]
                self._ran_out = False
            graph = CudaGraph(self._index, self._private_pool, self._capture_stream, buffers)
            try:
                outputs = self._record(graph, fn, args, copied_out)
                graph.instantiate(sentinels, may_miss=may_miss)
            except BaseException as error:
                self._recover(graph, current)
                if isinstance(error, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
                    self._ran_out = True
                raise
        self._graphs.add(graph)
        return graph, outputs

    def _record(self, graph: CudaGraph, fn: Function, args: Sequence[Any], copied_out: CopiedOut | None) -> Any:
        try:
            graph.begin()
            graph.copy_in()
            copy = partial(self._capture_early_copy, graph)
            copier = EarlyCopier(self._device, copy, EARLY_COPY_BYTES, graph.may_copy_early)
            with torch.cuda.stream(self._capture_stream.stream):  # again, since `fn` may leave another one
                outputs = fn(*args) if copied_out is None else copier.finish(fn(*args, copier))
            if copied_out is not None:
                graph.copy_out(copied_out(outputs)[graph.copied_out :])
        except BaseException:
            if cuda.is_current_stream_capturing():
                with suppress(RuntimeError):  # the error that broke the capture is the one to report
                    graph.end()
            raise
        graph.end()
        return outputs

    def _capture_early_copy(self, graph: CudaGraph, tensors: Tensors) -> list[torch.Tensor]:
        graph.copy_out(tensors)
        return [self.alias(tensor) for tensor in tensors]

    def _recover(self, graph: CudaGraph, current: torch.cuda.Stream) -> None:
        """Undoes what a capture that CUDA broke off leaves behind in the process (torch 2.9 to 2.11).

        The caching allocator still counts the capture as under way in the private pool, and refuses the next one. So
        there is a new private pool. The allocator of pinned memory counts so, too, until the process ends, and asks the
        graph about its state. So the graph is kept for good. The default generator refuses to draw until some capture
        has succeeded. A new state would draw, but earlier graphs use the old one. So an empty graph is captured.
        """
        with suppress(RuntimeError):
            self._private_pool.mark_broken()
            _broken.append(graph.torch_graph)
            self._open_private_pool()
        self._keep_pool_alive(current)

    def _keep_pool_alive(self, current: torch.cuda.Stream) -> None:
        """Captures the keep-alive graph, an empty one, which keeps the private pool in use.

        PyTorch's allocator of pinned memory has a pool of the same id. It cannot be used again once no graph uses it.
        """
        graph = cuda.OwnGraph()
        capture_stream = torch.cuda.stream(self._capture_stream.stream)
        with capture_stream, cuda.use_pool(self._index, self._private_pool.id):  # the first graph makes seed and offset
            graph.register_generator_state(torch.cuda.default_generators[self._index])
        with warnings.catch_warnings(), torch.cuda.device(self._index), torch.cuda.stream(self._capture_stream.spare):
            warnings.simplefilter("ignore")  # PyTorch warns that the graph is empty
            self._capture_stream.spare.wait_stream(current)  # Note [Draws on several streams]
            graph.capture_begin(pool=self._private_pool.id, capture_error_mode="thread_local")
            graph.capture_end()
            current.wait_stream(self._capture_stream.spare)
        self._private_pool.keep_alive[:] = [graph]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return cuda.alias_without_owning(tensor)

    def loan(self, tensor: torch.Tensor) -> CudaLoan | None:
        # What a segment begins with is there again when all of the segment is free.
        storage, segments = tensor.untyped_storage(), cuda.pool_segments([self._private_pool.id])
        if all(segment["address"] != storage.data_ptr() for segment in segments):
            return None
        pool, order = self._private_pool, StreamOrder(self._index)
        allocate = partial(self._allocate, private_pool=pool)
        return CudaLoan(storage, allocate, partial(_free_blocks, pool), order.follow)

    def owned(self, tensors: Tensors) -> Set[int]:
        return cuda.storages_owned(tensors)

    def disown(self, tensors: Tensors) -> None:
        for tensor in tensors:
            keep_with_storage(tensor, self._private_pool)
        cuda.disown(tensors)

    def move(self, tensors: Tensors) -> None:
        # Whichever streams use the memory have to be done with it, and all of them find it moved. The lock, because to
        # wait for the device is an error while another thread captures.
        with capture_lock, torch.cuda.stream(self._order.last):
            torch.cuda.synchronize(self._index)
            for tensor in tensors:
                storage = tensor.untyped_storage()
                storage.resize_(storage.nbytes())  # allocates and copies
                keep_with_storage(tensor, None)
            torch.cuda.synchronize(self._index)

    def forget(self, storage: torch.UntypedStorage) -> None:
        _poison(storage)

    def poison(self, spared: Tensors = ()) -> None:
        if spared:
            return
        self.enter()  # a destructor may run where another stream is the current one
        device, pools = torch.device("cuda", self._index), list(self._private_pools)  # the list keeps them alive
        for segment in cuda.pool_segments([pool.id for pool in pools]):
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    _poison(cuda.storage_at(block["address"], device, block["size"]))

    def trim(self) -> bool:
        if self._graphs:
            return False
        self._open_private_pool()
        _free_cache()  # see Note [Memory for a pool]
        with suppress(Exception), capturing(self._index):  # the next capture fails as well then, and recovers
            self._keep_pool_alive(torch.cuda.current_stream(self._index))
        return True

    def ranges(self) -> list[tuple[int, int]]:
        segments = cuda.pool_segments([pool.id for pool in self._private_pools])
        return [(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]

    def nbytes(self) -> int:
        return cuda.pools_nbytes([pool.id for pool in self._private_pools])

    def workspaces(self) -> dict[Any, int]:
        return {self._capture_stream: self._capture_stream.workspace_nbytes()}

    def close(self) -> None:
        if "_private_pool" in self.__dict__:
            del self._private_pool
            self._capture_stream.give_back()

    def __del__(self) -> None:
        if "_capture_stream" in self.__dict__:
            self.close()


def _free_blocks(pool: PrivatePool) -> dict[int, int]:
    """Address and bytes of each."""
    blocks = (block for segment in cuda.pool_segments([pool.id]) for block in segment["blocks"])
    return {block["address"]: block["size"] for block in blocks if block["state"] == "inactive"}


def _bytes_of(storage: Any) -> torch.Tensor:  # the type of a storage in torch's stubs differs from call to call
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _poison(storage: Any) -> None:
    _bytes_of(storage).fill_(0xFF)
