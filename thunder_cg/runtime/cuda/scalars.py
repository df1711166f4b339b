"""Scalars among the arguments of a CUDA graph's kernels that are set before each launch.

See Note [Scalars of a graph].
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from thunder_cg.compat import cuda
from thunder_cg.compat.cuda import check
from thunder_cg.runtime.cuda.copy_nodes import refused
from thunder_cg.runtime.cuda.nodes import kernel_nodes
from thunder_cg.runtime.sentinels import check_sentinels


class KernelScalars:
    """The scalars of a captured graph, which take the place of sentinels.

    Args:
        graph: the driver's, captured and not yet instantiated.
        sentinels: that were among the arguments of what was captured.

    Raises:
        CaptureRefused: a sentinel is no argument of any kernel.
    """

    def __init__(self, graph: Any, sentinels: Sequence[int]) -> None:
        kernels = [_KernelNode(node, sentinels) for node in kernel_nodes(graph)]
        self._kernels = [kernel for kernel in kernels if kernel.places]
        check_sentinels(sentinels, {sentinels[scalar] for kernel in self._kernels for scalar, _ in kernel.places})

    def bind(self, executable: Any) -> None:
        """Says which executable graph the kernels are part of."""
        self._updates = [kernel.updater(executable) for kernel in self._kernels]

    def set(self, scalars: Sequence[int]) -> None:
        """Makes the next launches use these."""
        for kernel, update in zip(self._kernels, self._updates):
            for scalar, place in kernel.places:
                place.value = scalars[scalar]
            (error,) = update()
            if error:
                refused("new scalars for a kernel of a graph", error)


class _KernelNode:
    """One kernel node, with copies of the arguments that it was captured with.

    Attributes:
        places: scalars, and where among the arguments they belong.
    """

    def __init__(self, node: Any, sentinels: Sequence[int]) -> None:
        self._node = node
        self._parameters = check(cuda.driver.cuGraphKernelNodeGetParams(node))
        arguments = _arguments(self._parameters)
        self._pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._arguments = arguments  # the pointers do not keep them alive
        self.places = [
            (scalar, ctypes.c_uint64.from_buffer(argument, offset))
            for argument in arguments
            for offset in range(0, len(argument) - 7, 8)
            for scalar, sentinel in enumerate(sentinels)
            if int.from_bytes(argument[offset : offset + 8], "little") == sentinel
        ]

    def updater(self, executable: Any) -> Any:
        """What gives the node of this executable graph the arguments as they are then."""
        self._parameters.kernelParams = ctypes.addressof(self._pointers)
        return cuda.kernel_node_updater(executable, self._node, self._parameters)


def _arguments(parameters: Any) -> list[ctypes.Array[Any]]:
    """Copies of the arguments that a kernel was captured with; none if the driver does not tell."""
    if not parameters.kernelParams:
        return []
    arguments: list[ctypes.Array[Any]] = []
    while True:
        error, _, size = cuda.driver.cuFuncGetParamInfo(parameters.func, len(arguments))
        if error:
            return arguments if error == cuda.driver.CUresult.CUDA_ERROR_INVALID_VALUE else []  # there are no more
        at = parameters.kernelParams + ctypes.sizeof(ctypes.c_void_p) * len(arguments)
        pointer = ctypes.c_void_p.from_address(at)
        arguments.append(ctypes.create_string_buffer(ctypes.string_at(pointer.value or 0, size), size))
