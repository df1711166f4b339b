"""Arguments that share a storage, where something is written in place.

Thunder (0.2.6) then reads the first of them in the place of the others, reshaped. That is right where all have the same
elements in the same order. It is wrong, or raises, for other parts of the storage, such as the rows of a batch, and for
a transposed view. It also takes positions among the arguments of the call for positions among the inputs of the trace.
So here it gets those that are the same elements. Others must have no element in common with one that is written, and
the prologue checks that all lie as they did.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import read
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compilation import arguments_of_compilation, mark_aliases_with
from thunder_cg.compat.tensors import has_storage, storage_id
from thunder_cg.compat.thunder import TraceCtx, TraceProvenance, from_trace
from thunder_cg.errors import SharedMemoryError
from thunder_cg.executor import executor
from thunder_cg.fastpath.prologue import PrologueChecks, unused_name
from thunder_cg.runtime.tensors import extent

Layout = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, str]  # offset in bytes, sizes, strides, ...
Group = list[tuple[int, torch.Tensor]]  # of one storage: positions among the inputs, and tensors


def told_apart(prologue: TraceCtx, computation: TraceCtx) -> TraceCtx:
    """The prologue, with checks of how arguments share memory, if something is written in place.

    Raises:
        SharedMemoryError: two arguments have some elements in common, and others not, or in another order, and one of
            them is written.
    """
    groups = _groups(prologue)
    if not groups:
        return prologue
    ops = read(computation)
    aliasing = Aliasing.of(ops)
    known = (op.index for op in ops.ops if op.index not in aliasing.opaque)  # others get the arguments themselves
    written = frozenset[str]().union(*map(aliasing.writes.__getitem__, known))
    if not written:
        return prologue
    inputs = prologue.bound_symbols[-1].args[0][0]
    for group in groups:
        names = {i: aliasing.sets.get(inputs[i].name) for i, _ in group}
        _refuse_overlaps(group, {i for i, name in names.items() if name in written})
        layouts = [layout(tensor) for _, tensor in group]
        prologue = _with_check(prologue, [inputs[i] for i, _ in group], SharingCheck(layouts))
    return prologue


def _groups(prologue: TraceCtx) -> list[Group]:
    """The arguments that Thunder compiles for that share a storage with another one."""
    checks = PrologueChecks(prologue)
    call = arguments_of_compilation() if checks.cache_info.get("alias_tensor_indices") else None
    if call is None:
        return []
    groups: dict[int, Group] = {}
    for i, proxy in enumerate(prologue.bound_symbols[-1].args[0][0]):
        lookup = checks.lookups.get(getattr(proxy, "name", ""))
        value = checks.value(lookup.path, *call) if lookup is not None else None
        if type(value) is torch.Tensor and value.layout is torch.strided and has_storage(value):
            groups.setdefault(storage_id(value), []).append((i, value))
    return [group for group in groups.values() if len(group) > 1]


def _mark_aliases(prologue: TraceCtx, computation: TraceCtx, found: list[list[int]]) -> TraceCtx:
    """Thunder's own way, of arguments that are the same elements."""
    same = [[i for i, _ in each] for group in _groups(prologue) for each in _classes(group)] if found else []
    return compat.insert_alias_updates(computation, [each for each in same if len(each) > 1])


mark_aliases_with(_mark_aliases)


class SharingCheck:
    """Whether arguments of one storage lie as they did when Thunder compiled: AssertionError if not."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._expected = _relative(layouts)

    def __call__(self, *tensors: torch.Tensor) -> None:
        assert _relative([layout(tensor) for tensor in tensors]) == self._expected, "they share memory in another way"


def layout(tensor: torch.Tensor) -> Layout:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    once_read = ", conjugated" * tensor.is_conj() + ", negated" * tensor.is_neg()  # as ``x.conj()`` is
    return offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, once_read


def _relative(layouts: Sequence[Layout]) -> list[Layout]:
    first = layouts[0][0]
    return [(offset - first, *others) for offset, *others in layouts]  # type: ignore[misc]


def _with_check(prologue: TraceCtx, proxies: Sequence[Any], check: SharingCheck) -> TraceCtx:
    trace = from_trace(prologue)
    symbol = executor.bind(unused_name("cudagraph_check_sharing", prologue), check, proxies, None, has_effect=True)
    trace.bound_symbols = [*prologue.bound_symbols[:-1], symbol, prologue.bound_symbols[-1]]
    trace.set_provenance(TraceProvenance("Check of how arguments share memory"))
    return trace


def _classes(group: Group) -> list[Group]:
    """Those of a group that have the same elements in the same order."""
    classes: list[Group] = []
    for i, tensor in group:
        mine = next((each for each in classes if _are_same(each[0][1], tensor)), None)
        if mine is None:
            classes.append(mine := [])
        mine.append((i, tensor))
    return classes


def _refuse_overlaps(group: Group, written: set[int]) -> None:
    for one, other in combinations(_classes(group), 2):
        is_written = not written.isdisjoint(i for i, _ in (*one, *other))
        if is_written and not are_apart(one[0][1], other[0][1]):
            raise SharedMemoryError(layout(one[0][1]), layout(other[0][1]))


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    (offset, _, _, *kind), (its_offset, _, _, *its_kind) = layout(one), layout(other)
    if (offset, kind, one.numel()) != (its_offset, its_kind, other.numel()):
        return False
    same_view = one.shape == other.shape and one.stride() == other.stride()
    return same_view or (one.is_contiguous() and other.is_contiguous())


def are_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have no element in common. False also if that is not easily known."""
    if one.numel() == 0 or other.numel() == 0:
        return True
    (low, end), (high, _) = sorted(map(extent, (one, other)))
    if end <= high:
        return True
    if one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    # Columns of one matrix: the distance is no sum of steps that both can make.
    steps = sorted(((s, max(n, m) - 1) for s, n, m in zip(one.stride(), one.shape, other.shape) if s), reverse=True)
    return not _is_sum((high - low) // one.element_size(), steps)


def _is_sum(distance: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether the distance is a sum of strides, each at most as often as given, forward or backward."""
    if not steps:
        return distance == 0
    (stride, most), *others = steps
    reach = sum(each * often for each, often in others)
    first, last = -((reach - distance) // stride), (distance + reach) // stride
    return any(_is_sum(distance - k * stride, others) for k in range(max(first, -most), min(last, most) + 1))
