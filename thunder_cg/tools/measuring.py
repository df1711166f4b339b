"""What measurements share: waiting for the device, memory, the garbage collector, deterministic kernels."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Literal
from unittest.mock import patch

import torch

from thunder_cg.compat.cuda import clear_cublas_workspaces


def backend_of(device: torch.device) -> Literal["cuda", "tape"]:
    """The backend for a device: CUDA graphs, or their stand-in on the CPU."""
    return "cuda" if device.type == "cuda" else "tape"


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Frees what is in reference cycles, and memory of a GPU that nothing uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_cublas_workspaces(device: torch.device) -> None:
    """Frees the workspaces of cuBLAS, so that what needs them next pays for them. No graph may have some."""
    if device.type == "cuda" and clear_cublas_workspaces is not None:
        synchronize(device)
        clear_cublas_workspaces()


@dataclass(slots=True)
class MemoryPeaks:
    """Of a GPU's allocator, above what there was before, 1e6 bytes; 0 on a CPU."""

    allocated: float = 0.0
    reserved: float = 0.0


@contextmanager
def memory_peaks(device: torch.device) -> Iterator[MemoryPeaks]:
    """Yields the peaks of what runs inside. They are filled in at the end."""
    peaks = MemoryPeaks()
    if device.type != "cuda":
        yield peaks
        return
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    yield peaks
    peaks.allocated = (torch.cuda.max_memory_allocated(device) - allocated) / 1e6
    peaks.reserved = (torch.cuda.max_memory_reserved(device) - reserved) / 1e6


@contextmanager
def new_segments(device: torch.device) -> Iterator[None]:
    """Inside, tensors of a GPU share no segment of the allocator with earlier ones, as in a process of their own.

    Free blocks beside earlier tensors would serve eager calls, and no graph, and nobody would count them. So they are
    taken: a request gets the smallest block of its stream that fits; up to 1 MiB, one of the small segments.
    """
    plugs: list[torch.Tensor] = []
    if device.type == "cuda":
        free_memory(device)
        stream = torch.cuda.current_stream(device)
        own = stream.device_index, stream.cuda_stream, (0, 0)  # of no graph's pool
        blocks = [
            (block["size"], segment["segment_type"] == "small")
            for segment in torch.cuda.memory_snapshot()
            if (segment["device"], segment["stream"], segment["segment_pool_id"]) == own
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        sizes = sorted(size for size, is_small in blocks if is_small == (size <= 2**20))
        plugs += (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
    yield
    plugs.clear()


@contextmanager
def new_inductor_cache() -> Iterator[None]:
    """Inside, Inductor and Triton find nothing that was compiled before, such as for another variant."""
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"),
    ):
        yield


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Takes all present objects out of garbage collection, which takes seconds for traces of thousands of operators."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU, PyTorch uses one thread: small models are no slower, and other processes disturb them less."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic_algorithms(*, warn_only: bool = False) -> Iterator[None]:
    """Inside, kernels add in a fixed order.

    Args:
        warn_only: where there is no such kernel, warn and take another one.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def p99(samples: Sequence[float]) -> float:
    return quantiles(samples, n=100, method="inclusive")[98] if len(samples) > 1 else samples[0]
