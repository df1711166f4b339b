"""The ``tape`` backend: it behaves as CUDA graphs do, on a machine without a GPU.

It records the ATen calls of a region, replays them into the same addresses, and refuses what CUDA refuses. It fills an
arena with NaN at its release, so that a later use fails a test. It is slower than the region's ops.
"""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from thunder_cg.compat import distributed, operators
from thunder_cg.compat.cuda import storage_at
from thunder_cg.compat.objects import alive, without_garbage_collection
from thunder_cg.compat.settings import disable_dispatch_modes
from thunder_cg.compat.tensors import (
    WeakStorage,
    has_memory,
    has_storage,
    is_wrapper_type,
    is_zero_tensor,
    storage_id,
    tensors_in,
    tree_leaves,
    tree_map_only,
)
from thunder_cg.compat.torch import TorchDispatchMode
from thunder_cg.compat.torch_compile import call_compiled_through
from thunder_cg.errors import CaptureRefused, CudagraphError, ReplayRefused
from thunder_cg.runtime.backend import CopiedOut, Function, HostTimer, Tensors, bits_of, number_of, refuse_missing
from thunder_cg.runtime.early_outputs import EarlyCopier
from thunder_cg.runtime.tensors import address, copy_all

_aten = torch.ops.aten

# Operators that copy a result to the host inside their CUDA kernels' launch code, or read host memory at capture.
# Measured under torch.cuda.set_sync_debug_mode("error") on an H200, torch 2.11.
_HOST_SYNC = {_aten._linalg_svd, _aten._linalg_eigh, _aten.histc, _aten.repeat_interleave, _aten.lift_fresh}
_HOST_SYNC |= {torch.ops.c10d.barrier, torch.ops.c10d.monitored_barrier_}
_MASKED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put}

_A_READ = "reading a tensor's value, as item() does, and bool() for a branch,"
_WAITS = "makes the host wait for data, which a graph cannot hold"

# They change a tensor's shape or strides and no memory. Each recorded call has the tensor as it was at that call.
_RESHAPES = {_aten.as_strided_, _aten.squeeze_, _aten.t_, _aten.transpose_, _aten.unsqueeze_}

# They write running statistics to their arguments, and their schemas do not say so.
_WRITERS = {_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm, _aten.batch_norm_update_stats}

_active = threading.local()
_graphs: weakref.WeakValueDictionary[int, TapeGraph] = weakref.WeakValueDictionary()  # by identity


class TapeBackend:
    name = "tape"
    device_type = "cpu"
    supports_scalar_updates = True
    poisons = True
    runs_captures = True
    capture_lock = nullcontext()  # a capture affects no other thread

    def pool(self, device: torch.device) -> TapePool:
        return TapePool(device)

    def device_nbytes(self, device: torch.device) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def allocated_nbytes(self, device: torch.device) -> tuple[int, int]:
        """PyTorch keeps no statistics of a CPU's memory."""
        return 0, 0

    def give_back(self) -> None:
        """Memory that nobody owns is free already."""

    def memory_apart(self) -> AbstractContextManager[Callable[[], AbstractContextManager[None]]]:
        return nullcontext(nullcontext)

    def storage_uses(self, storage: int) -> int:
        return sum(graph.uses[storage] for graph in alive(_graphs.valuerefs()))

    def busy(self) -> bool:
        return getattr(_active, "tape", None) is not None

    def captured_addresses(self) -> dict[int, str]:
        recorded = ((step.name, tensor) for step in _active.tape.steps for tensor in step.tensors)
        return {tensor.data_ptr(): name for name, tensor in recorded if has_storage(tensor)}

    def captured_nodes(self) -> int:
        return len(_active.tape.steps)

    def fusion(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A dispatch mode cannot see into a compiled fusion: on the tape it is one call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            tape = getattr(_active, "tape", None)
            return fn(*args, **kwargs) if tape is None else tape.record_fusion(fn, args, kwargs)

        return call

    def coalesce(self, group: distributed.ProcessGroup) -> AbstractContextManager[Callable[[Any], Any]]:
        """One call after the other: gloo does not coalesce all kinds."""
        return nullcontext(lambda future: future)

    def order_gradients(self) -> None:
        """A CPU has no streams."""

    def timer(self, device: torch.device) -> HostTimer:
        return HostTimer()

    def watch_collectives(self, groups: Sequence[distributed.ProcessGroup]) -> None:
        """A replay waits for its collectives, and torch for the other ranks."""


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """One recorded call, and the memory that its new results go to."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, torch.Tensor]]  # leaf of the output, the tensor with its memory
    grad: bool = False  # the grad mode at the capture: some kernels compute more in it, such as an LSTM's on a CPU
    # Whether its results, or what it writes to, are inference tensors, to which nobody may write otherwise.
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)

    @property
    def name(self) -> str:
        return getattr(self.fn, "__qualname__", str(self.fn))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What it keeps: its arguments, and then its results."""
        return [*tensors_in((self.args, self.kwargs)), *(tensor for _, tensor in self.results)]

    def numbers(self) -> set[int]:
        """As scalars are given."""
        return {_bits(leaf) for leaf in tree_leaves((self.args, self.kwargs)) if type(leaf) in (int, float)}

    def run(self, args: Any, kwargs: Any) -> Any:
        """Calls the operator, or the fusion, again, without history."""
        with torch.set_grad_enabled(self.grad), operators.below_autograd() if self.grad else nullcontext():
            return self.fn(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _RecordedCopies:
    """Tensors that are copied out at this point."""

    tensors: list[torch.Tensor]
    name: str = "copies out"
    results: tuple[()] = ()

    def numbers(self) -> set[int]:
        return set()


_Step = _RecordedCall | _RecordedCopies


def _bits(number: float) -> int:
    return bits_of([number])[0] if isinstance(number, float) else number


def _poison(storages: Iterable[torch.UntypedStorage]) -> None:
    for storage in storages:
        cast(Any, storage).fill_(0xFF)  # torch's stub of a storage lacks fill_


class _Reuse(TorchDispatchMode):
    """Poisons free memory after each operator, because on a GPU any operator may get that memory."""

    supports_higher_order_operators = True  # which PyTorch would refuse to call otherwise

    def __init__(self, free: Sequence[torch.UntypedStorage]) -> None:
        super().__init__()
        self._free = free

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """For Dynamo, which otherwise leaves a function that is called under a mode to Python from then on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_wrapper_type, types)):  # they call operators with the tensors that they hold
            return NotImplemented
        if torch.is_inference_mode_enabled() and not operators.is_higher_order(
            func
        ):  # in other modes, PyTorch decomposes composite operators itself
            with operators.composite_sees_views(func), self:
                output = func.decompose(*args, **kwargs)
            if output is not NotImplemented:
                return output
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator that is not composite."""
        output = func(*args, **kwargs)
        _poison(self._free)
        return output


class _Tape(_Reuse):
    """Records calls while they run. Afterwards, `undo` restores the memory that was there before."""

    def __init__(self, device: torch.device, free: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(free)
        self._device = device
        self._own: set[int] = set()  # addresses of the storages that the recorded calls allocated
        self._number: torch.Tensor | None = None  # that Python has just put into a tensor
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.steps: list[_Step] = []
        self.is_in_call = False  # whether a recorded call runs now, which what it calls is a part of
        self.may_draw = False  # whether a recorded call may have drawn random numbers
        self.refused: CaptureRefused | None = None  # ends the capture, as on a GPU, though somebody may catch it

    def copy_early(self, tensors: Tensors) -> list[torch.Tensor]:
        """Records an early copy of the tensors. Returns tensors that hold their memory."""
        with disable_dispatch_modes():
            kept = [tensor.detach() for tensor in tensors]
        self.steps.append(_RecordedCopies(kept))
        return kept

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_meta(args, kwargs):  # it touches no memory
            return func(*args, **kwargs)
        try:
            self._refuse(func, args, kwargs)
        except CaptureRefused as refused:
            if _is_called_from_file():
                self.refused = refused
            raise
        if func.overloadpacket in _RESHAPES:
            return func(*args, **kwargs)
        if (communicates := distributed.communicates(func)) is not None:
            return self._record_collective(func, args, kwargs) if communicates else func(*args, **kwargs)
        self.may_draw |= func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags
        writes = operators.is_mutable(func) or func.overloadpacket in _WRITERS
        return self._record(func, args, kwargs, writes=writes, grad=torch.is_grad_enabled())

    def record_fusion(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.may_draw = True
        with disable_dispatch_modes():
            return self._record(fn, args, kwargs, writes=True, grad=False)

    def record_compiled(self, graph: Callable[..., Any], inputs: Sequence[Any], source: str) -> Any:
        """Records a graph that Inductor has compiled, such as one of `torch.compile` in a step."""
        if "_c10d_functional" in source:  # it would communicate here, and nowhere else
            self.refused = CaptureRefused(
                "a graph that Inductor has compiled communicates, which is captured on GPUs only"
            )
            raise self.refused
        return self.record_fusion(lambda *tensors: graph([*tensors]), (*inputs,), {})

    def _record(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, writes: bool, grad: bool
    ) -> Any:
        inputs = tensors_in((args, kwargs))
        if writes:
            for tensor in inputs:
                at = address(tensor)
                if at and at not in self._own and at not in self._before:
                    self._before[at] = (tensor.untyped_storage(), tensor.untyped_storage().clone())
        # Attention has other kernels if query and key are one object, and compiled fusions guard on requires_grad.
        recorded = {id(t): t.detach().requires_grad_(t.requires_grad) for t in inputs}
        recorded_args, recorded_kwargs = tree_map_only(torch.Tensor, lambda t: recorded[id(t)], (args, kwargs))
        self.is_in_call = True
        try:
            output = fn(*args, **kwargs)
        finally:
            self.is_in_call = False
        _poison(self._free)
        results = self._results(output, inputs)
        if results or writes:  # a call without writes and new results made a view, which stays valid
            self.steps.append(_RecordedCall(fn, recorded_args, recorded_kwargs, results, grad))
        return output

    def _record_collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a collective without running it: other ranks may run none now. A replay waits for it at once."""

        def run(*args: Any, **kwargs: Any) -> Any:
            return distributed.run(func, args, kwargs)

        recorded_args, recorded_kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        output = distributed.begun(func, args, kwargs)
        results = self._results(output, tensors_in((args, kwargs)))
        self.steps.append(_RecordedCall(run, recorded_args, recorded_kwargs, results))
        return output

    def _results(self, output: Any, inputs: Tensors) -> list[tuple[int, torch.Tensor]]:
        """The new tensors of an output, with the leaf where each is."""
        addresses, results = {address(t) for t in inputs}, []
        for leaf, tensor in enumerate(tree_leaves(output)):
            if isinstance(tensor, torch.Tensor):
                self._check(tensor)
                if not is_zero_tensor(tensor) and address(tensor) not in addresses:
                    self._own.add(address(tensor))
                    results.append((leaf, tensor.detach()))
        return results

    def _refuse(self, func: Any, args: Any, kwargs: Any) -> None:
        if operators.is_higher_order(func):
            branches = func.name() in ("cond", "while_loop")
            unseen = f"{func.name()} calls functions that the tape does not see: it is captured on GPUs only"
            raise CaptureRefused(f"{_A_READ} {_WAITS}" if branches else unseen)
        packet = func.overloadpacket
        if packet in _MASKED:
            indices = args[1] if len(args) > 1 else kwargs["indices"]
            masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
            # ``x[mask] = 1.0`` with one mask and no other index is `masked_fill` with the number on a GPU.
            is_fill = (
                len(args) > 2 and args[2] is self._number and len(masks) == sum(i is not None for i in indices) == 1
            )
            bad = bool(masks) and not is_fill
        else:
            data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe}
            bad = packet in _HOST_SYNC or not data.isdisjoint(func.tags)
            bad = bad and not (packet is _aten.histc and len(args) == 4 and args[2] != args[3])  # the range is given
            # ``x[0] = 1.0`` lifts the number, which is a fill on a GPU. A list of numbers is a copy from the host.
            bad = bad and not (packet is _aten.lift_fresh and (args[0].dim() == 0 or args[0].numel() == 0))
            self._number = args[0] if packet is _aten.lift_fresh and not bad else None
        if bad:
            what = _A_READ if packet is _aten._local_scalar_dense else func
            raise CaptureRefused(f"{what} {_WAITS}")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._check(leaf)
            elif isinstance(leaf, torch.Generator):
                raise CaptureRefused(f"{func} draws from a generator that the graph does not know")

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self._device.type:
            raise CaptureRefused(f"a tensor on {tensor.device} in a graph on {self._device}")
        if tensor.layout is not torch.strided:
            raise CaptureRefused(f"a tensor with the layout {tensor.layout}, which has no address, in a graph")
        if tensor.is_nested:
            raise CaptureRefused("a nested tensor without strides in a graph", "make it with layout=torch.jagged")

    def undo(self) -> None:
        """A capture executes nothing: restores the memory that recorded calls wrote and did not allocate.

        What was saved first is restored last, since storages may overlap.
        """
        for storage, image in reversed(self._before.values()):
            storage.copy_(image)
        self._before.clear()


def _call_compiled(graph: Callable[..., Any], inputs: Sequence[Any], source: str) -> Any:
    tape = getattr(_active, "tape", None)
    return graph(inputs) if tape is None or tape.is_in_call else tape.record_compiled(graph, inputs, source)


def _is_called_from_file() -> bool:
    """Whether what calls PyTorch is no guard of Dynamo's, which reads numbers on the host and goes on if that fails."""
    frame, folders = inspect.currentframe(), (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame is not None and os.path.isfile(frame.f_code.co_filename)


def _is_meta(args: Any, kwargs: Any) -> bool:
    """Whether an operator makes a tensor without memory, or gets nothing else."""
    is_made = torch.device(kwargs.get("device") or "cpu").type == "meta"  # maybe from one with memory
    return is_made or {tensor.device.type for tensor in tensors_in((args, kwargs))} == {"meta"}


def _copied(tensors: Tensors) -> list[torch.Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(copies, tensors)
    return copies


def _storage_place(tensor: torch.Tensor) -> tuple[int, int]:
    """Which storage a tensor has, and the address at which that begins."""
    return storage_id(tensor), tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


@dataclass(eq=False)
class TapeGraph:
    """The recorded calls."""

    steps: Sequence[_Step]
    free: Sequence[torch.UntypedStorage]  # memory of the arena that nobody owns while they run: any of them may get it
    buffers: Tensors
    copied_out: Tensors
    sentinels: Sequence[int]
    may_miss: bool
    memory_made_later: Callable[[], dict[int, torch.UntypedStorage]]  # for other graphs of the pool
    nbytes: int = 0  # there is no driver

    def __post_init__(self) -> None:
        numbers = [step.numbers() for step in self.steps]
        self._has_sentinel = [not found.isdisjoint(self.sentinels) for found in numbers]
        self.missing: Set[int] = frozenset(self.sentinels).difference(*numbers)
        if not self.may_miss:
            refuse_missing(self.sentinels, self.missing)
        self._is_closed = False
        kept = {id(tensor): tensor for tensor in (*self.tensors(), *self.buffers, *self.copied_out)}
        self.uses = Counter(map(storage_id, filter(has_storage, kept.values())))
        self._places = [(each, *_storage_place(each)) for each in kept.values() if has_memory(each)]
        _graphs[id(self)] = self

    def tensors(self) -> Iterable[torch.Tensor]:
        return [tensor for step in self.steps for tensor in step.tensors]

    def counts(self) -> dict[str, int]:
        return {"op": sum(isinstance(step, _RecordedCall) for step in self.steps)}

    def write_dot(self, path: str) -> None:
        if self._is_closed:
            raise CudagraphError("write_dot: the graph has been destroyed; call the function again")
        with open(path, "w", encoding="utf-8") as file:
            copies = [_RecordedCopies([*self.copied_out])] if self.copied_out else []
            file.writelines(f"{line}\n" for line in _dot([*self.steps, *copies]))

    def close(self, *, may_wait: bool) -> None:
        self._is_closed, self.steps, self._has_sentinel, self._places = True, [], [], []
        _graphs.pop(id(self), None)

    def replay(self, sources: Tensors = (), targets: Tensors = (), scalars: Sequence[int] = ()) -> None:
        if self._is_closed:
            raise ReplayRefused("it has been destroyed")
        for tensor, storage, start in self._places:
            now, there = _storage_place(tensor)
            if now == storage and there != start:
                # As `resize_` does it. Another tensor may have the old memory, where a GPU would read it.
                raise ReplayRefused("a storage that it reads has other memory now")
        by_sentinel = dict(zip(self.sentinels, scalars))
        with torch.no_grad(), operators.below_autocast(), disable_dispatch_modes():
            _poison(self.memory_made_later().values())  # on a GPU, it may be memory that this graph used and gave back
            try:
                targets = [each.data for each in targets]  # versions of what the caller owns advance as in a trace
                copy_all(self.buffers, sources)
            except Exception as error:
                raise ReplayRefused(error) from error
            copied = 0
            for step, has_sentinel in zip(self.steps, self._has_sentinel):
                if isinstance(step, _RecordedCopies):
                    first, copied = copied, copied + len(step.tensors)
                    copy_all(targets[first:copied], step.tensors)
                    # On a GPU, it may have another use from here.
                    _poison(tensor.untyped_storage() for tensor in step.tensors)
                    continue
                args, kwargs = step.args, step.kwargs
                if has_sentinel:
                    args, kwargs = tree_map_only((int, float), partial(_instead, by_sentinel), (args, kwargs))
                with torch.inference_mode(step.inference):
                    output = step.run(args, kwargs)
                    leaves = tree_leaves(output) if step.results else []
                    for leaf, tensor in step.results:
                        _once(tensor, tensor).copy_(_once(leaves[leaf], tensor))
                _poison(self.free)
            copy_all(targets[copied:], self.copied_out[copied:])


def _instead(by_sentinel: Mapping[int, int], number: float) -> float:
    """What a replay has in the place of a number."""
    if (scalar := by_sentinel.get(_bits(number))) is None:
        return number
    return number_of(scalar) if isinstance(number, float) else scalar


def _dot(steps: Sequence[_Step]) -> Iterator[str]:
    """A node for each step, and an edge to it from the last step that made what it reads, or may have written it."""
    yield "digraph tape {"
    makers: dict[int, int] = {}  # of memory, by its address
    for i, step in enumerate(steps):
        results = [tensor for _, tensor in step.results]
        inputs = step.tensors[: len(step.tensors) - len(results)]
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{[*t.shape]}" for t in results or inputs)
        yield f'  {i} [shape=box, label="{step.name}\\n{shapes}"];'
        read = set(map(address, inputs))
        yield from (f"  {maker} -> {i};" for maker in sorted({makers[at] for at in read & makers.keys()}))
        makers.update((address(tensor), i) for tensor in (results or inputs) if isinstance(step, _RecordedCall))
    yield "}"


def _once(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Without the elements that ``like`` has in the same place as others: an expanded tensor cannot be written."""
    for dimension, stride in enumerate(like.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, min(1, like.shape[dimension]))
    return tensor


class TapeLoan:
    """See `Loan`. The tape's tensors have the memory all the time, so callers get a storage of their own for it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.place = storage.data_ptr(), storage.nbytes()
        self._memory = storage
        self._lent: WeakStorage | None = None

    def take(self) -> torch.UntypedStorage | None:
        if self.is_held():
            return None
        address, nbytes = self.place
        storage: Any = storage_at(address, self._memory.device, nbytes)
        storage.kept = self._memory
        self._lent = WeakStorage(storage)
        return cast(torch.UntypedStorage, storage)

    def is_held(self) -> bool:
        return self.has_owner()

    def has_owner(self) -> bool:
        return self._lent is not None and not self._lent.expired()


class TapePool:
    """What the recordings of one arena allocated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[tuple[int, weakref.ref[torch.Tensor]]] = []  # and how many captures were before
        self._captures = 0
        self._free: list[torch.UntypedStorage] = []  # until the arena is released, when all is free
        self._given: set[int] = set()  # the storages of what the ops got that ran last
        self._loans: weakref.WeakSet[TapeLoan] = weakref.WeakSet()

    def enter(self) -> None:
        """There are no streams on a CPU."""

    def reserve(self, nbytes: int) -> None:
        """The system's allocator needs no help."""

    def memory(self, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._given.discard(storage_id(tensor))  # of a storage that has gone
        return tensor

    def warm_up(self, fn: Function, args: Sequence[Any], workspaces_inside: bool = False) -> Sequence[Any]:
        generator = torch.get_rng_state()
        self._note_given(args)
        try:
            copier = EarlyCopier(self._device, _copied, 0, must=False)
            with _Reuse(self._free) if self._free else nullcontext():
                return copier.finish(fn(*args, copier))
        except torch.OutOfMemoryError:
            torch.set_rng_state(generator)
            raise

    def capture(
        self,
        fn: Function,
        args: Sequence[Any],
        buffers: Tensors = (),
        copied_out: CopiedOut | None = None,
        sentinels: Sequence[int] = (),
        may_miss: bool = False,
    ) -> tuple[TapeGraph, Sequence[Any]]:
        tape = _Tape(self._device, free := tuple(self._free))
        self._note_given(args)
        generator = torch.get_rng_state()
        sees_inductor = call_compiled_through(_call_compiled)
        _active.tape = tape
        try:
            copier = EarlyCopier(self._device, tape.copy_early, 0)
            with without_garbage_collection(), tape:  # as on a GPU: what it calls is no part of what is captured
                outputs = fn(*args) if copied_out is None else copier.finish(fn(*args, copier))
            if call_compiled_through(_call_compiled) and not sees_inductor:
                raise CaptureRefused("Inductor was loaded in the capture, so what it has compiled was not seen")
            if tape.refused is not None:
                raise tape.refused
        finally:
            _active.tape = tape.refused = None  # its frames hold the tensors of the capture
            tape.undo()
            if tape.may_draw:  # other threads draw from it, too
                torch.set_rng_state(generator)
        self._note_made([tensor for step in tape.steps for _, tensor in step.results])
        targets = copied_out(outputs) if copied_out is not None else ()
        self._captures += 1
        later = partial(self._not_held, self._captures)
        return TapeGraph(tape.steps, free, buffers, targets, sentinels, may_miss, later), outputs

    def _note_made(self, tensors: Tensors) -> None:
        own = [tensor for tensor in tensors if storage_id(tensor) not in self._given]
        self._tensors += [(self._captures, weakref.ref(tensor)) for tensor in own]

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The alias may own the memory, because the CPU's allocator never hands owned memory out."""
        alias = tensor.detach()
        self._note_made([alias])
        return alias

    def _note_given(self, args: Sequence[Any]) -> None:
        """What the ops are given is not the pool's to poison: another arena may have it, which is still held then."""
        self._given = {storage_id(tensor) for tensor in tensors_in(args) if has_storage(tensor)}

    def _storages(self, captures: int = 0) -> dict[int, torch.UntypedStorage]:
        """By address: the memory that the pool has got after so many captures."""
        self._tensors = [(then, ref) for then, ref in self._tensors if ref() is not None]
        alive = [tensor for then, ref in self._tensors if then >= captures and (tensor := ref()) is not None]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in alive}

    def _not_held(self, captures: int = 0) -> dict[int, torch.UntypedStorage]:
        """`_storages` but of results that callers have."""
        held = {loan.place[0] for loan in self._loans if loan.is_held()}
        return {at: storage for at, storage in self._storages(captures).items() if at not in held}

    def loan(self, tensor: torch.Tensor) -> TapeLoan:
        loan = TapeLoan(tensor.untyped_storage())
        self._loans.add(loan)
        return loan

    def forget(self, storage: torch.UntypedStorage) -> None:
        self._free.append(storage)
        _poison([storage])

    def owned(self, tensors: Tensors) -> Set[int]:
        storages = self._storages()
        return {storage_id(tensor) for tensor in tensors if tensor.untyped_storage().data_ptr() in storages}

    def disown(self, tensors: Tensors) -> None:
        """The CPU's allocator never hands owned memory out."""

    def move(self, tensors: Tensors) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storage.resize_(storage.nbytes())  # allocates and copies
        moved = set(map(storage_id, tensors))  # so have the tensors of graphs, which are dropped with these
        self._tensors = [
            (then, ref)
            for then, ref in self._tensors
            if (alive := ref()) is not None and storage_id(alive) not in moved
        ]

    def poison(self, spared: Tensors = ()) -> None:
        self._free.clear()
        kept = {tensor.untyped_storage().data_ptr() for tensor in spared}
        _poison(storage for at, storage in self._not_held().items() if at not in kept)

    def trim(self) -> bool:
        """Memory that nobody owns is free already."""
        return True

    def ranges(self) -> list[tuple[int, int]]:
        return [(start, start + storage.nbytes()) for start, storage in self._storages().items()]

    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages().values())

    def workspaces(self) -> dict[Any, int]:
        return {}

    def close(self) -> None:
        self._tensors.clear()
