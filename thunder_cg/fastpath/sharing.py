"""Arguments that share a storage, where something is written in place.

Thunder (0.2.6) then reads the first of them in the place of the others, reshaped. That is right where all have the same
elements in the same order. It is wrong, or raises, for other parts of the storage, such as the rows of a batch, and for
a transposed view. What has a gradient loses it to what has none, as ``loss`` does to ``loss.detach()``. Thunder also
takes positions among the arguments of the call for positions among the inputs of the trace. So here it gets those that
are the same elements, and written. Others must have no element in common with one that is written, and the prologue
checks that all lie as they did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch

from thunder_cg.analysis.aliasing import Aliasing, symbol_makes_views
from thunder_cg.analysis.ops import read
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compilation import arguments_of_compilation, know_views_by, mark_aliases_with
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
    inputs = prologue.bound_symbols[-1].args[0][0]
    is_written = _writes(computation, surely=True)
    if is_written is None:
        return prologue
    for group in groups:
        _refuse_overlaps(group, {i for i, _ in group if is_written(inputs[i].name)})
        layouts = [layout(tensor) for _, tensor in group]
        prologue = _with_check(prologue, [inputs[i] for i, _ in group], SharingCheck(layouts))
    return prologue


def _writes(computation: TraceCtx, *, surely: bool) -> Callable[[str], bool] | None:
    """Says of a value whether its memory is written in place; None if none is.

    Args:
        surely: not by an operator of which nothing is known, and which gets the arguments themselves.
    """
    ops = read(computation)
    aliasing = Aliasing.of(ops)
    writing = (op.index for op in ops.ops if not (surely and op.index in aliasing.opaque))
    written = frozenset[str]().union(*map(aliasing.writes.__getitem__, writing))
    return (lambda name: aliasing.sets.get(name) in written) if written else None


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
    """Thunder's own way, of arguments that are the same elements, if they are written."""
    groups = _groups(prologue) if found else []
    same = [[i for i, _ in each] for group in groups for each in _classes(group) if len(each) > 1]
    is_written = _writes(computation, surely=False) if same else None
    inputs = prologue.bound_symbols[-1].args[0][0]
    written = [each for each in same if is_written is not None and any(is_written(inputs[i].name) for i in each)]
    return compat.insert_alias_updates(computation, written)


mark_aliases_with(_mark_aliases)
know_views_by(symbol_makes_views)


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
    """Those of a group that have the same elements in the same order, and a gradient all or none."""
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
            raise SharedMemoryError(*(_described(each[0][1]) for each in (one, other)))


def _described(tensor: torch.Tensor) -> Layout:
    offset, shape, stride, dtype, once_read = layout(tensor)
    return offset, shape, stride, dtype, once_read + ", with a gradient" * tensor.requires_grad


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    (offset, _, _, *kind), (its_offset, _, _, *its_kind) = layout(one), layout(other)
    if (offset, kind, one.numel()) != (its_offset, its_kind, other.numel()):
        return False
    if one.requires_grad != other.requires_grad and torch.is_grad_enabled():
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
