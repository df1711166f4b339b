"""The nodes of a captured CUDA graph, and which of them no replay may run.

Note [Memory of the host]
    A library may copy between the device and the host's memory, or call a function there, without waiting for either,
    and a capture admits that. But the graph keeps the host's address: a replay reads, or writes, whatever lies there by
    then. So a graph that holds such a node is not used, whatever a rule or ``allow=`` says of the operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.cuda import copy_nodes as copies
from thunder_cg.runtime.cuda.copy_nodes import check

driver: Any = copies.driver  # type: ignore[attr-defined]


def nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Each node of a driver's graph, and of the graphs inside of it, with its type."""
    _, count = check(driver.cuGraphGetNodes(graph))
    found, _ = check(driver.cuGraphGetNodes(graph, count))
    kind_of, child = driver.cuGraphNodeGetType, driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH
    for node in found[:count]:
        kind = check(kind_of(node))
        if kind == child:
            yield from nodes(check(driver.cuGraphChildGraphNodeGetGraph(node)))
        else:
            yield node, kind


def handle(graph: torch.cuda.CUDAGraph) -> Any:
    """The driver's graph of one that was captured with ``keep_graph=True``."""
    return driver.CUgraph(graph.raw_cuda_graph())


def refuse_memory_of_the_host(graph: Any) -> None:
    """Raises `CaptureRefused` if a replay of the driver's ``graph`` would touch the host's memory."""
    kinds = driver.CUgraphNodeType
    host, memcpy = kinds.CU_GRAPH_NODE_TYPE_HOST, kinds.CU_GRAPH_NODE_TYPE_MEMCPY
    for node, kind in nodes(graph):
        if kind == host:
            raise CaptureRefused("a library that it uses calls a function on the host, which a replay would call again")
        if kind == memcpy:
            copy = check(driver.cuGraphMemcpyNodeGetParams(node))
            ends = ("from", copy.srcMemoryType, copy.srcDevice), ("to", copy.dstMemoryType, copy.dstDevice)
            for way, memory, address in ends:
                if _is_on_host(memory, address):
                    nbytes = copy.WidthInBytes * max(1, copy.Height) * max(1, copy.Depth)
                    raise CaptureRefused(
                        f"it copies {nbytes} bytes {way} the host's memory, and a replay would use the same address"
                    )


def _is_on_host(memory: Any, address: Any) -> bool:
    types = driver.CUmemorytype
    if memory != types.CU_MEMORYTYPE_UNIFIED:
        return bool(memory == types.CU_MEMORYTYPE_HOST)
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, found = driver.cuPointerGetAttribute(attribute, address)
    return bool(error) or found != types.CU_MEMORYTYPE_DEVICE  # memory that CUDA does not know is the host's
