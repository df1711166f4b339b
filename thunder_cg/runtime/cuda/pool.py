"""The ``cuda`` backend: ``torch.cuda.CUDAGraph`` on a side stream, into a private pool of the caching allocator.

Note [Warm-up inside the pool]
    The caching allocator reuses a block only on the stream that it was allocated on. Warm-up and captures of one pool
    therefore run on the same side stream, and the memory that the warm-up used is the memory that the capture gets.

Note [cuBLAS workspaces]
    PyTorch keeps one cuBLAS workspace per thread and stream, for good, and a graph has its address baked in. Two things
    follow. Graphs that share a workspace race when they are replayed on two streams, so no two arenas and no user share
    a side stream. And whoever calls ``_cuda_clearCublasWorkspaces`` (Inductor does) frees workspaces that graphs still
    use, so ours are in a pool that nothing else allocates from, where their memory stays unused. This module never
    calls it, as nobody knows which graphs are alive in a process: a side stream that is no longer used keeps its
    workspace (32 MiB on an H200) for the next arena.

Note [Draws on several streams]
    All graphs read the seed and the offset of what they draw from one pair of numbers in the device's memory. PyTorch
    sets them on the current stream, before it launches a graph and as a capture begins. On another stream than the last
    one, that would be under the kernels that still draw. So both wait for these, and for each other.

Note [Who destroys graphs]
    PyTorch keeps a set of all graphs without a lock: a capture adds its graph while it does not hold the GIL, and a
    destructor, which runs wherever the last reference goes, takes it out. So a graph is destroyed when no capture is
    under way.

Note [Memory for a pool]
    Where memory runs out, the caching allocator frees what it caches and tries again, but not while this thread's
    memory is routed to a pool, as it is in warm-ups and captures. So here that is done when they have failed, and again
    before a capture is tried anew, since what was in the way may be cached by then.

Note [Snapshots]
    Asked for one pool, PyTorch's snapshot (2.9 to 2.11) gives up references to the two numbers of the pool's id that
    it does not own. Past 256 they are ordinary objects, which are freed while the id still holds them. So it is asked
    for all pools.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import torch

from thunder_cg.errors import BackendError, ReplayRefused
from thunder_cg.runtime.backend import Function, Sources, copy_all
from thunder_cg.runtime.cuda import copy_nodes as copies
from thunder_cg.runtime.cuda import nodes
from thunder_cg.runtime.cuda import scalars as numbers
from thunder_cg.runtime.early_outputs import EarlyCopier

_broken: list[torch.cuda.CUDAGraph] = []  # see CudaPool._recover
_TOGETHER = 32 * 2**20  # bytes that leave a region together, before its end
_drew_on: dict[int, torch.cuda.Stream] = {}  # by device: see Note [Draws on several streams]


class CaptureLock:
    """What is done one at a time: captures, warm-ups and launches that draw, destructors of graphs. See the notes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # no RLock: a destructor must not take it for granted
        self._owner = 0
        self._depth = 0  # an operator that runs in a warm-up may come here again
        self._dead: list[torch.cuda.CUDAGraph] = []  # see Note [Who destroys graphs]

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._owner = 0
        self._lock.release()
        if self._dead:
            self.destroy([])

    def destroy(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        """Takes the graphs out of the list, and destroys them: now, or else when the turn ends that somebody has."""
        self._dead.extend(graphs)
        graphs.clear()
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._dead.clear()
            finally:
                self._lock.release()


_capture_lock = CaptureLock()


class CaptureStream:
    """A stream of our own to warm up and capture on, with its workspaces. See Note [cuBLAS workspaces]."""

    _idle: ClassVar[list[CaptureStream]] = []
    _lock: ClassVar[threading.RLock] = (
        threading.RLock()
    )  # a destructor may give a side back while this thread takes one

    def __init__(self, index: int) -> None:
        self.index = index
        self.stream = _new_stream(index)
        self.spare = _new_stream(index)  # for what must not wait for the other one
        self._pool: Any = None
        self._of_thread = threading.local()  # not by number, which another thread has when this one is gone

    @classmethod
    def take(cls, index: int) -> CaptureStream:
        """One that nobody uses; they are kept for the life of the process, as PyTorch keeps the workspaces."""
        with cls._lock:
            side = next((side for side in cls._idle if side.index == index), None)
            if side is not None:
                cls._idle.remove(side)
        return side or cls(index)

    def give_back(self) -> None:
        with self._lock:
            self._idle.append(self)

    def prepare(self) -> None:
        """Makes this thread's workspaces for the stream, before anything could make them in an arena's pool."""
        if getattr(self._of_thread, "is_prepared", False):
            return
        if self._pool is None:
            self._pool = _open_pool(self.index)
        with torch.cuda.device(self.index), torch.cuda.stream(self.stream), _routed(self.index, self._pool):
            torch.cuda.current_blas_handle()
            operand = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
            torch.addmm(operand[0], operand, operand)  # by cuBLASLt
        self._of_thread.is_prepared = True


def _new_stream(index: int) -> torch.cuda.Stream:
    """A stream that PyTorch does not hand to anybody else: its own streams are 32 in turn."""
    with torch.cuda.device(index):
        try:
            from cuda.bindings import driver
        except ImportError:  # torch before 2.10 does not bring it
            return torch.cuda.Stream()
        torch.cuda.init()
        error, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if error != driver.CUresult.CUDA_SUCCESS:
            return torch.cuda.Stream()
        return torch.cuda.ExternalStream(int(stream))


def _open_pool(index: int) -> Any:
    """The id of a new private pool, which exists until it is released once."""
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
    torch._C._cuda_endAllocateToPool(index, pool)
    return pool


@contextmanager
def _routed(index: int, pool: Any) -> Iterator[None]:
    """Inside, what this thread allocates on the device lives in the pool."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)


@contextmanager
def _not_routed(index: int, pool: Any) -> Iterator[None]:
    """Inside `_routed`, what this thread allocates here does not live in the pool."""
    torch._C._cuda_endAllocateToPool(index, pool)
    try:
        yield
    finally:
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)  # as beginning has taken it once more


class CudaBackend:
    """Captures into CUDA graphs."""

    name = "cuda"
    device_type = "cuda"
    poisons = False
    runs_captures = False
    supports_scalar_updates = numbers.available
    capture_lock = _capture_lock

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise BackendError("cuda", f"torch {torch.__version__} is built without CUDA", 'use backend="tape"')
        if not torch.cuda.is_available():
            raise BackendError("cuda", "torch.cuda.is_available() is False", 'use backend="tape" or check the driver')

    def pool(self, device: torch.device) -> CudaPool:
        return CudaPool(device)

    busy = staticmethod(torch._C._cuda_isCurrentStreamCapturing)

    def fusion(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


class _Memory:
    """A private pool of the caching allocator, which is there for as long as an arena or a graph has it."""

    _capture_lock: ClassVar[CaptureLock] = (
        _capture_lock  # for a destructor when the interpreter has taken the module apart
    )

    def __init__(self, index: int) -> None:
        self._index = index
        self._users = 1
        self.id = _open_pool(index)
        self.keep_alive: list[torch.cuda.CUDAGraph] = []  # see CudaPool._keep_pool_alive

    def mark_broken(self) -> None:
        """After a capture that broke. RuntimeError if the last one ended in good order."""
        torch._C._cuda_endAllocateToPool(self._index, self.id)
        self._users += 1  # as which that capture counts for good

    def __del__(self) -> None:
        if "keep_alive" in self.__dict__:
            self._capture_lock.destroy(self.keep_alive)
            for _ in range(self._users):
                with suppress(RuntimeError):
                    torch._C._cuda_releasePool(self._index, self.id)


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` with its copies in and out, which are part of the graph where that is possible.

    Args:
        index: of the device.
        memory: what it allocates from.
        buffers: what each replay fills from the tensors it is given.
    """

    _capture_lock: ClassVar[CaptureLock] = _capture_lock  # as for _Memory

    def __init__(self, index: int, memory: _Memory, buffers: Sequence[torch.Tensor]) -> None:
        self._index = index
        self._memory = memory
        self._buffers = buffers
        self._nodes = copies.available(index)
        self._graph = torch.cuda.CUDAGraph(keep_graph=self._nodes)
        self._in = copies.Copies(index, into=True) if self._may_copy(buffers) else None
        self._out = copies.Copies(index, into=False)
        self.left = 0  # how many tensors it copies out
        self._late: Sequence[torch.Tensor] = ()  # what it does not: that is copied after each launch
        self._numbers: numbers.Numbers | None = None
        self._is_launched = False
        self._executable: Any = None  # what the driver can launch alone

    def __del__(self) -> None:
        if "_graph" in self.__dict__:
            self._capture_lock.destroy([self.__dict__.pop("_graph")])

    def _may_copy(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._nodes and len(tensors) > 0 and all(copies.is_compact(tensor) for tensor in tensors)

    def begin(self) -> None:
        """Begins the capture on the current stream."""
        self._graph.capture_begin(pool=self._memory.id, capture_error_mode="thread_local")

    def load(self) -> None:
        """Captures the copies in."""
        self._context = copies.context() if self._nodes else None
        if self._in is not None:
            self._in.record(self._buffers)

    def admits(self, tensor: torch.Tensor) -> bool:
        """Whether it may leave before the end."""
        return self._nodes and _is_alone(tensor)

    def leave(self, tensors: Sequence[torch.Tensor]) -> None:
        """Captures copies of ``tensors`` to what each replay says, after those that left before."""
        if self._may_copy(tensors):
            self._out.record(tensors)
            self.left += len(tensors)
        else:
            self._late = tensors

    def end(self) -> None:
        """Ends the capture, whatever came of it."""
        self._graph.capture_end()

    def inspect(self, sentinels: Sequence[int]) -> None:
        """Raises `CaptureRefused` if no replay can be right; finds the kernels that take ``sentinels``."""
        if self._nodes:
            nodes.refuse_memory_of_the_host(nodes.handle(self._graph))
        if sentinels:
            self._numbers = numbers.Numbers(self._graph, sentinels)

    def instantiate(self) -> None:
        """Makes the captured graph ready to be launched."""
        if self._nodes:
            self._graph.instantiate()
            executable = copies.executable(self._graph)
            for part in (self._in, self._out, self._numbers):
                if part is not None:
                    part.bind(executable)

    def replay(
        self,
        sources: Sequence[torch.Tensor] = (),
        targets: Sequence[torch.Tensor] = (),
        numbers: Sequence[int] = (),
    ) -> None:
        """See :class:`thunder_cg.runtime.backend.Graph`."""
        if self._nodes and (copies.thread.index != self._index or copies.get_device() != self._index):
            with torch.cuda.device(self._index):
                copies.enter(self._index, self._context)
                self._replay(sources, targets, numbers)
        else:
            self._replay(sources, targets, numbers)

    def _replay(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        try:
            if self._numbers is not None:
                self._numbers.set(numbers)
            if self._in is not None:
                self._in.set_addresses(sources)
            elif sources:
                copy_all(self._buffers, sources)
            if self.left:
                self._out.set_addresses(targets[: self.left])
            if self._executable is not None:
                copies.launch(self._executable, self._index)
            elif self._is_launched:
                self._launch_with_generator()
            else:
                self._first_launch()
        except ReplayRefused:
            raise
        except Exception as error:
            raise ReplayRefused(error) from error
        if self._late:
            copy_all(targets[self.left :], self._late)

    def _first_launch(self) -> None:
        """PyTorch's replay puts the generator's state in place; a graph that draws nothing needs only the driver."""
        generator = torch.cuda.default_generators[self._index]
        before = generator.get_offset()
        self._launch_with_generator()
        draws = generator.get_offset() != before
        self._is_launched = True
        if self._nodes and not draws:
            self._executable = copies.executable(self._graph)

    def _launch_with_generator(self) -> None:
        """PyTorch's replay, which moves the generator on before it launches: back again if that fails."""
        generator = torch.cuda.default_generators[self._index]
        with _capture_lock:
            before = generator.get_offset()
            try:
                _wait_for_draws(self._index)
                self._graph.replay()
            except Exception as error:
                generator.set_offset(before)
                raise ReplayRefused(error) from error


def _wait_for_draws(index: int) -> None:
    """Orders the current stream, which draws next, after the one that drew last."""
    last = _drew_on.get(index)
    if last is None or last.cuda_stream != torch._C._cuda_getCurrentRawStream(index):
        _drew_on[index] = current = torch.cuda.current_stream(index)
        if last is not None:
            current.wait_stream(last)


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else uses the tensor's memory."""
    owners = 3 if tensor._is_view() else 2  # the tensor, what it is a view of, and the storage made here
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == owners)


def segments(pools: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The memory that these pools reserve on any device, as PyTorch's snapshot has it. See Note [Snapshots]."""
    everything = torch._C._cuda_memorySnapshot(None)["segments"]
    return [segment for segment in everything if segment["segment_pool_id"] in pools]


def _poison(storage: Any) -> None:  # what torch's stubs call a storage differs from call to call
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)


class CudaPool:
    """A private pool of PyTorch's caching allocator and the side stream that fills it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        copies.available(self._index)  # compiles its kernels, which would be slow in a capture
        self._last: torch.cuda.Stream | None = None  # the caller's stream that used the pool last
        self._last_raw = 0
        self._ran_out = False  # whether memory did in the last capture
        self._memories: weakref.WeakSet[_Memory] = weakref.WeakSet()  # its own, and what graphs had before
        self._open_memory()
        self._capture_stream = CaptureStream.take(self._index)
        try:
            with _capturing(self._index):
                self._keep_pool_alive(torch.cuda.current_stream(self._index))
        except BaseException:
            with suppress(RuntimeError):
                self._memory.mark_broken()
            self.close()
            raise

    def _open_memory(self) -> None:
        self._memory = _Memory(self._index)
        self._memories.add(self._memory)
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()  # in this memory

    def enter(self) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if self._last is None or raw != self._last_raw:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._last_raw = current, raw

    @contextmanager
    def _on_capture_stream(self) -> Iterator[torch.cuda.Stream]:
        """The side stream after the caller's, which is handed out, and the caller's after it.

        Even what only records runs kernels there: PyTorch sets what graphs draw from as a capture begins.
        """
        current = torch.cuda.current_stream(self._index)
        with torch.cuda.device(self._index):
            self._capture_stream.prepare()
            with torch.cuda.stream(self._capture_stream.stream):
                self._capture_stream.stream.wait_stream(current)
                try:
                    yield current
                finally:
                    current.wait_stream(self._capture_stream.stream)

    def memory(self, nbytes: int) -> torch.Tensor:
        try:
            return self._allocate(nbytes)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # see Note [Memory for a pool]
            return self._allocate(nbytes)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # PyTorch fills new memory where algorithms are to be deterministic. Otherwise nothing runs.
        is_filled = torch._C._get_deterministic_algorithms() and torch._C._get_deterministic_fill_uninitialized_memory()
        with (
            self._on_capture_stream() if is_filled else torch.cuda.stream(self._capture_stream.stream),
            _routed(self._index, self._memory.id),
        ):
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def warm_up(self, fn: Function, args: Sequence[Any]) -> Sequence[Any]:
        generator = torch.cuda.get_rng_state(self._index)
        try:
            # Note [Warm-up inside the pool]; a draw while another thread captures is an error
            with _capture_lock, self._on_capture_stream() as current, _routed(self._index, self._memory.id):
                leave = EarlyCopier(self._device, partial(self._send, current), _TOGETHER, _is_alone, must=False)
                return leave.settle(fn(*args, leave))
        except torch.OutOfMemoryError:
            torch.cuda.set_rng_state(generator, self._index)
            torch.cuda.empty_cache()  # see Note [Memory for a pool]
            raise

    def _send(self, stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of these, in memory of ``stream`` that is not the pool's."""
        with _not_routed(self._index, self._memory.id), torch.cuda.stream(stream):
            made = [torch.empty_like(tensor) for tensor in tensors]
        self._capture_stream.stream.wait_stream(stream)
        copy_all(made, tensors)
        return made

    def capture(
        self,
        fn: Function,
        args: Sequence[Any],
        buffers: Sequence[torch.Tensor] = (),
        leaving: Sources | None = None,
        sentinels: Sequence[int] = (),
    ) -> tuple[CudaGraph, Sequence[Any]]:
        with _capturing(self._index), self._on_capture_stream() as current:
            if self._ran_out:
                torch.cuda.empty_cache()  # see Note [Memory for a pool]
                self._ran_out = False
            graph = CudaGraph(self._index, self._memory, buffers)
            try:
                try:
                    graph.begin()
                    graph.load()
                    if leaving is None:
                        outputs = fn(*args)
                    else:
                        leave = EarlyCopier(self._device, partial(self._depart, graph), _TOGETHER, graph.admits)
                        outputs = leave.settle(fn(*args, leave))
                        graph.leave(leaving(outputs)[graph.left :])
                except BaseException:
                    if torch._C._cuda_isCurrentStreamCapturing():
                        with suppress(RuntimeError):  # the error that broke the capture is the one to report
                            graph.end()
                    raise
                graph.end()
                graph.inspect(sentinels)
                graph.instantiate()
            except BaseException as error:
                self._recover(graph, current)
                if isinstance(error, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
                    self._ran_out = True
                raise
        self._graphs.add(graph)
        return graph, outputs

    def _depart(self, graph: CudaGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        graph.leave(tensors)
        return [self.alias(tensor) for tensor in tensors]

    def _recover(self, graph: CudaGraph, current: torch.cuda.Stream) -> None:
        """Undoes what a capture that CUDA broke off leaves behind in the process (torch 2.9 to 2.11).

        The allocator still counts a capture into the pool as under way and refuses the next, so there is a new pool;
        the old one goes with the last graph that has it. So does the allocator of pinned memory, for good, and asks
        the graph about it, so the graph is kept for good. The default generator refuses to draw until some capture has
        succeeded. A generator with a fresh state would draw too, but graphs recorded before are tied to the old state,
        so what mends it is a capture that succeeds.
        """
        with suppress(RuntimeError):
            self._memory.mark_broken()
            _broken.append(graph._graph)
            self._open_memory()
        self._keep_pool_alive(current)

    def _keep_pool_alive(self, current: torch.cuda.Stream) -> None:
        """Has a graph of nothing in the pool, which keeps it in use; ``current`` is the caller's stream.

        PyTorch's allocator of pinned memory has a pool of the same id, which cannot be taken up again once no graph
        uses it any more.
        """
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), torch.cuda.device(self._index), torch.cuda.stream(self._capture_stream.spare):
            warnings.simplefilter("ignore")  # it says that the graph is empty
            self._capture_stream.spare.wait_stream(current)  # Note [Draws on several streams]
            graph.capture_begin(pool=self._memory.id, capture_error_mode="thread_local")
            graph.capture_end()
            current.wait_stream(self._capture_stream.spare)
        self._memory.keep_alive[:] = [graph]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.untyped_storage()
        storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
        metadata = {
            "size": tensor.size(),
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": tensor.device,
            "storage_offset": tensor.storage_offset(),
        }
        alias = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)
        # The metadata have no place for what PyTorch conjugates or negates only when it is read.
        alias = alias.conj() if tensor.is_conj() else alias
        return alias._neg_view() if tensor.is_neg() else alias

    def forget(self, storage: torch.UntypedStorage) -> None:
        _poison(storage)

    def poison(self) -> None:
        self.enter()  # a destructor may run where another stream is the current one
        memories = list(self._memories)  # and keeps them
        for segment in segments([memory.id for memory in memories]):
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    storage = torch._C._construct_storage_from_data_pointer(
                        block["address"], torch.device("cuda", self._index), block["size"]
                    )
                    _poison(storage)

    def trim(self) -> None:
        if not self._graphs:
            self._open_memory()
            with suppress(Exception), _capturing(self._index):  # a failure shows in the next capture, which mends it
                self._keep_pool_alive(torch.cuda.current_stream(self._index))

    def nbytes(self) -> int:
        return sum(segment["total_size"] for segment in segments([memory.id for memory in self._memories]))

    def close(self) -> None:
        del self._memory
        self._capture_stream.give_back()


@contextmanager
def _capturing(index: int) -> Iterator[None]:
    """For a capture on a stream that the current one waits for: one at a time, after all draws.

    A CUDAGraph that is collected during a capture breaks the capture.
    """
    with _capture_lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            _wait_for_draws(index)
            yield
        finally:
            if enabled:
                gc.enable()
