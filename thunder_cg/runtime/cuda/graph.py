"""A CUDA graph with its copies in and out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from thunder_cg.compat import cuda
from thunder_cg.errors import CudagraphError, ReplayRefused
from thunder_cg.runtime.backend import Tensors, refuse_missing
from thunder_cg.runtime.cuda import copy_nodes
from thunder_cg.runtime.cuda.copy_nodes import Copies, SetAddresses, refused
from thunder_cg.runtime.cuda.nodes import KernelScalars, counts, refuse_host_memory
from thunder_cg.runtime.cuda.streams import CaptureLock, CaptureStream, capture_lock, wait_for_draws
from thunder_cg.runtime.tensors import copy_all, is_compact

if TYPE_CHECKING:
    from thunder_cg.runtime.cuda.pool import PrivatePool

Launch = Callable[[Tensors, Tensors, Sequence[int]], None]


class _Thread(threading.local):
    """The device whose context this thread is known to have. Without a context, the driver crashes the process."""

    index = -1


_thread = _Thread()


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` with its copies in and out, which are nodes of the graph where that is possible."""

    _capture_lock: ClassVar[CaptureLock] = capture_lock  # for a destructor that runs while the interpreter ends

    def __init__(self, index: int, pool: PrivatePool, capture_stream: CaptureStream, buffers: Tensors) -> None:
        self._index, self._pool, self._capture_stream, self._buffers = index, pool, capture_stream, buffers
        self._has_driver = copy_nodes.available(index)
        self.torch_graph = cuda.OwnGraph(keep_graph=self._has_driver)
        self.nbytes = 0  # known only with the driver
        self._inputs = Copies(index, into=True) if self._may_copy(buffers) else None
        self._outputs = Copies(index, into=False)
        self.copied_out = 0  # how many tensors the graph itself copies out
        self._copied_after: Tensors = ()  # what is copied out by operators after each launch
        self._scalars: KernelScalars | None = None
        self._counts: dict[str, int] | None = None
        self.missing: Set[int] = frozenset()
        self._is_launched = False
        self._launcher: Callable[[int], tuple[Any]] | None = None  # of the driver, for a graph that draws nothing
        self._fast_replay: Launch | None = None

    def __del__(self) -> None:
        self._destroy()

    def tensors(self) -> Sequence[torch.Tensor]:
        return ()

    def counts(self) -> dict[str, int]:
        if not self._has_driver or "torch_graph" not in self.__dict__:
            return {}
        if self._counts is None:  # to list the nodes takes milliseconds
            self._counts = counts(cuda.captured_graph(self.torch_graph))
        return self._counts

    def write_dot(self, path: str) -> None:
        if not self._has_driver:
            raise CudagraphError("write_dot: cuda-bindings is not installed; pip install cuda-bindings")
        if "torch_graph" not in self.__dict__:
            raise CudagraphError("write_dot: the graph has been destroyed; call the function again")
        cuda.write_dot(cuda.captured_graph(self.torch_graph), path)

    def close(self, *, may_wait: bool) -> None:
        if may_wait:
            torch.cuda.synchronize(self._index)
        self._destroy()

    def _destroy(self) -> None:
        self._launcher = self._fast_replay = None
        if "torch_graph" in self.__dict__:
            self._capture_lock.destroy([self.__dict__.pop("torch_graph")])

    def _may_copy(self, tensors: Tensors) -> bool:
        return self._has_driver and len(tensors) > 0 and all(map(is_compact, tensors))

    def begin(self) -> None:
        self.torch_graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")

    def copy_in(self) -> None:
        self._context = cuda.check(cuda.driver.cuCtxGetCurrent()) if self._has_driver else None
        if self._inputs is not None:
            self._inputs.record(self._buffers)

    def may_copy_early(self, tensor: torch.Tensor) -> bool:
        """Whether the graph may copy the tensor out before its end."""
        return self._has_driver and cuda.has_one_owner(tensor)

    def copy_out(self, tensors: Tensors) -> None:
        """Captures copies of ``tensors`` to the targets of each replay, after those that were captured before."""
        if self._may_copy(tensors):
            self._outputs.record(tensors)
            self.copied_out += len(tensors)
        else:
            self._copied_after = tensors

    def end(self) -> None:
        self.torch_graph.capture_end()

    def instantiate(self, sentinels: Sequence[int], *, may_miss: bool) -> None:
        """Makes the graph ready to be launched. Raises `CaptureRefused` if no replay can be right."""
        if self._has_driver:
            refuse_host_memory(cuda.captured_graph(self.torch_graph))
        self.missing = frozenset(sentinels)
        if sentinels and self._has_driver:
            scalars = KernelScalars(cuda.captured_graph(self.torch_graph), sentinels)
            self._scalars, self.missing = scalars if len(scalars) else None, scalars.missing
        if not may_miss:
            refuse_missing(sentinels, self.missing)
        if self._has_driver:
            free = cuda.free_nbytes(self._index)
            self.torch_graph.instantiate()
            self.nbytes = max(0, free - cuda.free_nbytes(self._index))
            executable = cuda.executable_graph(self.torch_graph)
            for part in (self._inputs, self._outputs, self._scalars):
                if part is not None:
                    part.bind(executable)

    def replay(self, sources: Tensors = (), targets: Tensors = (), scalars: Sequence[int] = ()) -> None:
        fast_replay = self._fast_replay
        if fast_replay is not None and _thread.index == self._index == cuda.current_device():
            fast_replay(sources, targets, scalars)
        elif self._has_driver and (_thread.index != self._index or cuda.current_device() != self._index):
            with torch.cuda.device(self._index):
                if _thread.index != self._index:
                    cuda.check(cuda.driver.cuCtxSetCurrent(self._context))
                    _thread.index = self._index
                self._replay(sources, targets, scalars)
        else:
            self._replay(sources, targets, scalars)

    def _replay(self, sources: Tensors, targets: Tensors, scalars: Sequence[int]) -> None:
        if "torch_graph" not in self.__dict__:
            raise ReplayRefused("it has been destroyed")
        try:
            if self._scalars is not None:
                self._scalars.set(scalars)
            if self._inputs is not None:
                self._inputs.set_addresses(sources)
            elif sources:
                copy_all(self._buffers, sources)
            if self.copied_out:
                self._outputs.set_addresses(targets[: self.copied_out])
            self._launch()
        except ReplayRefused:
            raise
        except Exception as error:
            raise ReplayRefused(error) from error
        if self._copied_after:
            copy_all([each.data for each in targets[self.copied_out :]], self._copied_after)

    def _launch(self) -> None:
        if self._launcher is not None:
            with self._capture_stream.lock:
                (error,) = self._launcher(self._capture_stream.order.follow())
            if error:
                refused("to launch a graph", error)
            return
        generator = torch.cuda.default_generators[self._index]
        with capture_lock, self._capture_stream.lock:
            before = generator.get_offset()
            try:
                self._capture_stream.order.follow()
                wait_for_draws(self._index)
                self.torch_graph.replay()  # if the graph draws, this moves the generator on before it launches
            except Exception as error:
                generator.set_offset(before)
                raise ReplayRefused(error) from error
            draws = self._is_launched or generator.get_offset() != before
        self._is_launched = True
        if self._has_driver and not draws:
            self._launcher = partial(cuda.driver.cuGraphLaunch, cuda.executable_graph(self.torch_graph))
            copies_are_nodes = (self._inputs is not None or not self._buffers) and not self._copied_after
            if copies_are_nodes:
                set_sources = self._inputs.set_addresses if self._inputs is not None else None
                set_targets = self._outputs.set_addresses if self.copied_out else None
                set_scalars = self._scalars.set if self._scalars is not None else None
                steps = set_sources, set_targets, set_scalars
                self._fast_replay = _make_fast_replay(self._capture_stream, self._launcher, *steps)


def _make_fast_replay(
    capture_stream: CaptureStream,
    launch: Callable[[int], tuple[Any]],
    set_sources: SetAddresses | None,
    set_targets: SetAddresses | None,
    set_scalars: Callable[[Sequence[int]], None] | None,
) -> Launch:
    """What `CudaGraph._replay` does, for a graph whose copies are all nodes and that draws nothing.

    It is a closure, because steady calls spend their host time here. It holds no reference to its graph, so that
    reference counting frees the graph.
    """
    stream, index = cuda.current_raw_stream, capture_stream.index
    order, lock = capture_stream.order, capture_stream.lock

    def replay(sources: Tensors, targets: Tensors, scalars: Sequence[int]) -> None:
        try:
            if set_scalars is not None:
                set_scalars(scalars)
            if set_sources is not None:
                set_sources(sources)
            if set_targets is not None:
                set_targets(targets)
            with lock:
                if (raw := stream(index)) != order.last_raw:
                    order.follow()
                (error,) = launch(raw)
        except ReplayRefused:
            raise
        except Exception as problem:
            raise ReplayRefused(problem) from problem
        if error:
            refused("to launch a graph", error)

    return replay
