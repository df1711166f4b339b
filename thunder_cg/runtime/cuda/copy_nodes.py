"""Copies that are part of a CUDA graph, with one address that is set anew before each launch.

A graph reads and writes fixed addresses, so inputs have to be copied in and results out. As operators of their own,
those copies cost more host time than launching the graph. Here they are nodes of the graph: one kernel copies up to
120 tensors, and before a launch the driver is told its new arguments. Launches under way keep the ones they had.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from thunder_cg.errors import ReplayRefused

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # torch before 2.10 does not bring it
    driver = nvrtc = None

_CHUNK = 32768  # bytes per block
_THREADS = 256
_FEW, _MANY = 4, 120  # spans per kernel; 120 of them stay below the 4 KB that a kernel's arguments may have

_SOURCE = """
typedef unsigned long long u64;
struct Span { u64 from, to, bytes, first_block; };
template <int N> struct Spans { Span at[N]; };

template <int N> __device__ void copy(const Spans<N>& spans, int count) {
  int low = 0, high = count - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (spans.at[middle].first_block <= blockIdx.x) low = middle; else high = middle - 1;
  }
  const Span span = spans.at[low];
  u64 begin = (blockIdx.x - span.first_block) * CHUNK;
  const u64 end = min(begin + CHUNK, span.bytes);
  const char* from = (const char*)span.from;
  char* to = (char*)span.to;
  u64 head = end, body = end;  // what lies outside of them is copied in words of 16 bytes
  if (((span.from ^ span.to) & 15) == 0) {
    head = min(end, begin + ((16 - ((span.from + begin) & 15)) & 15));
    body = head + ((end - head) & ~15ull);
  }
  for (u64 i = begin + threadIdx.x; i < head; i += blockDim.x) to[i] = from[i];
  for (u64 i = head + threadIdx.x * 16; i < body; i += blockDim.x * 16) *(uint4*)(to + i) = *(const uint4*)(from + i);
  for (u64 i = body + threadIdx.x; i < end; i += blockDim.x) to[i] = from[i];
}
extern "C" __global__ void copy_few(const __grid_constant__ Spans<FEW> spans, int count) { copy(spans, count); }
extern "C" __global__ void copy_many(const __grid_constant__ Spans<MANY> spans, int count) { copy(spans, count); }
"""


def check(result: Sequence[Any]) -> Any:
    """The values of a call of the CUDA driver; RuntimeError if it failed."""
    error, *values = result
    if error:
        raise RuntimeError(f"the CUDA driver refused: {error!r}")
    return values[0] if len(values) == 1 else values


@cache
def _kernels(index: int) -> dict[int, Any] | None:
    """The kernels for device ``index``, by how many spans they take; None where they cannot be compiled."""
    if driver is None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    macros = [f"-DCHUNK={_CHUNK}ull", f"-DFEW={_FEW}", f"-DMANY={_MANY}"]
    options = [text.encode() for text in (f"--gpu-architecture=sm_{major}{minor}", *macros)]
    try:
        program = check(nvrtc.nvrtcCreateProgram(_SOURCE.encode(), b"copies.cu", 0, [], []))
        check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        binary = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, binary))
        with torch.cuda.device(index):
            module = check(driver.cuModuleLoadData(binary))
        names = {_FEW: b"copy_few", _MANY: b"copy_many"}
        return {count: check(driver.cuModuleGetFunction(module, name)) for count, name in names.items()}
    except (RuntimeError, OSError):  # no NVRTC, or one that does not know the device: copies are operators then
        return None


def available(index: int) -> bool:
    """Whether graphs on device ``index`` can have copies as nodes."""
    return _kernels(index) is not None


class _Thread(threading.local):
    """The device whose context the thread is known to have. One without any crashes the driver."""

    index = -1


thread = _Thread()
get_device = torch._C._cuda_getDevice if driver is not None else torch.cuda.current_device


def context() -> Any:
    """The driver's context of the current device."""
    return check(driver.cuCtxGetCurrent())


def enter(index: int, context: Any) -> None:
    """Gives the thread the context of device ``index``, which has to be the current one."""
    if thread.index != index:
        check(driver.cuCtxSetCurrent(context))
        thread.index = index


def executable(graph: torch.cuda.CUDAGraph) -> Any:
    """What the driver launches."""
    return driver.CUgraphExec(graph.raw_cuda_graph_exec())


def launch(executable: Any, index: int) -> None:
    """Launches on the current stream of device ``index``."""
    (error,) = driver.cuGraphLaunch(executable, torch._C._cuda_getCurrentRawStream(index))
    if error:
        refused("to launch a graph", error)


def refused(what: str, error: Any) -> None:
    """Raises what a replay raises that the driver did not take."""
    raise ReplayRefused(f"the CUDA driver refused {what}: {error!r}")


class _Node:
    """One kernel node: copies up to 120 spans of memory."""

    def __init__(self, index: int, spans: Sequence[tuple[int, int]], varies: int) -> None:
        kernels = _kernels(index)
        assert kernels is not None
        limit = _FEW if len(spans) <= _FEW else _MANY
        self._words = array("Q", bytes(8 * 4 * limit))
        blocks = 0
        for i, (fixed, nbytes) in enumerate(spans):
            self._words[4 * i + 1 - varies] = fixed
            self._words[4 * i + 2] = nbytes
            self._words[4 * i + 3] = blocks
            blocks += -(-nbytes // _CHUNK)
        self._varying = slice(varies, 4 * len(spans), 4)
        self._one = varies if len(spans) == 1 else None
        self._count = ctypes.c_int(len(spans))
        self._arguments = (ctypes.c_void_p * 2)(self._words.buffer_info()[0], ctypes.addressof(self._count))
        self._parameters = driver.CUDA_KERNEL_NODE_PARAMS()
        self._parameters.func = kernels[limit]
        self._parameters.gridDimX = blocks
        self._parameters.blockDimX = _THREADS
        for name in ("gridDimY", "gridDimZ", "blockDimY", "blockDimZ"):
            setattr(self._parameters, name, 1)
        self._parameters.sharedMemBytes = 0
        self._parameters.kernelParams = ctypes.addressof(self._arguments)
        self._blocks = blocks
        self._function = kernels[limit]

    def record(self, stream: int) -> None:
        """Adds the node to the capture under way on ``stream``."""
        arguments = ctypes.addressof(self._arguments)
        check(driver.cuLaunchKernel(self._function, self._blocks, 1, 1, _THREADS, 1, 1, 0, stream, arguments, 0))
        found = [part for part in check(driver.cuStreamGetCaptureInfo(stream)) if isinstance(part, list)]
        (self._node,) = next(part for part in found if part and isinstance(part[0], driver.CUgraphNode))

    def bind(self, executable: Any) -> None:
        self._executable = executable

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Has the next launches copy from, or to, ``addresses``."""
        if self._one is not None:
            self._words[self._one] = addresses[0]
        else:
            self._words[self._varying] = array("Q", addresses)
        (error,) = driver.cuGraphExecKernelNodeSetParams(self._executable, self._node, self._parameters)
        if error:
            refused("new addresses for the copies of a graph", error)


class Copies:
    """Copies between fixed memory of a graph and memory that differs from launch to launch.

    Args:
        index: of the device.
        into: whether the fixed memory is what is written (inputs), not what is read (results).
    """

    def __init__(self, index: int, *, into: bool) -> None:
        self._index = index
        self._varies = 0 if into else 1
        self._present: list[int] = []  # of all tensors, those that have elements
        self._count = 0
        self._nodes: list[_Node] = []
        self._places: list[slice] = []  # of each node's addresses

    def record(self, fixed: Sequence[torch.Tensor]) -> None:
        """Adds copies to the capture under way on the current stream, after those that were added before.

        Args:
            fixed: tensors of the graph, without gaps of more than their own size.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        present = [tensor for tensor in fixed if tensor.numel()]
        for i in range(0, len(present), _MANY):
            spans = [(t.data_ptr(), span(t) * t.element_size()) for t in present[i : i + _MANY]]
            self._nodes.append(node := _Node(self._index, spans, self._varies))
            start = len(self._present) + i
            self._places.append(slice(start, start + len(spans)))
            node.record(stream)
        self._present += [self._count + i for i, tensor in enumerate(fixed) if tensor.numel()]
        self._count += len(fixed)

    def bind(self, executable: Any) -> None:
        """Tells which executable graph they are part of."""
        for node in self._nodes:
            node.bind(executable)

    def set_addresses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Has the next launches copy from, or to, these, laid out as the fixed ones."""
        if self._count != len(self._present):
            tensors = [tensors[i] for i in self._present]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if len(self._nodes) == 1:
            self._nodes[0].set_addresses(addresses)
        else:
            for node, place in zip(self._nodes, self._places):
                node.set_addresses(addresses[place])


def span(tensor: torch.Tensor) -> int:
    """Elements between the tensor's first and its last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride()))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size()) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a copy of the tensor's memory, laid out alike, is a copy of the tensor."""
    return not tensor.is_conj() and not tensor.is_neg() and (tensor.numel() == 0 or is_dense(tensor))


def is_compact(tensor: torch.Tensor) -> bool:
    """Whether the memory below a tensor is at most twice what its elements need, so that it may be copied whole."""
    return span(tensor) <= 2 * tensor.numel()
