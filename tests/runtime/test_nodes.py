"""Which graphs are refused for their nodes, with a stand-in for the driver that only describes nodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import thunder
import torch
from support import regions, same

from thunder_cg import cudagraph_transform
from thunder_cg.compat import cuda
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.cuda import nodes

driver = pytest.importorskip("cuda.bindings.driver")

KINDS, MEMORY, DONE = driver.CUgraphNodeType, driver.CUmemorytype, driver.CUresult.CUDA_SUCCESS
KERNEL, MEMCPY, HOST = KINDS.CU_GRAPH_NODE_TYPE_KERNEL, KINDS.CU_GRAPH_NODE_TYPE_MEMCPY, KINDS.CU_GRAPH_NODE_TYPE_HOST
PAGEABLE, PINNED, ON_DEVICE = 0x1000, 0x2000, 0x3000


def copy(source, target, source_at=0, target_at=0):
    content = SimpleNamespace(
        srcMemoryType=source,
        srcDevice=source_at,
        dstMemoryType=target,
        dstDevice=target_at,
        WidthInBytes=12,
        Height=1,
        Depth=1,
    )
    return MEMCPY, content


class Driver:
    """A graph is a list of nodes, each a pair of its type and what is in it."""

    CUgraphNodeType, CUmemorytype, CUpointer_attribute = KINDS, MEMORY, driver.CUpointer_attribute

    @staticmethod
    def cuGraphGetNodes(graph, count=0):
        return DONE, graph[:count], len(graph)

    @staticmethod
    def cuGraphNodeGetType(node):
        return DONE, node[0]

    @staticmethod
    def cuGraphChildGraphNodeGetGraph(node):
        return DONE, node[1]

    @staticmethod
    def cuGraphMemcpyNodeGetParams(node):
        return DONE, node[1]

    @staticmethod
    def cuPointerGetAttribute(attribute, address):
        assert attribute == driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        known = {PINNED: MEMORY.CU_MEMORYTYPE_HOST, ON_DEVICE: MEMORY.CU_MEMORYTYPE_DEVICE}
        return (DONE, known[address]) if address in known else (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)


DEVICE, ON_HOST, UNIFIED = MEMORY.CU_MEMORYTYPE_DEVICE, MEMORY.CU_MEMORYTYPE_HOST, MEMORY.CU_MEMORYTYPE_UNIFIED


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ((KERNEL, None), ""),
        (copy(DEVICE, DEVICE), ""),
        (copy(UNIFIED, UNIFIED, ON_DEVICE, ON_DEVICE), ""),
        (copy(ON_HOST, DEVICE), "12 bytes from the host"),
        (copy(DEVICE, ON_HOST), "12 bytes to the host"),
        (copy(UNIFIED, DEVICE, PINNED), "12 bytes from the host"),
        (copy(UNIFIED, DEVICE, PAGEABLE), "12 bytes from the host"),
        (copy(DEVICE, UNIFIED, 0, PAGEABLE), "12 bytes to the host"),
        ((HOST, None), "calls a function on the host"),
    ],
)
def test_host_memory(node, said, monkeypatch):
    monkeypatch.setattr(cuda, "driver", Driver)
    inside = (KINDS.CU_GRAPH_NODE_TYPE_GRAPH, [(KERNEL, None), node])
    for graph in ([node], [(KERNEL, None), node], [(KERNEL, None), inside, (KERNEL, None)]):
        if said:
            with pytest.raises(CaptureRefused, match=said):
                nodes.refuse_host_memory(graph)
        else:
            nodes.refuse_host_memory(graph)


def test_counts(monkeypatch):
    monkeypatch.setattr(cuda, "driver", Driver)
    memset, empty = KINDS.CU_GRAPH_NODE_TYPE_MEMSET, KINDS.CU_GRAPH_NODE_TYPE_EMPTY
    inside = (KINDS.CU_GRAPH_NODE_TYPE_GRAPH, [(KERNEL, None), (memset, None)])
    graph = [copy(DEVICE, DEVICE), (KERNEL, None), inside, (KERNEL, None), (empty, None), (HOST, None)]
    assert nodes.counts(graph) == {"kernel": 3, "memcpy": 1, "memset": 1, "other node": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("way", ["from", "to"])
def test_a_copy_that_a_capture_admits(way):
    """Pinned memory is copied without waiting, and the graph would read, or write, that memory in each replay."""
    pinned, x = torch.ones(64, pin_memory=True), torch.zeros(64, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        y = x * 2
        if way == "from":
            y.copy_(pinned, non_blocking=True)
        else:
            pinned.copy_(y, non_blocking=True)
    with pytest.raises(CaptureRefused, match=f"256 bytes {way} the host's memory"):
        nodes.refuse_host_memory(cuda.captured_graph(graph))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_region_with_such_a_copy_stays_eager():
    """``allow=`` does not make a graph replay the host's memory as it was at the capture."""
    staged = torch.zeros(64, pin_memory=True)
    like = lambda x: thunder.core.proxies.TensorProxy(like=x)  # noqa: E731
    executor = thunder.extend.OperatorExecutor("staging")
    thunder.extend.register_executor(executor)
    stage = executor.register_operator("stage", fn=lambda x: x + staged.to("cuda", non_blocking=True), meta=like)
    try:
        jfn = thunder.jit(
            lambda x: torch.tanh(stage(x)) * 2,
            executors=[executor, *thunder.get_default_executors()],
            transforms=[cudagraph_transform(allow=["stage"])],
        )
        for step in range(5):
            torch.cuda.synchronize()
            staged.fill_(step)
            x = torch.randn(64, device="cuda")
            same(jfn(x), torch.tanh(x + step) * 2)
        (region,) = regions(jfn)
        assert region["captures"] == 0 and "from the host's memory" in region["failure"]
    finally:
        thunder.extend.deregister_executor(executor)
