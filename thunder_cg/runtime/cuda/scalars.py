"""Numbers among the arguments of a CUDA graph's kernels that are set anew before each launch.

See Note [Numbers of a graph].
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from thunder_cg.runtime.backend import check_sentinels
from thunder_cg.runtime.cuda import copy_nodes as copies
from thunder_cg.runtime.cuda import nodes
from thunder_cg.runtime.cuda.copy_nodes import check, refused

driver: Any = copies.driver  # type: ignore[attr-defined]
available = driver is not None


class _Kernel:
    """One kernel node, with arguments of its own in the place of those that it was captured with."""

    def __init__(
        self, node: Any, parameters: Any, arguments: Sequence[ctypes.Array[Any]], sentinels: Sequence[int]
    ) -> None:
        self._node, self._parameters, self._arguments = node, parameters, arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._parameters.kernelParams = ctypes.addressof(self._pointers)
        self.places = [
            (number, ctypes.c_uint64.from_buffer(argument, offset))
            for argument in arguments
            for offset in range(0, len(argument) - 7, 8)
            for number, sentinel in enumerate(sentinels)
            if int.from_bytes(argument[offset : offset + 8], "little") == sentinel
        ]

    @classmethod
    def all_of(cls, graph: torch.cuda.CUDAGraph, sentinels: Sequence[int]) -> Iterator[_Kernel]:
        for node, kind in nodes.nodes(nodes.handle(graph)):
            if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                parameters = check(driver.cuGraphKernelNodeGetParams(node))
                yield cls(node, parameters, _arguments(parameters), sentinels)

    def set(self, executable: Any, numbers: Sequence[int]) -> None:
        for number, place in self.places:
            place.value = numbers[number]
        (error,) = driver.cuGraphExecKernelNodeSetParams(executable, self._node, self._parameters)
        if error:
            refused("new numbers for a kernel of a graph", error)


class Numbers:
    """What a captured graph takes in the place of sentinels.

    Args:
        graph: captured, and not yet instantiated.
        sentinels: that were among the arguments of what was captured.

    Raises:
        CaptureRefused: a sentinel is no argument of any kernel.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, sentinels: Sequence[int]) -> None:
        self._kernels = [kernel for kernel in _Kernel.all_of(graph, sentinels) if kernel.places]
        check_sentinels(sentinels, {sentinels[number] for kernel in self._kernels for number, _ in kernel.places})

    def bind(self, executable: Any) -> None:
        """Tells which executable graph the kernels are part of."""
        self._executable = executable

    def set(self, numbers: Sequence[int]) -> None:
        """Has the next launches use these."""
        for kernel in self._kernels:
            kernel.set(self._executable, numbers)


def _arguments(parameters: Any) -> list[ctypes.Array[Any]]:
    """Copies of the arguments that a kernel was captured with; none if the driver does not tell."""
    if not parameters.kernelParams:
        return []
    found: list[ctypes.Array[Any]] = []
    while True:
        error, _, size = driver.cuFuncGetParamInfo(parameters.func, len(found))
        if error:
            return found if error == driver.CUresult.CUDA_ERROR_INVALID_VALUE else []  # there are no more
        pointer = ctypes.c_void_p.from_address(parameters.kernelParams + ctypes.sizeof(ctypes.c_void_p) * len(found))
        found.append(ctypes.create_string_buffer(ctypes.string_at(pointer.value or 0, size), size))
