"""The nodes of a captured CUDA graph: which of them no replay may run, and which take the scalars of a call.

Note [Host memory]
    A library may copy between device and host memory, or call a function on the host, without waiting for either. A
    capture accepts both, and the graph keeps the host's address. A replay reads or writes whatever is there by then.
    So a graph that holds such a node is refused, whatever a rule or ``allow=`` says of the operator.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from thunder_cg.compat import cuda
from thunder_cg.compat.cuda import check
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.cuda.copy_nodes import refused


def nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Each node of a driver's graph, and of its child graphs, with its type."""
    driver = cuda.driver
    count = cuda.node_count(graph)
    listed, _ = check(driver.cuGraphGetNodes(graph, count))
    for node in listed[:count]:
        kind = check(driver.cuGraphNodeGetType(node))
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from nodes(check(driver.cuGraphChildGraphNodeGetGraph(node)))
        else:
            yield node, kind


def counts(graph: Any) -> dict[str, int]:
    """How many nodes of each kind the driver's ``graph`` has, most first. Empty nodes do nothing and do not count."""
    kinds = cuda.driver.CUgraphNodeType
    names = {
        kinds.CU_GRAPH_NODE_TYPE_KERNEL: "kernel",
        kinds.CU_GRAPH_NODE_TYPE_MEMCPY: "memcpy",
        kinds.CU_GRAPH_NODE_TYPE_MEMSET: "memset",
    }
    found = [names.get(kind, "other node") for _, kind in nodes(graph) if kind != kinds.CU_GRAPH_NODE_TYPE_EMPTY]
    return dict(Counter(found).most_common())


def refuse_host_memory(graph: Any) -> None:
    """Raises `CaptureRefused` if a replay of the driver's ``graph`` would touch the host's memory."""
    kinds = cuda.driver.CUgraphNodeType
    for node, kind in nodes(graph):
        if kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
            raise CaptureRefused("a library that it uses calls a function on the host, which a replay would call again")
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = check(cuda.driver.cuGraphMemcpyNodeGetParams(node))
            nbytes = copy.WidthInBytes * max(1, copy.Height) * max(1, copy.Depth)
            ends = ("from", copy.srcMemoryType, copy.srcDevice), ("to", copy.dstMemoryType, copy.dstDevice)
            for way, memory, address in ends:
                if _is_on_host(memory, address):
                    message = f"it copies {nbytes} bytes {way} the host's memory"
                    raise CaptureRefused(f"{message}, and a replay would use the same address")


def _is_on_host(memory: Any, address: Any) -> bool:
    types = cuda.driver.CUmemorytype
    if memory != types.CU_MEMORYTYPE_UNIFIED:
        return bool(memory == types.CU_MEMORYTYPE_HOST)
    attribute = cuda.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, kind = cuda.driver.cuPointerGetAttribute(attribute, address)
    return bool(error) or kind != types.CU_MEMORYTYPE_DEVICE  # CUDA does not know pageable memory of the host


def addresses(graph: Any) -> dict[int, str]:
    """All numbers of eight bytes among the arguments of the driver's ``graph``: the addresses are among them.

    Returns:
        for each number the name of an operation that got it.
    """
    kinds = cuda.driver.CUgraphNodeType
    names: dict[int, str] = {}
    for node, kind in nodes(graph):
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            parameters = check(cuda.driver.cuGraphKernelNodeGetParams(node))
            name = cuda.kernel_name(parameters.func)
            for argument in _arguments(parameters):
                words = memoryview(argument)[: len(argument) // 8 * 8].cast("B").cast("Q")
                names |= dict.fromkeys(words, name)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = check(cuda.driver.cuGraphMemcpyNodeGetParams(node))
            names |= dict.fromkeys((int(copy.srcDevice), int(copy.dstDevice)), "a copy")
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            names[int(check(cuda.driver.cuGraphMemsetNodeGetParams(node)).dst)] = "a fill"
    return names


class KernelScalars:
    """The scalars of a captured graph of the driver, set before each launch. See Note [Kernel scalars]."""

    def __init__(self, graph: Any, sentinels: Sequence[int]) -> None:
        kernel_type = cuda.driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        kernels = [_KernelNode(node, sentinels) for node, kind in nodes(graph) if kind == kernel_type]
        self._kernels = [kernel for kernel in kernels if kernel.places]
        found = {sentinels[scalar] for kernel in self._kernels for scalar, _ in kernel.places}
        self.missing = frozenset(sentinels) - found
        self._last: tuple[int, ...] = ()  # that were set

    def __len__(self) -> int:
        """How many kernels get some."""
        return len(self._kernels)

    def bind(self, executable: Any) -> None:
        self._updates = [kernel.updater(executable) for kernel in self._kernels]

    def set(self, scalars: Sequence[int]) -> None:
        if (now := tuple(scalars)) == self._last:
            return
        self._last = ()
        for kernel, update in zip(self._kernels, self._updates):
            for scalar, place in kernel.places:
                place.value = scalars[scalar]
            (error,) = update()
            if error:
                refused("new scalars for a kernel of a graph", error)
        self._last = now


class _KernelNode:
    """One kernel node, with copies of the arguments that it was captured with."""

    def __init__(self, node: Any, sentinels: Sequence[int]) -> None:
        self._node, self._parameters = node, check(cuda.driver.cuGraphKernelNodeGetParams(node))
        self._arguments = _arguments(self._parameters)  # the pointers do not keep them alive
        self._pointers = (ctypes.c_void_p * len(self._arguments))(*map(ctypes.addressof, self._arguments))
        self.places = [  # scalars, and where among the arguments they belong
            (scalar, ctypes.c_uint64.from_buffer(argument, offset))
            for argument in self._arguments
            for offset in range(0, len(argument) - 7, 8)
            for scalar, sentinel in enumerate(sentinels)
            if int.from_bytes(argument[offset : offset + 8], "little") == sentinel
        ]

    def updater(self, executable: Any) -> Any:
        self._parameters.kernelParams = ctypes.addressof(self._pointers)
        return cuda.kernel_node_updater(executable, self._node, self._parameters)


def _arguments(parameters: Any) -> list[ctypes.Array[Any]]:
    """Copies of the arguments that a kernel was captured with; none if the driver does not tell."""
    arguments: list[ctypes.Array[Any]] = []
    if not parameters.kernelParams:
        return arguments
    while True:
        error, _, size = cuda.driver.cuFuncGetParamInfo(parameters.func, len(arguments))
        if error:
            return arguments if error == cuda.driver.CUresult.CUDA_ERROR_INVALID_VALUE else []  # there are no more
        at = parameters.kernelParams + ctypes.sizeof(ctypes.c_void_p) * len(arguments)
        pointer = ctypes.c_void_p.from_address(at)
        arguments.append(ctypes.create_string_buffer(ctypes.string_at(pointer.value or 0, size), size))
