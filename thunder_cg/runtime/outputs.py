"""How a region's results reach the caller: at fixed addresses in the pool, as views of inputs, or as copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from thunder_cg.compat.cuda import current_device
from thunder_cg.compat.tensors import autograd_base, empty_strided, is_view, is_zero_tensor, read_as, storage_id
from thunder_cg.runtime.early_outputs import CopiedEarly
from thunder_cg.runtime.tensors import (
    ALIGNMENT,
    address,
    extent,
    is_sparse,
    is_whole,
    pointer,
    tracked_view,
    view_of_storage,
)


@dataclass(frozen=True, slots=True)
class AliasedInput:
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
    def of(cls, arg: int, tensor: torch.Tensor) -> AliasedInput:
        offset, conj = int(tensor.storage_offset()), tensor.is_conj()
        return cls(arg, tensor, address(tensor), pointer(tensor), offset, tensor.dtype, conj)


MakeOutput = Callable[[Sequence[Any]], Any]  # makes a result of the call's arguments


class Outputs:
    """The results of a region, and how a replay hands them to the caller.

    Results that do not stay in the pool are copied out. Those that share memory keep sharing it: there is one copy for
    each storage. Those that are one tensor stay one: of two, autograd would not know that a write to one is a write to
    the other.

    Args:
        produced: the region's results; some may have been copied early. Those to copy out are taken out of the list:
            their memory is given up one by one as they are delivered, so that no two copies of all gradients exist.
        inputs: the inputs that results may be views of.
        copied_out: of each result, whether it is copied out of the pool.
        device: the region's.
        alias: makes of a tensor one that does not own its memory.
        may_lend: of results to copy out, the storages that callers may get as they are: see Note [Lent gradients] and
            Note [Lent results].
    """

    def __init__(
        self,
        produced: list[Any],
        inputs: Sequence[AliasedInput],
        copied_out: Sequence[bool],
        device: torch.device,
        alias: Callable[[torch.Tensor], torch.Tensor],
        may_lend: Callable[[list[torch.Tensor]], Set[int]] | None = None,
    ) -> None:
        self.fixed: list[int] = []  # results that stay at their address in the pool
        self.constants: dict[int, Any] = {}  # results that no replay changes
        self.view_sources: dict[int, int] = {}  # result that is a view of an input -> that input
        self._makers: list[tuple[int, MakeOutput]] = []
        self._same: list[tuple[int, int]] = []  # result to copy out, and an earlier one that is the same tensor
        self._device = device
        early, groups = self._sort(produced, inputs, copied_out)
        self.lent = self._to_lend(groups, may_lend) if may_lend is not None else {}  # results that are lent
        self._copies = [*early, *(_Copy.of(group, alias) for group in groups)]
        self._owned = groups
        for i in (*(i for group in groups for i, _ in group), *self.lent, *(i for i, _ in self._same)):
            produced[i] = None
        self.nbytes = sum(copy.nbytes for copy in self._copies)
        self._are_plain = not any(copy.parts for copy in self._copies)
        self.layouts = [(tuple(s.size()), s.stride(), s.dtype) for s in self.sources()]

    def _sort(
        self, produced: list[Any], inputs: Sequence[AliasedInput], copied_out: Sequence[bool]
    ) -> tuple[list[_Copy], list[list[tuple[int, torch.Tensor]]]]:
        """Decides for each result. Returns what was copied early, in that order, and what is to copy, by storage."""
        by_identity = {id(source.tensor): source for source in reversed(inputs)}
        by_address = {source.address: source for source in reversed(inputs) if source.address}
        first: dict[int, int] = {}
        groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
        early: dict[int, _Copy] = {}
        for i, tensor in enumerate(produced):
            if isinstance(tensor, CopiedEarly):
                assert tensor.tensor is not None
                early[tensor.order] = _Copy.whole(tensor.tensor, i)
            elif is_sparse(tensor):
                tensor = tensor.clone()  # of an eager run, whose memory is the pool's; captures refuse sparse results
                self._is_constant(i, tensor)
            elif not isinstance(tensor, torch.Tensor) or tensor.device != self._device or is_zero_tensor(tensor):
                # None, zeros without memory, or the seed of an attention without dropout, which lives on the host: no
                # replay changes these.
                self._is_constant(i, tensor)
            elif copied_out[i] and (same := first.setdefault(id(tensor), i)) != i:
                self._same.append((i, same))
                if same in self.view_sources:
                    self.view_sources[i] = self.view_sources[same]
            elif (
                source := by_identity.get(id(tensor))
                or by_identity.get(id(autograd_base(tensor)))
                or by_address.get(address(tensor))
            ) is not None:
                self.view_sources[i] = source.arg
                self._makers.append((i, _view_of_input(tensor, source)))
            elif copied_out[i]:
                groups.setdefault(address(tensor) or -1 - i, []).append((i, tensor))
            else:
                self.fixed.append(i)
        return [early[order] for order in sorted(early)], [*groups.values()]

    @staticmethod
    def _to_lend(
        groups: list[list[tuple[int, torch.Tensor]]], may_lend: Callable[[list[torch.Tensor]], Set[int]]
    ) -> dict[int, torch.Tensor]:
        """Takes the results that may be lent out of those to copy.

        A result that another one is a view of is copied, since autograd has to know that: see `_Part`.
        """
        filled = [group for group in groups if address(group[0][1]) and not _has_base(group)]
        storages = may_lend([tensor for group in filled for _, tensor in group])
        lent = [group for group in filled if storage_id(group[0][1]) in storages]
        groups[:] = [group for group in groups if not any(group is each for each in lent)]
        return {i: tensor for group in lent for i, tensor in group}

    def _is_constant(self, i: int, value: Any) -> None:
        self.constants[i] = value
        self._makers.append((i, lambda args: value))

    def sources(self) -> list[torch.Tensor]:
        """The memory to copy out, one tensor for each storage; first what was copied early, in that order."""
        return [copy.source for copy in self._copies]

    @property
    def copied(self) -> list[int]:
        """The results that are copies, in the order of `allocate`, if they are plain."""
        return [copy.result for copy in self._copies]

    @property
    def is_plain(self) -> bool:
        """Whether every result is a copy of one tensor, or stays where it is."""
        return not self._makers and not self._same and self._are_plain

    def disown(self) -> None:
        """Gives up the memory of what is copied out, without a first delivery."""
        self._owned.clear()

    def deliver_owned(self, results: list[Any], args: Sequence[Any], borrowed: Set[int] | None = None) -> set[int]:
        """The first delivery: like the others, but gives up the memory of what is copied out piece by piece.

        Args:
            borrowed: addresses of memory that is not the results' own. A result with memory of its own that cannot be
                copied, because too little memory is left, is handed out as it is. None: no result is.

        Returns:
            addresses of the memory that was handed out as it is.
        """
        handed_out = set()
        for copy in self._copies:
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
        """Puts what is copied out into ``results``, on new memory, which is returned and is still to be filled."""
        if not (self._are_plain and (self._device.type == "cpu" or current_device() == self._device.index)):
            return [copy.allocate(results) for copy in self._copies]
        empty = empty_strided(self._device.type)
        targets = []
        for copy, layout in zip(self._copies, self.layouts):
            results[copy.result] = target = empty(*layout)
            targets.append(target)
        return targets

    def derive(self, results: list[Any], args: Sequence[Any]) -> None:
        """Puts the views of arguments, and what never changes, into ``results``; ``args`` are the call's."""
        for i, make in self._makers:
            results[i] = make(args)
        for i, same in self._same:
            results[i] = results[same]


def _has_base(group: Sequence[tuple[int, torch.Tensor]]) -> bool:
    """Whether one of the results is a view of another."""
    results = {id(tensor) for _, tensor in group}
    return any(id(autograd_base(tensor)) in results for _, tensor in group)


def _view_of_input(tensor: torch.Tensor, source: AliasedInput) -> MakeOutput:
    """What makes of an argument the view that ``tensor`` was of the captured one."""
    arg, size, stride, dtype = source.arg, tensor.size(), tensor.stride(), tensor.dtype
    if tensor is source.tensor:
        return lambda args: args[arg]
    shift = tensor.storage_offset() - source.offset
    shift_bytes = pointer(tensor) - source.pointer
    conj, neg = tensor.is_conj(), tensor.is_neg()

    def simple(of: torch.Tensor) -> torch.Tensor:
        return of.as_strided(size, stride, of.storage_offset() + shift)

    def general(of: torch.Tensor) -> torch.Tensor:
        at = pointer(of) - address(of) + shift_bytes
        return read_as(tracked_view(of, dtype, at // dtype.itemsize, size, stride), conj=conj, neg=neg)

    make = simple if source.dtype == dtype and source.conj == conj and not neg else general
    if not is_view(tensor):
        return lambda args: make(args[arg]).detach()
    if autograd_base(tensor) is source.tensor:
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
        view = tracked_view(memory, self.dtype, self.offset, self.size, self.stride)
        view = read_as(view, conj=self.is_conj, neg=self.is_neg)
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
        spans = [extent(t) for _, t in group if t.numel()]
        start = min((first for first, _ in spans), default=address(tensor))
        start -= (start - address(tensor)) % ALIGNMENT
        stop = max((last for _, last in spans), default=start)
        result = {id(t): j for j, t in group}
        parts = [
            _Part(
                j,
                result.get(id(autograd_base(t))),
                t.dtype,
                (pointer(t) - start) // t.element_size() if t.numel() else 0,
                t.size(),
                t.stride(),
                t.is_conj(),
                t.is_neg(),
                is_view(t),
            )
            for j, t in group
        ]
        parts.sort(key=lambda part: part.base is not None)  # what others are views of comes first
        whole = view_of_storage(tensor, torch.uint8, start - address(tensor), (stop - start,), (1,))
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


def copy_out(*tensors: Any) -> list[Any]:
    """Copies that outlive the arena."""
    copies: list[Any] = []
    for tensor in tensors:
        results = [None]
        device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
        Outputs([tensor], (), [True], device, torch.Tensor.detach).deliver_owned(results, ())
        copies += results
    return copies
