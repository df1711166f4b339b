"""A recording: what one call of a trace pair captured, and everything that has to hold for it to be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._dynamo import guards as _c_guards

from thunder_cg.compat.torch import kernel_settings
from thunder_cg.errors import CaptureRefused, ReplayRefused
from thunder_cg.runtime.arena import Arena
from thunder_cg.runtime.backend import Graph, Pool, copy_all
from thunder_cg.runtime.cuda.copy_nodes import get_device, is_dense, is_whole, span
from thunder_cg.runtime.early_outputs import CopiedEarly

# Kernels choose vector widths by the alignment of their operands, and with them the order of a sum.
ALIGNMENT = 16

# Typed loosely, because torch's stubs are too narrow: one takes no lists of int, the other no list[Tensor].
_tensor_guards: Callable[..., _c_guards.TensorGuards] = _c_guards.TensorGuards
same_pointers: Callable[..., bool] = torch._C._tensors_data_ptrs_at_indices_equal


def metadata_guard(tensors: Sequence[torch.Tensor], *, strides: bool = True) -> _c_guards.TensorGuards:
    """PyTorch's C++ check of all that tensors are besides addresses and values; no tensor may occur twice."""
    return _tensor_guards(
        *tensors,
        dynamic_dims_sizes=[list(t.size()) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) if strides else [None] * t.dim() for t in tensors],
    )


def _empty_strided(device: torch.device) -> Callable[..., torch.Tensor]:
    """`torch.empty_strided` for the current device, without its dispatch, which takes half of its time."""
    empty: Callable[..., torch.Tensor] = getattr(_c_guards, f"_empty_strided_{device.type}")
    return empty


def address(tensor: torch.Tensor | None) -> int:
    """Where the tensor's storage begins; 0 if it has no memory, as the derivative of `torch.sgn` has none."""
    return 0 if tensor is None or tensor._is_zerotensor() else tensor.untyped_storage().data_ptr()


def is_sparse(value: Any) -> bool:
    """Is it a tensor that is made of several, so that it has no address?"""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def address_if_any(value: Any) -> int:
    """`address` of whatever it is: 0 for what is no tensor, or made of several."""
    return address(value) if isinstance(value, torch.Tensor) and not is_sparse(value) else 0


def layout(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """What kernels can see of a tensor besides its address and its values."""
    if tensor is None:
        return ()
    return (
        tuple(tensor.size()),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.data_ptr() % ALIGNMENT,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


class Guard:
    """The check, in few C++ calls, that a call's tensors are what was captured.

    Args:
        tensors: the tensors at capture; None where an operator made none, though Thunder says that it does.
        static: positions whose address is baked in.
        written: positions that the regions write. Memory that a written input shares with another is only seen by
            graphs if both are static, so no other sharing is admitted.
    """

    __slots__ = (
        "_absent",
        "_leaves",
        "_same",
        "_shared",
        "_unique",
        "aligned",
        "metadata",
        "pointers",
        "settings",
        "static",
    )

    def __init__(self, tensors: Sequence[torch.Tensor | None], static: Sequence[int], written: frozenset[int]) -> None:
        present = [(i, t) for i, t in enumerate(tensors) if t is not None]
        self._absent = [i for i, t in enumerate(tensors) if t is None]
        first: dict[int, int] = {}
        self._same = [(i, j) for i, t in present if (j := first.setdefault(id(t), i)) != i]
        self._unique = list(first.values()) if len(first) < len(tensors) else None
        unique = [t for i, t in present if first[id(t)] == i]
        self.metadata = metadata_guard(unique)
        fixed = set(static)
        self.static = list(static)
        self.pointers = [t.data_ptr() if t is not None and i in fixed else None for i, t in enumerate(tensors)]
        self.aligned = [(i, t.data_ptr() % ALIGNMENT) for i, t in present if i not in fixed]
        self._shared = Sharing.of(tensors, fixed, written) if written else None
        self._leaves = [(i, t.is_leaf) for i, t in present if i in written and t.requires_grad]
        self.settings = kernel_settings()

    def holds(self, tensors: list[Any]) -> bool:
        """Whether a graph captured with the guard's tensors may be replayed with these."""
        try:
            unique = tensors if self._unique is None else [tensors[i] for i in self._unique]
            if not same_pointers(tensors, self.pointers, self.static) or (
                unique and not self.metadata.check(*unique)  # before a sparse tensor is asked for its address
            ):
                return False
            for i, rest in self.aligned:
                if tensors[i].data_ptr() % ALIGNMENT != rest:
                    return False
            for i, j in self._same:
                if tensors[i] is not tensors[j]:
                    return False
            for i in self._absent:
                if tensors[i] is not None:
                    return False
            for i, is_leaf in self._leaves:
                if tensors[i].is_leaf != is_leaf:
                    return False
            return (self._shared is None or self._shared.admits(tensors)) and kernel_settings() == self.settings
        except (AttributeError, TypeError, RuntimeError):  # no tensor where there was one, or one without memory
            return False

    @property
    def is_simple(self) -> bool:
        """Whether addresses, metadata, alignment and settings are all there is to check."""
        return self._unique is None and not self._same and not self._absent and self._shared is None

    def moved(self, tensors: Sequence[Any]) -> list[int]:
        """Positions of the static tensors that are at another address now."""
        return [i for i in self.static if tensors[i] is None or tensors[i].data_ptr() != self.pointers[i]]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which memory the inputs that are copied must not share."""

    copied: tuple[int, ...]
    written: frozenset[int]
    static_all: frozenset[int]  # addresses of the static tensors' storages
    static_written: frozenset[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None], static: set[int], written: frozenset[int]) -> Sharing:
        return cls(
            tuple(i for i in range(len(tensors)) if i not in static),
            written,
            frozenset(address(tensors[i]) for i in static) - {0},
            frozenset(address(tensors[i]) for i in static & written) - {0},
        )

    def admits(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        read: set[int] = set()
        wrote: set[int] = set()
        for i in self.copied:
            at = address(tensors[i])
            if not at:
                continue
            if i in self.written:
                if at in wrote or at in read or at in self.static_all:
                    return False
                wrote.add(at)
            elif at in wrote or at in self.static_written:
                return False
            else:
                read.add(at)
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    return torch._debug_has_internal_overlap(tensor) != 0 and not is_dense(tensor)


def _view(
    memory: torch.Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor of any type on the storage of ``memory``; ``offset`` in elements of ``dtype``."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)


def _tracked_view(
    tensor: torch.Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Like `_view`, but autograd knows it for a view of ``tensor``: a write to one shows in the version of both."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    tensor = tensor._neg_view() if tensor.is_neg() else tensor
    if tensor.dtype != dtype:
        items = tensor.untyped_storage().nbytes() // tensor.element_size()
        items -= items % max(1, dtype.itemsize // tensor.element_size())
        tensor = tensor.as_strided((items,), (1,), 0).view(dtype)
    return tensor.as_strided(size, stride, offset)


def static_buffer(pool: Pool, like: torch.Tensor) -> torch.Tensor:
    """Memory of the pool with the layout of ``like``, alignment included, for a graph to read in its place.

    It is an inference tensor only if ``like`` is: those have no version, which would show what a capture writes.
    """
    item = like.element_size()
    shift = like.data_ptr() % ALIGNMENT // item
    with torch.inference_mode(like.is_inference()):
        memory = pool.memory(max(1, (shift + span(like)) * item))
        buffer = _view(memory, like.dtype, shift, like.size(), like.stride())
        if like.is_conj():
            buffer = buffer.conj()
        return buffer._neg_view() if like.is_neg() else buffer


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The stretch of memory below a tensor that overlaps itself, which ``copy_`` can write to."""
    return tensor.as_strided((span(tensor),), (1,))


@dataclass(frozen=True, slots=True)
class Load:
    """An input that is copied to where its graph reads it."""

    arg: int
    buffer: torch.Tensor
    flat: bool  # it overlaps itself, so the memory below it is copied

    def source(self, args: Sequence[Any]) -> torch.Tensor:
        return _flat(args[self.arg]) if self.flat else args[self.arg]

    @property
    def target(self) -> torch.Tensor:
        return _flat(self.buffer) if self.flat else self.buffer


@dataclass(frozen=True, slots=True)
class Source:
    """An input that results of its region may be views of, as it was when the region ran.

    It holds the tensor, because a result could get the identity of one that died on the way.
    """

    arg: int
    tensor: torch.Tensor
    address: int  # of the storage
    pointer: int  # of the first element
    offset: int
    dtype: torch.dtype
    conj: bool

    @classmethod
    def of(cls, arg: int, tensor: torch.Tensor) -> Source:
        offset, conj = int(tensor.storage_offset()), tensor.is_conj()
        return cls(arg, tensor, address(tensor), tensor.data_ptr(), offset, tensor.dtype, conj)


def plain(args: Sequence[Any], written: Set[int]) -> list[Any]:
    """The arguments as warm-ups and captures see them, without history or class.

    They require grad if they did: ``matmul`` chooses its kernel by that, even where no gradients are recorded. Only
    what is written does not, as Thunder refuses to write to a leaf that requires grad. And those that are one tensor
    stay one, as an attention of a tensor with itself has another kernel.
    """
    made = {
        (id(arg), i in written): arg.detach().requires_grad_(arg.requires_grad and i not in written)
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor)
    }
    return [made.get((id(arg), i in written), arg) for i, arg in enumerate(args)]


def replaced(args: Sequence[Any], buffers: Sequence[torch.Tensor | None]) -> list[Any]:
    """The arguments, with buffers where there are some."""
    return [arg if new is None else new.requires_grad_(arg.requires_grad) for arg, new in zip(args, buffers)]


def place(
    pool: Pool, args: Sequence[Any], static: frozenset[int], same: Mapping[int, int]
) -> tuple[list[Load], list[Any]]:
    """Memory of the pool for each argument that is not static, by argument, and before it what goes there.

    Args:
        same: arguments that are the same tensor as another one, which is static or comes before, and that one.
    """
    loads: list[Load] = []
    buffers: list[Any] = [None] * len(args)
    for i, arg in enumerate(args):
        if i in same:
            buffers[i] = buffers[same[i]]
        elif i not in static and arg is not None:
            if arg._is_zerotensor():  # products with other zeros may differ in sign
                raise CaptureRefused(f"argument {i} is a tensor of zeros without memory")
            buffers[i] = static_buffer(pool, arg)
            loads.append(Load(i, pool.alias(buffers[i]), overlaps_itself(arg)))
    return loads, buffers


Placing = Callable[[], tuple[list[Load], list[Any]]]  # `place` for the arguments of one region
Output = Callable[[Sequence[Any]], Any]


class Outputs:
    """How a region's results reach the caller: as fixed addresses, as views of inputs, or as copies.

    Results that leave are copied, and those that share memory keep sharing it: one copy per storage. Those that are one
    tensor stay one: of two, autograd would not know that what is written to one is written to the other.
    """

    __slots__ = (
        "_are_plain",
        "_constants",
        "_device",
        "_layouts",
        "_makers",
        "_new",
        "_owned",
        "_same",
        "_sources",
        "fixed",
        "nbytes",
    )

    def __init__(
        self,
        produced: list[Any],
        sources: Sequence[Source],
        leaves: Sequence[bool],
        device: torch.device,
        alias: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Looks at what a region produced.

        Args:
            produced: its results, some of which may have departed. Those that leave are taken out of the list: their
                memory is given up one by one, as they are delivered for the first time, so that all gradients never
                exist twice.
            sources: the inputs that results may be views of.
            leaves: of each result, whether it leaves the arena.
            device: the region's.
            alias: makes of a tensor one that does not own its memory.
        """
        by_identity = {id(source.tensor): source for source in reversed(sources)}
        by_address = {source.address: source for source in reversed(sources) if source.address}
        self.fixed: list[int] = []  # results that stay at their address in the arena
        self._constants: dict[int, Any] = {}
        self._sources: dict[int, int] = {}  # result that is a view of an input -> that input
        self._makers: list[tuple[int, Output]] = []
        self._same: list[tuple[int, int]] = []  # result that leaves, and an earlier one that is the same tensor
        first: dict[int, int] = {}
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        departed: dict[int, _Copy] = {}
        for i, tensor in enumerate(produced):
            if isinstance(tensor, CopiedEarly):
                assert tensor.tensor is not None
                departed[tensor.order] = _Copy.whole(tensor.tensor, i)
                continue
            if is_sparse(tensor):
                self._constants[i] = tensor = tensor.clone()  # of a run, whose memory is the arena's; none is captured
                self._makers.append((i, _constant(tensor)))
                continue
            if not isinstance(tensor, torch.Tensor) or tensor.device != device or tensor._is_zerotensor():
                # None, zeros without memory, or the seed of an attention without dropout, which lives on the host: no
                # replay changes these.
                self._constants[i] = tensor
                self._makers.append((i, _constant(tensor)))
                continue
            if leaves[i] and (same := first.setdefault(id(tensor), i)) != i:
                self._same.append((i, same))
                if same in self._sources:
                    self._sources[i] = self._sources[same]
            elif (
                source := by_identity.get(id(tensor))
                or by_identity.get(id(tensor._base))
                or by_address.get(address(tensor))
            ) is not None:
                self._sources[i] = source.arg
                self._makers.append((i, _view_of_input(tensor, source)))
            elif leaves[i]:
                groups.setdefault(address(tensor) or -1 - i, []).append((i, tensor))
            else:
                self.fixed.append(i)
        early = [departed[order] for order in sorted(departed)]
        self._new = [*early, *(_Copy.of(group, alias) for group in groups.values())]
        self._owned = [*groups.values()]
        for i in (*(i for group in groups.values() for i, _ in group), *(i for i, _ in self._same)):
            produced[i] = None
        self.nbytes = sum(copy.nbytes for copy in self._new)
        self._are_plain = not any(copy.parts for copy in self._new)
        self._device = device
        self._layouts = [(tuple(s.size()), s.stride(), s.dtype) for s in self.sources()]

    def constants(self) -> dict[int, Any]:
        """Results that no replay changes, and what they are."""
        return self._constants

    def view_sources(self) -> dict[int, int]:
        """Results that are views of inputs, and of which."""
        return self._sources

    def sources(self) -> list[torch.Tensor]:
        """What leaves: the memory to copy, one tensor for each storage; first what departed, in that order."""
        return [copy.source for copy in self._new]

    @property
    def is_plain(self) -> bool:
        """Whether every result is a copy of one tensor, or stays where it is."""
        return not self._makers and not self._same and self._are_plain

    def disown(self) -> None:
        """Gives up the memory of what leaves, without a first delivery."""
        self._owned.clear()

    def deliver_owned(self, results: list[Any], args: Sequence[Any], borrowed: Set[int] | None = None) -> set[int]:
        """The first delivery: like the others, but gives up the memory of what leaves piece by piece.

        Args:
            borrowed: where memory begins that is not the results' own. What has its own and cannot be copied, as there
                is too little left, is handed out as it is. None: nothing is.

        Returns:
            where memory begins that was handed out as it is.
        """
        handed_out = set()
        for copy in self._new:
            try:
                copy.allocate(results).copy_(copy.source)
            except Exception:
                if borrowed is None or address(copy.source) in borrowed:
                    raise
                handed_out.add(address(copy.source))
                for i, tensor in self._owned[0]:
                    results[i] = tensor.detach()
            del self._owned[0]
        self.derive(results, args)
        return handed_out

    def allocate(self, results: list[Any]) -> list[torch.Tensor]:
        """Puts what leaves into ``results``, on new memory, which is returned, and is still to be filled."""
        if self._are_plain:
            if self._device.type == "cpu" or get_device() == self._device.index:
                empty = _empty_strided(self._device)
                targets = [empty(*layout) for layout in self._layouts]
            else:
                targets = [torch.empty_like(copy.source) for copy in self._new]
            for copy, target in zip(self._new, targets):
                results[copy.result] = target
            return targets
        return [copy.allocate(results) for copy in self._new]

    def derive(self, results: list[Any], args: Sequence[Any]) -> None:
        """Puts the views of arguments, and what never changes, into ``results``; ``args`` are the call's."""
        for i, make in self._makers:
            results[i] = make(args)
        for i, same in self._same:
            results[i] = results[same]


def _constant(value: Any) -> Output:
    return lambda args: value


def _view_of_input(tensor: torch.Tensor, source: Source) -> Output:
    """What makes of an argument the view that ``tensor`` was of the captured one."""
    arg, size, stride, dtype = source.arg, tensor.size(), tensor.stride(), tensor.dtype
    if tensor is source.tensor:
        return lambda args: args[arg]
    shift = tensor.storage_offset() - source.offset
    shift_bytes = tensor.data_ptr() - source.pointer
    conj, neg = tensor.is_conj(), tensor.is_neg()

    def simple(of: torch.Tensor) -> torch.Tensor:
        return of.as_strided(size, stride, of.storage_offset() + shift)

    def general(of: torch.Tensor) -> torch.Tensor:
        at = of.data_ptr() - address(of) + shift_bytes
        view = _tracked_view(of, dtype, at // dtype.itemsize, size, stride)
        view = view.conj() if conj else view
        return view._neg_view() if neg else view

    make = simple if source.dtype == dtype and source.conj == conj and not neg else general
    if not tensor._is_view():
        return lambda args: make(args[arg]).detach()
    if tensor._base is source.tensor:
        return lambda args: make(args[arg])
    return lambda args: make(args[arg].detach())


@dataclass(frozen=True, slots=True)
class _Part:
    """A result that shares its storage with others, which autograd is to know as it knew the captured ones.

    It keeps a gradient that another one is a view of, for one, only as a copy.
    """

    result: int
    base: int | None  # the result that it is a view of
    dtype: torch.dtype
    offset: int  # in elements, from where the storage begins
    size: torch.Size
    stride: tuple[int, ...]
    is_conj: bool
    is_neg: bool
    is_view: bool

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The result as a view of ``memory``, or with the version of ``memory`` alone."""
        view = _tracked_view(memory, self.dtype, self.offset, self.size, self.stride)
        view = view.conj() if self.is_conj else view
        view = view._neg_view() if self.is_neg else view
        return view if self.is_view else view.detach()


@dataclass(frozen=True, slots=True)
class _Copy:
    """Results of one storage, copied out together."""

    source: torch.Tensor
    parts: tuple[_Part, ...]  # empty: source is the result
    result: int
    nbytes: int

    @classmethod
    def of(cls, group: Sequence[tuple[int, torch.Tensor]], alias: Callable[[torch.Tensor], torch.Tensor]) -> _Copy:
        (i, tensor), *others = group
        if not others and is_whole(tensor):
            return cls.whole(alias(tensor), i)
        start = min(t.data_ptr() for _, t in group)
        start -= (start - address(tensor)) % ALIGNMENT
        stop = max(t.data_ptr() + span(t) * t.element_size() for _, t in group)
        result = {id(t): j for j, t in group}
        parts = [
            _Part(
                j,
                result.get(id(t._base)),
                t.dtype,
                (t.data_ptr() - start) // t.element_size(),
                t.size(),
                t.stride(),
                t.is_conj(),
                t.is_neg(),
                t._is_view(),
            )
            for j, t in group
        ]
        parts.sort(key=lambda part: part.base is not None)  # what others are views of comes first
        whole = _view(tensor, torch.uint8, start - address(tensor), (max(stop - start, 0),), (1,))
        return cls(alias(whole), tuple(parts), i, stop - start)

    @classmethod
    def whole(cls, source: torch.Tensor, result: int) -> _Copy:
        """Of one result, which is all of ``source``."""
        return cls(source, (), result, source.numel() * source.element_size())

    def allocate(self, results: list[Any]) -> torch.Tensor:
        """Puts the results on new memory, which is returned, and is still to be filled from ``source``."""
        target = torch.empty_like(self.source)
        if not self.parts:
            results[self.result] = target
        for part in self.parts:
            results[part.result] = part.of(target if part.base is None else results[part.base])
        return target


class RegionGraph:
    """One region of one recording.

    Args:
        loads: inputs to copy before a replay.
        written: arguments that the region may write: what was loaded is copied back.
    """

    __slots__ = (
        "_loads",
        "_stores",
        "check",
        "fixed",
        "graph",
        "guard",
        "guarded",
        "nbytes_in",
        "numbers",
        "outputs",
        "targets",
        "touched",
    )

    graph: Graph
    outputs: Outputs
    fixed: list[Any]  # per result: the address that it stays at, or None
    guard: Guard | None  # for the arguments that were not there when the call began
    guarded: tuple[int, ...]
    numbers: slice  # of the arguments: those after the tensors, see Note [Numbers of a graph]
    check: Any  # what verifies it later, or None

    # Arguments whose version advances: not all that may be written are, nor do all operators say so.
    touched: frozenset[int]

    def __init__(self, loads: Sequence[Load], written: Set[int]) -> None:
        self._loads = tuple(loads)
        self._stores = tuple(load for load in loads if load.arg in written)
        self.touched = frozenset()
        self.numbers = slice(0, 0)
        self.targets = [load.target for load in loads]
        self.nbytes_in = sum(t.numel() * t.element_size() for t in self.targets)

    @property
    def is_simple(self) -> bool:
        """Whether a replay copies arguments in, runs, and copies results out, and nothing else."""
        return self.outputs.is_plain and not (self._stores or self.touched or any(load.flat for load in self._loads))

    @property
    def loaded(self) -> list[int]:
        """The arguments that are copied in."""
        return [load.arg for load in self._loads]

    def admits(self, args: Sequence[Any]) -> bool:
        """Whether the arguments that eager operators made are what was captured."""
        return self.guard is None or self.guard.holds([args[i] for i in self.guarded])

    def load(self, args: Sequence[Any]) -> None:
        """Copies what has to be copied to where the graph reads it, for a capture."""
        copy_all(self.targets, [load.source(args) for load in self._loads])

    def replay(self, args: Sequence[Any]) -> list[Any]:
        """Copies in, runs, copies out, writes back what the region wrote, and hands out the results.

        Raises:
            ReplayRefused: nothing of it happened.
        """
        results = self.fixed.copy()
        try:
            targets = self.outputs.allocate(results)
            sources = [load.source(args) for load in self._loads]
        except Exception as error:
            raise ReplayRefused(error) from error
        self.graph.replay(sources, targets, args[self.numbers])
        if self._stores or not self.outputs.is_plain:
            with torch.no_grad():  # as in a trace, whatever the caller's grad mode is
                for store in self._stores:
                    target = args[store.arg]
                    (target if store.arg in self.touched else target.data).copy_(store.buffer)
                self.outputs.derive(results, args)
        if self.touched:
            stored = {store.arg for store in self._stores}
            torch.autograd.graph.increment_version([args[i] for i in self.touched if i not in stored])
        return results

    def without_running(self, args: Sequence[Any]) -> list[Any]:
        """Results as a replay hands them out, still to be filled."""
        results = self.fixed.copy()
        with torch.no_grad():
            self.outputs.allocate(results)
            self.outputs.derive(results, args)
        return results


@dataclass(slots=True, eq=False)
class TraceRecording:
    """What a recording captured of one of the two traces."""

    guard: Guard
    graphs: list[RegionGraph | None]  # by region; None: that region is eager
    sealed: bool = False


@dataclass(slots=True, eq=False)
class Recording:
    """All graphs of one trace pair for one guard, captured together in one call, in order, in one arena."""

    arena: Arena
    parts: dict[str, TraceRecording] = field(default_factory=dict)  # by the trace's kind
    static: set[str] = field(default_factory=set)  # values that are views of static inputs
    owned: dict[str, torch.Tensor] = field(default_factory=dict)  # saved for a backward that is not captured yet
    dropped: bool = True  # whether no later call may replay it
    incomplete: bool = False  # whether the next call is to record all of it anew, since a region failed
    may_launch_early: bool = True  # whether a call without effects may launch before all its checks are made
