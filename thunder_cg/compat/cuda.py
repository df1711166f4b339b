"""What the package uses of PyTorch's CUDA support and of the CUDA driver that is private or differs between versions.

Checked with torch 2.9 to 2.11, and with cuda-bindings 13.5 where it is installed. Importing this module compiles
nothing and does not initialize CUDA. It can be imported where PyTorch is built without CUDA.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from thunder_cg.compat.objects import objects_of, with_subclasses
from thunder_cg.compat.settings import disable_dispatch_modes
from thunder_cg.compat.tensors import autograd_base, is_view, read_as, storage_id, storage_use_count

try:
    from cuda.bindings import driver, nvrtc
except ImportError:  # torch before 2.10 does not install it
    driver = nvrtc = None

PoolId = Any  # two numbers; PyTorch's type for them is private

# The device and the stream of this thread, without the checks of torch.cuda.current_device() and current_stream().
# They need CUDA to be initialized, which a graph implies. Builds without CUDA lack them.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)
is_current_stream_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)


@contextmanager
def hidden_capture(may_know: Callable[[str], bool]) -> Iterator[None]:
    """Inside, `torch.cuda.is_current_stream_capturing` is False for the code of other files than those that may know.

    Libraries ask, and do something else then: Transformers makes masks that it would not make otherwise.
    """
    original = torch.cuda.is_current_stream_capturing

    def is_current_stream_capturing() -> bool:
        return may_know(sys._getframe(1).f_code.co_filename) and original()

    torch.cuda.is_current_stream_capturing = is_current_stream_capturing
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = original


# A private pool of the caching allocator counts its users: the first counts one more, the last one less. Without users,
# its memory is freed.
_begin_allocate: Any = getattr(torch._C, "_cuda_beginAllocateCurrentThreadToPool", None)
end_allocate_to_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
release_pool: Any = getattr(torch._C, "_cuda_releasePool", None)


# Frees the workspaces that PyTorch keeps for cuBLAS and cuBLASLt, of all threads and streams, in use or not.
clear_cublas_workspaces: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)


class OwnGraph(torch.cuda.CUDAGraph):
    """A graph of this package, to tell it from others."""


def check(result: Sequence[Any]) -> Any:
    """The values that a call of the driver or of NVRTC returned; RuntimeError if it returned an error."""
    error, *values = result
    if error:
        raise RuntimeError(f"the CUDA driver refused: {error!r}")
    return values[0] if len(values) == 1 else values


def leave_captures_alone(index: int) -> None:
    """Lets this thread ask for events although another thread captures in the global mode, as users' captures do.

    Otherwise such a question would break the capture. The driver refuses it to a thread without a context, which a new
    thread has not. RuntimeError without cuda-bindings.
    """
    if driver is None:
        raise RuntimeError("cuda-bindings is not installed")
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(index))))))
    check(driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))


def compile_kernels(index: int, source: str, macros: Sequence[str], names: Sequence[str]) -> list[Any]:
    """The driver's functions for kernels in CUDA C++. RuntimeError or OSError if NVRTC is missing or too old."""
    if driver is None:
        raise RuntimeError("cuda-bindings is not installed")
    major, minor = torch.cuda.get_device_capability(index)
    options = [text.encode() for text in (f"--gpu-architecture=sm_{major}{minor}", *macros)]
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    binary = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, binary))
    with torch.cuda.device(index):
        module = check(driver.cuModuleLoadData(binary))
    return [check(driver.cuModuleGetFunction(module, name.encode())) for name in names]


def new_stream(index: int) -> torch.cuda.Stream:
    """A stream that PyTorch hands to nobody else; without the driver, one of the 32 that it hands out in turn."""
    with torch.cuda.device(index):
        if driver is not None:
            torch.cuda.init()
            error, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            if not error:
                return torch.cuda.ExternalStream(int(stream))
        return torch.cuda.Stream()


def captured_graph(graph: torch.cuda.CUDAGraph) -> Any:
    """The driver's graph of a ``CUDAGraph`` that was captured with ``keep_graph=True``."""
    return driver.CUgraph(graph.raw_cuda_graph())


def executable_graph(graph: torch.cuda.CUDAGraph) -> Any:
    """The driver's executable graph of a ``CUDAGraph`` that was instantiated."""
    return driver.CUgraphExec(graph.raw_cuda_graph_exec())


def write_dot(graph: Any, path: str) -> None:
    """Has the driver write a picture of its graph, with all that it knows of each node."""
    flags = driver.CUgraphDebugDot_flags.CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE
    check(driver.cuGraphDebugDotPrint(graph, path.encode(), int(flags)))


def kernel_name(function: Any) -> str:
    """The name of a kernel of a graph, at most 120 characters of it; "a kernel" if the driver does not tell."""
    error, name = driver.cuFuncGetName(function)
    if error:
        return "a kernel"
    readable = torch._C._demangle(bytes(name).decode(errors="replace"))
    return readable if len(readable) <= 120 else f"{readable[:117]}..."


def kernel_node_updater(executable: Any, node: Any, parameters: Any) -> Callable[[], tuple[Any]]:
    """Gives a kernel node of the executable graph what ``parameters`` hold then. Returns the driver's error code."""
    return partial(driver.cuGraphExecKernelNodeSetParams, executable, node, parameters)


def last_captured_node(stream: int) -> Any:
    """The node that the capture under way on the stream has added last."""
    # What else is returned depends on the version of cuda-bindings.
    lists = [part for part in check(driver.cuStreamGetCaptureInfo(stream)) if isinstance(part, list)]
    (node,) = next(part for part in lists if part and isinstance(part[0], driver.CUgraphNode))
    return node


def graph_under_capture(stream: int) -> Any:
    """The driver's graph that the capture under way on the stream is making."""
    return next(part for part in check(driver.cuStreamGetCaptureInfo(stream)) if isinstance(part, driver.CUgraph))


def node_count(graph: Any) -> int:
    """How many nodes the driver's graph has."""
    return int(check(driver.cuGraphGetNodes(graph))[1])


def new_pool(index: int) -> PoolId:
    """The id of a new private pool. The pool exists until `release_pool` was called once."""
    pool: PoolId = torch.cuda.graph_pool_handle()
    _begin_allocate(index, pool)
    end_allocate_to_pool(index, pool)
    return pool


@contextmanager
def use_pool(index: int, pool: PoolId) -> Iterator[None]:
    """Inside, this thread allocates from the pool."""
    _begin_allocate(index, pool)
    try:
        yield
    finally:
        end_allocate_to_pool(index, pool)
        release_pool(index, pool)


@contextmanager
def leave_pool(index: int, pool: PoolId) -> Iterator[None]:
    """Inside `use_pool`: this thread does not allocate from the pool here."""
    end_allocate_to_pool(index, pool)
    try:
        yield
    finally:
        _begin_allocate(index, pool)
        release_pool(index, pool)


def pool_segments(pools: Sequence[PoolId]) -> list[dict[str, Any]]:
    """The segments that these pools reserve on any device, as PyTorch's memory snapshot describes them.

    Asked for one pool, the snapshot (torch 2.9 to 2.11) gives up references to the two numbers of the pool's id that it
    does not own. Numbers past 256 are then freed while the id still holds them. So this asks for all pools.
    """
    everything = torch._C._cuda_memorySnapshot(None)["segments"]
    return [segment for segment in everything if segment["segment_pool_id"] in pools]


def pools_nbytes(pools: Sequence[PoolId]) -> int:
    """Bytes that these pools reserve on any device."""
    return sum(segment["total_size"] for segment in pool_segments(pools))


def pools_with_memory() -> set[PoolId]:
    """The private pools, of whoever, of which somebody owns memory."""
    segments = torch._C._cuda_memorySnapshot(None)["segments"]
    return {tuple(segment["segment_pool_id"]) for segment in segments if segment["active_size"]} - {(0, 0)}


def has_foreign_graphs() -> bool:
    """Whether there is a `CUDAGraph` that is not of this package.

    It looks at all objects, except for those that `gc.freeze` has set apart, and takes a fraction of a second.
    """
    graphs = objects_of(with_subclasses(torch.cuda.CUDAGraph))
    return any(not isinstance(each, OwnGraph) for each in graphs)


def free_nbytes(index: int) -> int:
    """Bytes of the device's memory that nobody has taken, as the driver says."""
    if driver is None:
        return int(torch.cuda.mem_get_info(index)[0])
    # Otherwise the question might break a capture of another thread in the global mode.
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(mode))
    try:
        return int(torch.cuda.mem_get_info(index)[0])
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before))


# ``storage_at(address, device, nbytes)``: a storage of memory that it does not own.
storage_at: Any = getattr(torch._C, "_construct_storage_from_data_pointer", None)


def alias_without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as ``tensor``, in a tensor that does not keep the memory allocated."""
    whole = tensor.untyped_storage()
    metadata = {"dtype": tensor.dtype, "device": tensor.device}
    metadata |= {"size": tensor.size(), "stride": tensor.stride(), "storage_offset": tensor.storage_offset()}
    storage = storage_at(whole.data_ptr(), tensor.device, whole.nbytes())
    alias = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, storage)
    if not (tensor.is_conj() or tensor.is_neg()):  # which the metadata do not hold
        return alias
    return read_as(alias, conj=tensor.is_conj(), neg=tensor.is_neg()).data  # no view, which would hold another tensor


def disown(tensors: Sequence[torch.Tensor]) -> None:
    """Frees the memory of tensors of the caching allocator, which stay tensors of that memory."""
    for tensor in tensors:
        torch._C._free_And_Remove_DeleterFn(tensor.untyped_storage()._cdata)


def storages_owned(tensors: Sequence[torch.Tensor]) -> set[int]:
    """The storages of the caching allocator's memory that no others than these tensors use."""
    bases = [base for tensor in tensors if (base := autograd_base(tensor)) is not None]
    owners = Counter(storage_id(each) for each in {id(each): each for each in (*tensors, *bases)}.values())
    return {
        storage
        for storage, count in owners.items()  # and the storage's object of Python
        if torch._C._has_Standard_Deleter(storage) and storage_use_count(storage) == count + 1
    }


def has_one_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor uses the tensor's memory, besides the base of a view."""
    owners = 3 if is_view(tensor) else 2  # the tensor, its base, and the storage object made here
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == owners)


cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
cudnn_attention_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def is_of_capture(event: torch.cuda.Event) -> bool:
    """Whether an event was recorded last in a capture that is over: CUDA says nothing else about it."""
    try:
        event.query()
    except RuntimeError:
        return True
    return False


def chooses_cudnn_attention(
    device: torch.device,
    layouts: Sequence[tuple[Sequence[int], torch.dtype]],
    is_causal: bool,
    scale: float | None,
    trains: bool,
) -> bool:
    """Whether PyTorch would have cuDNN compute attention, and its derivative if it trains, for tensors like these.

    Args:
        layouts: of query, key, value, and of the mask if there is one: the sizes and the type.
    """
    if device.type == "cuda" and not torch.cuda.is_available():  # a trace for another machine
        return False
    inputs = []  # tensors without memory: PyTorch looks only at what they are like, and takes no fake ones
    with disable_dispatch_modes(), torch.inference_mode(False):
        for size, dtype in layouts:
            storage = storage_at(0, device, math.prod(size) * dtype.itemsize)
            strides = torch.empty(tuple(size), device="meta").stride()
            inputs.append(torch.empty(0, dtype=dtype, device=device).set_(storage, 0, tuple(size), strides))
        query, key, value = (each.requires_grad_(trains) for each in inputs[:3])
        choose: Any = torch._fused_sdp_choice  # its stub lacks arguments
        mask = inputs[3] if len(inputs) > 3 else None
        choice = choose(query, key, value, mask, 0.0, is_causal, scale=scale)
        return bool(choice == SDPBackend.CUDNN_ATTENTION.value)
