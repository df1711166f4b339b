"""The backend that captures into CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from thunder_cg.compat import cuda, distributed
from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.errors import BackendError
from thunder_cg.runtime.cuda.nodes import addresses
from thunder_cg.runtime.cuda.pool import CudaPool
from thunder_cg.runtime.cuda.streams import capture_lock, free_workspaces, own_pools
from thunder_cg.runtime.cuda.watchdog import watchdog


class CudaBackend:
    name = "cuda"
    device_type = "cuda"
    poisons = False
    runs_captures = False
    supports_scalar_updates = cuda.driver is not None
    capture_lock = capture_lock

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise BackendError("cuda", f"torch {torch.__version__} is built without CUDA", 'use backend="tape"')
        if not torch.cuda.is_available():
            raise BackendError("cuda", "torch.cuda.is_available() is False", 'use backend="tape" or check the driver')

    def pool(self, device: torch.device) -> CudaPool:
        return CudaPool(device)

    def device_nbytes(self, device: torch.device) -> int:
        return int(torch.cuda.get_device_properties(device).total_memory)

    def allocated_nbytes(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)

    def give_back(self) -> None:
        free_workspaces()
        with suppress(RuntimeError):  # while a user captures on another thread
            torch.cuda.empty_cache()

    @contextmanager
    def memory_apart(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        index = cuda.current_device()
        pool = cuda.new_pool(index)
        make_room = cache(self.give_back)  # once

        @contextmanager
        def inside() -> Iterator[None]:
            make_room()
            own_pools.add(pool)  # as long as it has memory
            with cuda.use_pool(index, pool):
                yield

        try:
            yield inside
        finally:
            cuda.release_pool(index, pool)

    busy = staticmethod(cuda.is_current_stream_capturing)

    def captured_addresses(self) -> dict[int, str]:
        stream = cuda.current_raw_stream(cuda.current_device())
        return addresses(cuda.graph_under_capture(stream))

    def storage_uses(self, storage: int) -> int:
        return 0

    def captured_nodes(self) -> int:
        with suppress(RuntimeError, StopIteration):  # the stream is in no capture, or the capture is broken
            return cuda.node_count(cuda.graph_under_capture(cuda.current_raw_stream(cuda.current_device())))
        return 0

    def fusion(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    coalesce = staticmethod(distributed.coalesce)

    def order_gradients(self) -> None:
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        if current != default and not self.busy():  # inside a capture, no stream outside may wait
            default.wait_stream(current)

    def timer(self, device: torch.device) -> EventTimer:
        return EventTimer(device)

    def watch_collectives(self, groups: Sequence[ProcessGroup]) -> None:
        index = torch.cuda.current_device()
        watchdog(index).watch(groups, torch.cuda.current_stream(index))


class EventTimer:
    """CUDA events on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runs: list[list[torch.cuda.Event]] = []
        self._unused: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._runs.append([])
        self.mark()

    def mark(self) -> None:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._runs[-1].append(event)

    def runs(self) -> list[list[float]]:
        runs, self._runs = self._runs, []
        for run in runs:  # each may be on a stream of its own
            run[-1].synchronize()
        times = [[earlier.elapsed_time(later) * 1000 for earlier, later in pairwise(run)] for run in runs]
        self._unused += [event for run in runs for event in run]
        return times
