"""The ``cuda`` backend: ``torch.cuda.CUDAGraph`` on a side stream, into a private pool of the caching allocator.

Note [Warm-up inside the pool]
    The caching allocator reuses a block only on the stream that it was allocated on. Warm-up and captures of one pool
    therefore run on the same side stream, and the memory that the warm-up used is the memory that the capture gets.

Note [cuBLAS workspaces]
    PyTorch keeps one cuBLAS workspace per handle and stream, for good. One that was allocated during a warm-up or a
    capture would pin 32 MiB of the pool, and graphs that share one would race when they are replayed on two streams.
    So workspaces are dropped before and after: every graph has its own, inside its arena, where only its holder writes.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from thunder_cg.errors import BackendError
from thunder_cg.runtime.backend import Function

_one_capture = threading.Lock()


class CudaBackend:
    """Captures into CUDA graphs."""

    name = "cuda"
    device_type = "cuda"
    poisons = False

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise BackendError("cuda", f"torch {torch.__version__} is built without CUDA", 'use backend="tape"')
        if not torch.cuda.is_available():
            raise BackendError("cuda", "torch.cuda.is_available() is False", 'use backend="tape" or check the driver')

    def pool(self, device: torch.device) -> CudaPool:
        return CudaPool(device)

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def fusion(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn


class CudaPool:
    """A private pool of PyTorch's caching allocator and the side stream that fills it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._id = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._index):
            self._side = torch.cuda.Stream()
        self._last: torch.cuda.Stream | None = None  # the caller's stream that used the pool last
        self._last_raw = 0
        # The pool exists from its first use on; this one keeps it until close().
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, self._id)
        torch._C._cuda_endAllocateToPool(self._index, self._id)
        self._open = True

    def enter(self) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if self._last is None or raw != self._last_raw:
            current = torch.cuda.current_stream(self._index)
            if self._last is not None:
                current.wait_stream(self._last)
            self._last, self._last_raw = current, raw

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """The side stream after the caller's, and the caller's after it."""
        with torch.cuda.device(self._index):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            try:
                with torch.cuda.stream(self._side):
                    yield
            finally:
                current.wait_stream(self._side)

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Inside, what this thread allocates on the device lives in the pool."""
        with self._on_side_stream():
            torch._C._cuda_beginAllocateCurrentThreadToPool(self._index, self._id)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(self._index, self._id)
                torch._C._cuda_releasePool(self._index, self._id)

    def memory(self, nbytes: int) -> torch.Tensor:
        with self._allocating():
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._index))

    def warm_up(self, fn: Function, args: Sequence[Any]) -> Sequence[Any]:
        try:
            with self._allocating():  # Note [Warm-up inside the pool]
                return fn(*args)
        finally:
            torch._C._cuda_clearCublasWorkspaces()  # Note [cuBLAS workspaces]

    def capture(self, fn: Function, args: Sequence[Any]) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        with _one_capture, _no_garbage_collection(), self._on_side_stream():
            torch._C._cuda_clearCublasWorkspaces()
            try:
                graph.capture_begin(pool=self._id, capture_error_mode="thread_local")
                try:
                    outputs = fn(*args)
                except BaseException:
                    with suppress(RuntimeError):  # the error that broke the capture is the one to report
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._mend()
                raise
            finally:
                torch._C._cuda_clearCublasWorkspaces()
        return graph, outputs

    def _mend(self) -> None:
        """Undoes what a capture that CUDA broke off leaves behind in the process (torch 2.9 to 2.11).

        The allocator still counts a capture as under way, and the default generator refuses to draw until some
        capture has succeeded. A generator with a fresh state would draw too, but graphs recorded before are tied to
        the old state, so what mends it is a capture that succeeds.
        """
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._index, self._id)
        with suppress(RuntimeError):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(capture_error_mode="thread_local")
                graph.capture_end()

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
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)

    def _segments(self) -> list[dict[str, Any]]:
        return torch.cuda.memory_snapshot(self._id) if self._open else []

    def poison(self) -> None:
        for segment in self._segments():
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    storage = torch._C._construct_storage_from_data_pointer(
                        block["address"], torch.device("cuda", self._index), block["size"]
                    )
                    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(0xFF)

    def nbytes(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def close(self) -> None:
        if self._open:
            self._open = False
            torch._C._cuda_releasePool(self._index, self._id)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A CUDAGraph that is collected during a capture breaks the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
