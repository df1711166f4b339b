"""Private names of torch.distributed. Checked with torch 2.10 and 2.11."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import DebugLevel, FakeWork, Store, Work, _resolve_process_group, get_debug_level
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import _maybe_wrap_tensor as wrap_functional, wait_tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _coalescing_manager, _get_process_group_store, _world
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thunder_cg.compat.tensors import storage_id, storage_use_count, tensors_in, tree_map_only
from thunder_cg.errors import SkipReason

# The group that functional collectives know by a name.
group_named: Callable[[Any], ProcessGroup] = _resolve_process_group
# The store that the ranks of a group share, with a prefix of the group's own.
store: Callable[[ProcessGroup], Store] = _get_process_group_store


def capture_problem(group: ProcessGroup, device_type: str) -> SkipReason | None:
    """Why a graph on such a device cannot hold collectives of ``group``; None if it can.

    On a CPU, the tape records calls of any backend.
    """
    if device_type == "cpu":
        return None
    try:  # get_backend says "undefined" of a group that init_process_group() makes by default
        backend = group._get_backend(torch.device(device_type)).name()
    except RuntimeError:
        backend = f"no backend for {device_type}"
    if "nccl" not in backend:
        problem = f"the group communicates through {backend}, and only NCCL's kernels can be captured"
        return SkipReason(problem, "use NCCL")
    return capture_problem_of_settings()


def capture_problem_of_settings() -> SkipReason | None:
    """Why no graph can hold collectives with the variables that are set; None if one can."""
    name, value = setting_of_nccl("BLOCKING_WAIT")
    if value.lower() in ("1", "t", "true", "y", "yes"):
        return SkipReason(f"{name}={value} makes the host wait in each collective", f"unset {name}")
    if get_debug_level() == DebugLevel.DETAIL:
        problem = "TORCH_DISTRIBUTED_DEBUG=DETAIL has the hosts of all ranks meet in each collective"
        return SkipReason(problem, "set it to INFO")
    return None


def setting_of_nccl(name: str) -> tuple[str, str]:
    """The variable that PyTorch reads for NCCL, by its new or its old name, and its value; "" if none is set."""
    variables = [f"{prefix}_{name}" for prefix in ("TORCH_NCCL", "NCCL")]
    variable = next((each for each in variables if each in os.environ), variables[0])
    return variable, os.environ.get(variable, "")


def groups() -> list[ProcessGroup]:
    """The groups that this process is in, oldest first."""
    return [*_world.pg_map]


def default_group() -> weakref.ref[ProcessGroup] | None:
    """The group that collectives use by default, by which ranks are numbered. One that is made anew is another one."""
    group = _world.default_pg
    return None if group is None else weakref.ref(group)


def progress(group: ProcessGroup) -> dict[str, int]:
    """For each kind of device, how many collectives PyTorch has issued there: those in a replayed graph do not count.

    A backend that does not count, such as one that is not torch's own, is left out.
    """
    counts: dict[str, int] = {}
    for device in group._device_types:
        with suppress(RuntimeError):
            backend: Any = group._get_backend(device)  # torch's stub lacks the method
            counts[device.type] = backend._get_sequence_number_for_group()
    return counts


# Why no graph of a whole step holds that, and the fix.
_DDP = SkipReason(
    "DistributedDataParallel counts gradients in C++ as they come, and a capture that fails would leave it in between",
    "take thunder.distributed.ddp instead of it",
)
# Between its hooks, fully_shard keeps which parameters a module has, gathered ones or shards; their storages, which are
# empty while there are shards; the order of modules; the callback at the end of the backward; gradients that are not
# synchronized yet; on CUDA its streams, and events of the last gather and reduction. A step ends with shards. But a
# capture that fails ends between the hooks, and nothing but the rest of the backward leads out.
_FSDP = SkipReason(
    "PyTorch's FSDP gathers and frees parameters in hooks, and a capture that fails would leave these in between",
    "compile its modules with thunderfx, which captures their forward and backward, or take thunder.distributed.fsdp",
)
_POINT_TO_POINT = ("recv", "recv_anysource", "send")
_METHODS = (
    *("_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce", "barrier"),
    *("allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast"),
    *("gather", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter"),
    *_POINT_TO_POINT,
)
_OF_WORK = ("wait", "is_completed")
_OF_DDP = DistributedDataParallel.forward.__code__
_OF_OBJECTS = {
    function.__wrapped__.__code__
    for name, function in vars(torch.distributed).items()
    if "_object" in name and hasattr(function, "__wrapped__")
}
_CALLS_OF_OPERATORS = (torch._ops.OpOverload.__call__.__code__, torch._ops.OpOverloadPacket.__call__.__code__)


@contextmanager
def told_of_collectives(
    begins: Callable[[str, FrameType, tuple[Any, ...]], None],
    has_begun: Callable[[Work, FrameType], None],
    uses: Callable[[str, FrameType, Work], None],
) -> Iterator[None]:
    """Inside, on all threads, the arguments are called when a group communicates, and before somebody waits for that.

    A profiler of Python is told of such methods, which are C++, before Python 3.12 only.

    Args:
        begins: gets the name of the group's method, the frame that calls it, and the method's arguments, before it.
        has_begun: gets what the method returns, if that is to be waited for, and the frame.
        uses: gets ``"wait"`` or ``"is_completed"``, the frame, and the work, before that method of the work.
    """
    listener = begins, has_begun, uses
    with _telling:
        if not _listeners:
            _tell()
        _listeners.append(listener)
    try:
        yield
    finally:
        with _telling:
            _listeners.remove(listener)
            if not _listeners:
                _untold.close()


_Listener = tuple[Callable[..., None], Callable[..., None], Callable[..., None]]
_listeners: list[_Listener] = []  # several threads may capture at a time
_untold = ExitStack()  # gives the methods back
_telling = threading.Lock()


def _tell() -> None:
    """Has all listeners told by the methods."""

    def told(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            frame, listeners = sys._getframe(1), [*_listeners]
            if name in _OF_WORK:
                for _, _, uses in listeners:
                    uses(name, frame, self)
                return original(self, *args, **kwargs)
            for begins, _, _ in listeners:
                begins(name, frame, (*args, *kwargs.values()))
            work = original(self, *args, **kwargs)
            for _, has_begun, _ in listeners if isinstance(work, Work) else ():
                has_begun(work, frame)
            return work

        return method

    for kind, names in ((ProcessGroup, _METHODS), (Work, _OF_WORK), (FakeWork, _OF_WORK)):
        for name in names:
            if name in vars(kind):
                _untold.callback(setattr, kind, name, vars(kind)[name])
                setattr(kind, name, told(getattr(kind, name), name))


def is_torchs_own(frame: FrameType) -> bool:
    """Whether a frame is of `torch.distributed`, which keeps the group and the tensors in variables of known names."""
    return frame.f_globals is vars(torch.distributed.distributed_c10d)


def uncapturable(frame: FrameType, method: str | None = None) -> SkipReason | None:
    """Why no graph of a whole step holds what is called in a frame; None if it is nothing of that kind.

    Args:
        method: of a group, that the frame calls.
    """
    if method in ("barrier", "monitored_barrier"):
        return SkipReason(f"the host waits for the other ranks ({method})", "do that outside of the step")
    if method in _POINT_TO_POINT:
        return SkipReason(f"it communicates from point to point ({method})", "do that outside of the step")
    if frame.f_code is _OF_DDP:
        return _DDP
    if frame.f_code in _OF_OBJECTS:
        problem = f"it communicates objects of Python ({frame.f_code.co_name})"
        return SkipReason(problem, "do that outside of the step, or communicate a tensor")
    return None


def functional_call(frame: FrameType) -> tuple[str, ProcessGroup | None, tuple[Any, ...]] | None:
    """What a frame calls of the functional operators: its name, the group, None for a wait, and the arguments."""
    if frame.f_code not in _CALLS_OF_OPERATORS:
        return None
    operator, args, kwargs = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
    if not (name := str(operator)).startswith("_c10d_functional"):
        return None
    values = (*args, *kwargs.values())
    group = kwargs.get("group_name", next((value for value in reversed(args) if isinstance(value, str)), None))
    return name.split(".")[1], None if group is None else group_named(group), values


def may_be_uncapturable(code: CodeType) -> bool:
    """Whether `uncapturable` has something to say of some frames with this code."""
    return code is _OF_DDP or code in _OF_OBJECTS or code in _CALLS_OF_OPERATORS


def why_not_in_step(module: torch.nn.Module) -> SkipReason | None:
    """Why no graph of a whole step holds a module of this class; None if that is no reason."""
    if isinstance(module, DistributedDataParallel):
        return _DDP
    is_fsdp = any(kind.__module__.startswith("torch.distributed.fsdp.") for kind in type(module).__mro__)
    return _FSDP if is_fsdp else None


def makes_dtensors(hook: Any) -> bool:
    """Whether a hook is one by which a module that is parallelized has DTensors as its inputs, or as its results."""
    module = getattr(hook, "__module__", None)
    return module in ("torch.distributed.tensor._api", "torch.distributed.tensor.parallel.style")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What has the memory of a DTensor: its part on this rank. Any other tensor is its own."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def layout_of_dtensor(tensor: torch.Tensor) -> Any:
    """What says which part of a DTensor this rank has: the same object while that is so. None for any other tensor."""
    return tensor._spec if isinstance(tensor, DTensor) else None


def allows_implicit_replication() -> bool:
    """Whether DTensors take plain tensors for replicated ones on this thread."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def is_distributed() -> bool:
    """Whether this process is one of several that communicate."""
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def has_other_ranks(group: ProcessGroup) -> bool:
    """Whether this rank has others to agree with. A group with PyTorch's fake backend only says that it has some."""
    backend, _ = _world.pg_map.get(group, ("", None))
    return group.size() > 1 and backend != "fake"


def is_alive(group: ProcessGroup) -> bool:
    """Whether the group has not been destroyed. A group that is made anew is another object."""
    return group in _world.pg_map


def ranks(group: ProcessGroup) -> list[int]:
    """Those in the group, as the default group numbers them; as the group does if it is gone."""
    return [*_world.pg_group_ranks.get(group, range(group.size()))]


def functional_collectives(name: str) -> Iterator[tuple[Any, bool]]:
    """The functional collectives of PyTorch that have the name, each with whether it has a gradient."""
    for namespace in ("_c10d_functional", "_c10d_functional_autograd"):
        if (operator := getattr(getattr(torch.ops, namespace), name, None)) is not None:
            yield operator, has_gradient(operator)


def has_gradient(functional_collective: Any) -> bool:
    """Whether PyTorch has registered one: Inductor computes zeros for others."""
    name = str(functional_collective).replace(".", "::")
    return "_autograd::" in name or bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"))


def timeout(group: ProcessGroup) -> float:
    """Seconds after which torch gives up a collective of the group on GPUs; the default if the group does not say."""
    try:
        limit = group._get_backend(torch.device("cuda")).options._timeout
    except (RuntimeError, AttributeError):  # a backend that is not torch's own
        limit = default_pg_timeout
    return float(limit.total_seconds())


@functools.cache
def before_shutdown(callback: Callable[..., None]) -> None:
    """Has ``callback`` called before any process group is shut down or aborted, which waits for all graphs to go.

    It gets the group, and ``may_wait``: whether the group's work ends. An abort is for work that never does.
    ``destroy_process_group`` calls the group's method, which a user may do as well, so the methods are wrapped.
    """
    for name in ("shutdown", "abort"):
        called_before = functools.partial(callback, may_wait=name == "shutdown")
        setattr(ProcessGroup, name, _with_callback(getattr(ProcessGroup, name), called_before))


def _with_callback(method: Callable[..., Any], callback: Callable[[ProcessGroup], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        callback(self)
        return method(self, *args, **kwargs)

    return called


def communicates(operator: Any) -> bool | None:
    """Whether an operator, in a dispatch mode, communicates; None for one that is not of torch.distributed."""
    if not operator.namespace.startswith("_c10d_functional"):
        return True if operator.namespace == "c10d" else None
    return any(argument.name == "group_name" for argument in operator._schema.arguments)


def begun(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator that communicates returns in a dispatch mode, as if its work were done; zeros if it is new."""
    if operator.namespace == "c10d":
        work = FakeWork().boxed()
        return work if len(operator._schema.returns) == 1 else (args[0], work)
    if operator._schema.is_mutable:
        return kwargs.get("out", args[0])
    inputs, device = tree_map_only(torch.Tensor, lambda t: t.to("meta"), args), tensors_in(args)[0].device
    output = operator._op(*inputs, **kwargs)  # a call of the operator itself would be told of
    return tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), output)


def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an operator that communicates, in a dispatch mode, and waits for it. Returns its tensors."""
    storages = [storage_id(tensor) for tensor in tensors_in((args, kwargs))]
    before = [*map(storage_use_count, storages)]
    output = operator(*args, **kwargs)
    if operator.namespace != "c10d":
        output = tree_map_only(torch.Tensor, wait_tensor, output)
    else:
        *tensors, work = output if isinstance(output, tuple) else (output,)
        Work.unbox(work).wait()
        output = tensors
        del work
    await_gloo(lambda: all(storage_use_count(each) <= then for each, then in zip(storages, before)), 1.0)
    return output


def await_gloo(has_let_go: Callable[[], bool], limit: float) -> None:
    """Waits for so many seconds at most: gloo's thread lets go of tensors a moment after their collective is done."""
    deadline = time.monotonic() + limit
    while not has_let_go() and time.monotonic() < deadline:
        time.sleep(0)


class _SharedWork:
    """The work of several collectives. It keeps their tensors alive, so it is dropped once it was waited for."""

    def __init__(self) -> None:
        self.work: Any = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


@contextmanager
def coalesce(group: ProcessGroup) -> Iterator[Callable[[Any], Any]]:
    """Asynchronous collectives of one kind in ``group`` inside become one, at the end.

    Yields what makes the future that each returned inside, a pair of its work and its result, the real one afterwards.
    All of them are to be waited for on one stream.
    """
    shared = _SharedWork()
    try:
        with _coalescing_manager(group, async_ops=True) as shared.work:
            yield lambda future: (shared, future[1])
    finally:
        _world.pg_coalesce_state.pop(group, None)  # PyTorch leaves it there after an error


def coalescing() -> AbstractContextManager[Any]:
    """Collectives of one kind inside become one, at the end; for the tools."""
    manager: AbstractContextManager[Any] = _coalescing_manager()
    return manager
