"""What the package relies on in PyTorch's CUDA support and in the CUDA driver."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from thunder_cg.compat import cuda

cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="a build without CUDA")
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
on_gpu = lambda test: gpu[0](gpu[1](test))  # noqa: E731
MB = 2**20


@cuda_build
def test_names_of_pytorch():
    for name in (
        "_cuda_getDevice",
        "_cuda_getCurrentRawStream",
        "_cuda_isCurrentStreamCapturing",
        "_cuda_beginAllocateCurrentThreadToPool",
        "_cuda_endAllocateToPool",
        "_cuda_releasePool",
        "_cuda_clearCublasWorkspaces",
        "_cuda_memorySnapshot",
        "_construct_storage_from_data_pointer",
        "_construct_CUDA_Tensor_From_Storage_And_Metadata",
    ):
        assert callable(getattr(torch._C, name)), name
    for name in ("raw_cuda_graph", "raw_cuda_graph_exec", "instantiate"):
        assert callable(getattr(torch.cuda.CUDAGraph, name)), name


def test_names_of_the_driver():
    driver = pytest.importorskip("cuda.bindings.driver")
    assert cuda.driver is driver
    for name in (
        "cuCtxGetCurrent",
        "cuCtxSetCurrent",
        "cuFuncGetParamInfo",
        "cuGraphChildGraphNodeGetGraph",
        "cuGraphExecKernelNodeSetParams",
        "cuGraphGetNodes",
        "cuGraphKernelNodeGetParams",
        "cuGraphLaunch",
        "cuGraphMemcpyNodeGetParams",
        "cuGraphNodeGetType",
        "cuLaunchKernel",
        "cuPointerGetAttribute",
        "cuStreamCreate",
        "cuStreamGetCaptureInfo",
        "cuThreadExchangeStreamCaptureMode",
    ):
        assert callable(getattr(driver, name)), name
    parameters = driver.CUDA_KERNEL_NODE_PARAMS()
    for name in ("func", "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes"):
        assert hasattr(parameters, name)
    parameters.kernelParams = 4096
    assert parameters.kernelParams == 4096


def test_check():
    driver = pytest.importorskip("cuda.bindings.driver")
    done, failed = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert cuda.check((done,)) == [] and cuda.check((done, 1)) == 1 and cuda.check((done, 1, 2)) == [1, 2]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        cuda.check((failed, None))


def test_one_owner():
    x = torch.ones(4)
    assert cuda.has_one_owner(x)
    view = x[1:]
    assert not cuda.has_one_owner(x) and cuda.has_one_owner(view)  # whoever has the view has the base as well
    other = x.detach()
    assert not cuda.has_one_owner(view)
    del view, other
    assert cuda.has_one_owner(x)


@cuda_build
def test_a_snapshot_leaves_ids_alone():
    """PyTorch's snapshot of one pool frees the numbers of its id: a crash, later, anywhere."""
    pool = (int("1000"), int("2000"))  # not constants of this module, which others refer to as well
    before = [sys.getrefcount(number) for number in pool]
    for _ in range(3):
        assert cuda.pool_segments([pool]) == []
    assert [sys.getrefcount(number) for number in pool] == before


@on_gpu
def test_memory_goes_to_the_pool_and_comes_back():
    torch.cuda.init()
    gc.collect()
    pool = cuda.new_pool(0)
    with cuda.use_pool(0, pool):
        inside = torch.empty(MB, dtype=torch.uint8, device="cuda")
        with cuda.leave_pool(0, pool):
            outside = torch.empty(MB, dtype=torch.uint8, device="cuda")
    (segment,) = cuda.pool_segments([pool])
    addresses = [block["address"] for block in segment["blocks"]]
    assert inside.data_ptr() in addresses and outside.data_ptr() not in addresses
    assert {block["state"] for block in segment["blocks"]} <= {"active_allocated", "inactive"}
    del inside
    cuda.release_pool(0, pool)
    torch.cuda.empty_cache()
    assert cuda.pool_segments([pool]) == []


@on_gpu
@pytest.mark.parametrize("lazy", [lambda t: t, torch.conj, lambda t: t.conj().imag], ids=["plain", "conj", "neg"])
def test_an_alias_owns_nothing(lazy):
    x = lazy(torch.randn(3, 4, dtype=torch.complex64, device="cuda").t()[1:])
    alias = cuda.alias_without_owning(x)
    assert alias.data_ptr() == x.data_ptr() and torch.equal(alias, x) and alias.stride() == x.stride()
    assert (alias.is_conj(), alias.is_neg()) == (x.is_conj(), x.is_neg())
    before = torch.cuda.memory_allocated()
    del x
    assert torch.cuda.memory_allocated() < before
    assert alias.numel()


@on_gpu
def test_device_and_stream():
    torch.cuda.init()
    assert cuda.current_device() == torch.cuda.current_device()
    stream = cuda.new_stream(0)
    assert stream.cuda_stream != cuda.new_stream(0).cuda_stream
    with torch.cuda.stream(stream):
        assert cuda.current_raw_stream(0) == stream.cuda_stream
    assert not cuda.is_current_stream_capturing()


@on_gpu
def test_a_graph_is_launched_by_the_driver():
    pytest.importorskip("cuda.bindings.driver")
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        assert cuda.is_current_stream_capturing()
        x += 1
        node = cuda.last_captured_node(cuda.current_raw_stream(0))
    assert int(cuda.check(cuda.driver.cuGraphGetNodes(cuda.captured_graph(graph)))[1]) == 1
    parameters = cuda.check(cuda.driver.cuGraphKernelNodeGetParams(node))
    graph.instantiate()
    executable = cuda.executable_graph(graph)
    (error,) = cuda.kernel_node_updater(executable, node, parameters)()
    assert not error
    for _ in range(2):
        (error,) = cuda.driver.cuGraphLaunch(executable, cuda.current_raw_stream(0))
        assert not error
    assert x.tolist() == [2, 2, 2, 2]


@on_gpu
def test_kernels_are_compiled():
    pytest.importorskip("cuda.bindings.nvrtc")
    source = 'extern "C" __global__ void set(int* at) { *at = VALUE; }'
    (function,) = cuda.compile_kernels(0, source, ["-DVALUE=7"], ["set"])
    assert function
    with pytest.raises(RuntimeError):
        cuda.compile_kernels(0, "no kernel", [], ["set"])
