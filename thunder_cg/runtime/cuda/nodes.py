"""The nodes of a captured CUDA graph, and which of them no replay may run.

Note [Host memory]
    A library may copy between the device's and the host's memory, or call a function on the host, without waiting for
    either. A capture accepts both, and the graph keeps the host's address. A replay then reads or writes whatever is at
    that address by then. So a graph that holds such a node is refused, whatever a rule or ``allow=`` says of the
    operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from thunder_cg.compat import cuda
from thunder_cg.compat.cuda import check
from thunder_cg.errors import CaptureRefused


def nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Each node of a driver's graph, and of its child graphs, with its type."""
    driver = cuda.driver
    _, count = check(driver.cuGraphGetNodes(graph))
    listed, _ = check(driver.cuGraphGetNodes(graph, count))
    for node in listed[:count]:
        kind = check(driver.cuGraphNodeGetType(node))
        if kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from nodes(check(driver.cuGraphChildGraphNodeGetGraph(node)))
        else:
            yield node, kind


def kernel_nodes(graph: Any) -> Iterator[Any]:
    """Each kernel node of a driver's graph."""
    return (node for node, kind in nodes(graph) if kind == cuda.driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)


def refuse_host_memory(graph: Any) -> None:
    """Raises `CaptureRefused` if a replay of the driver's ``graph`` would touch the host's memory."""
    kinds = cuda.driver.CUgraphNodeType
    host, memcpy = kinds.CU_GRAPH_NODE_TYPE_HOST, kinds.CU_GRAPH_NODE_TYPE_MEMCPY
    for node, kind in nodes(graph):
        if kind == host:
            raise CaptureRefused("a library that it uses calls a function on the host, which a replay would call again")
        if kind == memcpy:
            copy = check(cuda.driver.cuGraphMemcpyNodeGetParams(node))
            ends = ("from", copy.srcMemoryType, copy.srcDevice), ("to", copy.dstMemoryType, copy.dstDevice)
            for way, memory, address in ends:
                if _is_on_host(memory, address):
                    nbytes = copy.WidthInBytes * max(1, copy.Height) * max(1, copy.Depth)
                    raise CaptureRefused(
                        f"it copies {nbytes} bytes {way} the host's memory, and a replay would use the same address"
                    )


def _is_on_host(memory: Any, address: Any) -> bool:
    types = cuda.driver.CUmemorytype
    if memory != types.CU_MEMORYTYPE_UNIFIED:
        return bool(memory == types.CU_MEMORYTYPE_HOST)
    attribute = cuda.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, kind = cuda.driver.cuPointerGetAttribute(attribute, address)
    return bool(error) or kind != types.CU_MEMORYTYPE_DEVICE  # CUDA does not know pageable memory of the host
