"""Copies that are nodes of a CUDA graph, and whose addresses are set before each launch.

As operators of their own, the copies of inputs and results cost more host time than the launch of the graph. As a node
of the graph, one kernel copies up to 120 tensors. Launches under way keep the arguments that they had.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from thunder_cg.compat import cuda
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime.backend import Tensors
from thunder_cg.runtime.tensors import span

SetAddresses = Callable[[Tensors], None]
Update = Callable[[], tuple[Any]]  # gives a node of an executable graph its new arguments; returns the driver's error

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
  u64 head = end, body = end;  // what lies between them is copied in words of 16 bytes
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


@cache
def _kernels(index: int) -> dict[int, Any] | None:
    """The kernels for device ``index``, by how many spans they take; None where they cannot be compiled."""
    macros = [f"-DCHUNK={_CHUNK}ull", f"-DFEW={_FEW}", f"-DMANY={_MANY}"]
    try:
        few, many = cuda.compile_kernels(index, _SOURCE, macros, ["copy_few", "copy_many"])
    except (RuntimeError, OSError):  # copies are operators then
        return None
    return {_FEW: few, _MANY: many}


def available(index: int) -> bool:
    """Whether graphs on device ``index`` can have copies as nodes."""
    return _kernels(index) is not None


def refused(what: str, error: Any) -> NoReturn:
    raise ReplayRefused(f"the CUDA driver refused {what}: {error!r}")


class CopyNode:
    """One kernel node: copies up to 120 spans, each with a fixed address, a size in bytes and a varying address."""

    def __init__(self, index: int, spans: Sequence[tuple[int, int]], varies: int) -> None:
        kernels = _kernels(index)
        assert kernels is not None
        limit = _FEW if len(spans) <= _FEW else _MANY
        self._function, self._blocks = kernels[limit], 0
        self.words = array("Q", bytes(8 * 4 * limit))  # the kernel's first argument
        for i, (fixed, nbytes) in enumerate(spans):
            self.words[4 * i + 1 - varies] = fixed
            self.words[4 * i + 2] = nbytes
            self.words[4 * i + 3] = self._blocks
            self._blocks += -(-nbytes // _CHUNK)
        self.varying = slice(varies, 4 * len(spans), 4)
        self._count = ctypes.c_int(len(spans))
        self._arguments = (ctypes.c_void_p * 2)(self.words.buffer_info()[0], ctypes.addressof(self._count))

    def record(self, stream: int) -> None:
        """Adds the node to the capture under way on ``stream``."""
        grid, block, arguments = (self._blocks, 1, 1), (_THREADS, 1, 1), ctypes.addressof(self._arguments)
        cuda.check(cuda.driver.cuLaunchKernel(self._function, *grid, *block, 0, stream, arguments, 0))
        self._node = cuda.last_captured_node(stream)

    def updater(self, executable: Any) -> Update:
        parameters = cuda.driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.func, parameters.gridDimX, parameters.blockDimX = self._function, self._blocks, _THREADS
        for name in ("gridDimY", "gridDimZ", "blockDimY", "blockDimZ"):
            setattr(parameters, name, 1)
        parameters.sharedMemBytes = 0
        parameters.kernelParams = ctypes.addressof(self._arguments)
        return cuda.kernel_node_updater(executable, self._node, parameters)


class Copies:
    """Copies ``into`` fixed memory of a graph (inputs), or out of it (results). The other memory differs by launch."""

    set_addresses: SetAddresses  # makes the next launches use these tensors, which have the layouts of the fixed ones

    def __init__(self, index: int, *, into: bool) -> None:
        self._index, self._varies = index, 0 if into else 1  # which address varies: 0 for from where, 1 for to where
        self._present: list[int] = []  # of all tensors, those that have elements
        self._count = 0
        self._nodes: list[tuple[CopyNode, slice]] = []  # and where the node's tensors are among those present

    def record(self, fixed: Tensors) -> None:
        """Adds copies of compact tensors to the capture under way on the current stream."""
        stream = cuda.current_raw_stream(self._index)
        present = [tensor for tensor in fixed if tensor.numel()]
        for i in range(0, len(present), _MANY):
            spans = [(t.data_ptr(), span(t) * t.element_size()) for t in present[i : i + _MANY]]
            node = CopyNode(self._index, spans, self._varies)
            start = len(self._present) + i
            self._nodes.append((node, slice(start, start + len(spans))))
            node.record(stream)
        self._present += [self._count + i for i, tensor in enumerate(fixed) if tensor.numel()]
        self._count += len(fixed)

    def bind(self, executable: Any) -> None:
        updates = [(node.words, node.varying, place, node.updater(executable)) for node, place in self._nodes]
        if self._count == len(self._present) == 1:
            ((words, varying, _, update),) = updates
            self.set_addresses = _set_one_address(words, varying.start, update)
        else:
            present = self._present if len(self._present) < self._count else None
            self.set_addresses = _set_all_addresses(updates, present)


def _set_one_address(words: array[int], position: int, update: Update) -> SetAddresses:
    """The usual case of `Copies.set_addresses`: one tensor. A closure, for it is a part of every replay."""

    def set_addresses(tensors: Tensors) -> None:
        words[position] = tensors[0].data_ptr()
        (error,) = update()
        if error:
            refused("a new address for a copy of a graph", error)

    return set_addresses


def _set_all_addresses(
    updates: Sequence[tuple[array[int], slice, slice, Update]], present: Sequence[int] | None
) -> SetAddresses:
    """`Copies.set_addresses` for any number of tensors, of which those at ``present`` have elements; None: all have."""

    def set_addresses(tensors: Tensors) -> None:
        if present is not None:
            tensors = [tensors[i] for i in present]
        addresses = array("Q", map(torch.Tensor.data_ptr, tensors))
        for words, varying, place, update in updates:
            words[varying] = addresses[place]
            (error,) = update()
            if error:
                refused("new addresses for the copies of a graph", error)

    return set_addresses
