"""Where a tensor's memory is, and what kernels can see of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thunder_cg.compat.tensors import copy_all_, is_zero_tensor, may_overlap_itself, read_as

ALIGNMENT = 16  # bytes: kernels choose vector widths by the alignment of their operands, and so the order of a sum
_storage_of, _address_of = torch.Tensor.untyped_storage, torch.UntypedStorage.data_ptr


def address(tensor: torch.Tensor | None) -> int:
    """Where the tensor's storage begins; 0 if it has no memory, as the derivative of `torch.sgn` has none."""
    return 0 if tensor is None or is_zero_tensor(tensor) else tensor.untyped_storage().data_ptr()


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`address` of tensors, none of which is such a derivative."""
    return [*map(_address_of, map(_storage_of, tensors))]


def pointer(tensor: torch.Tensor) -> int:
    """Where the tensor's first element is, or would be: ``data_ptr()`` of a tensor without elements is 0."""
    return address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def address_if_any(value: Any) -> int:
    """`address` of a strided tensor; 0 for anything else."""
    return address(value) if isinstance(value, torch.Tensor) and not is_sparse(value) else 0


def is_sparse(value: Any) -> bool:
    """Whether the value is a tensor made of several, which has no address."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def has_history(tensor: torch.Tensor) -> bool:
    """Whether it is the result of an operator that autograd has recorded."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # one of several views, of what was written in place since: PyTorch lets nobody use it
        return True


def is_plain(value: Any) -> bool:
    """Whether a graph can have the value as an input. Operators return None for a tensor that they do without."""
    return value is None or type(value) in (torch.Tensor, torch.nn.Parameter)


def is_leaf_with_grad(tensor: torch.Tensor | None) -> bool:
    """Whether autograd accumulates a gradient for the tensor."""
    return tensor is not None and tensor.is_leaf and tensor.requires_grad


def refuses_writes(tensor: torch.Tensor | None) -> bool:
    """Whether it is an inference tensor, outside of inference mode, where PyTorch does not allow to write to it."""
    return tensor is not None and tensor.is_inference() and not torch.is_inference_mode_enabled()


def same_tensors(tensors: Sequence[Any]) -> dict[int, int]:
    """Positions of those that are the same object as an earlier one, and its position."""
    ids = [*map(id, tensors)]
    if len({*ids}) == len(ids):
        return {}
    first: dict[int, int] = {}
    return {i: at for i, each in enumerate(ids) if (at := first.setdefault(each, i)) != i}


Layout = tuple[Any, ...]


def layout(tensor: torch.Tensor | None) -> Layout:
    """What kernels can see of a tensor besides its address and its values: size, strides, dtype, device and more."""
    if tensor is None:
        return ()
    kind = tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % ALIGNMENT
    return (*kind, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())


def span(tensor: torch.Tensor) -> int:
    """Elements between the tensor's first and its last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride()))


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the tensor's first element and of the end of its last."""
    return (start := pointer(tensor)), start + span(tensor) * tensor.element_size()


class Extents:
    """The memory of the storages of tensors. Two may share some and begin elsewhere, as slices of one NumPy array do.

    Attributes:
        are_apart: whether no two of the tensors share memory.
    """

    __slots__ = ("_starts", "_stops", "are_apart")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.are_apart = True
        found = ((at, t.untyped_storage().nbytes()) for t in tensors if (at := address_if_any(t)))
        for start, stop in sorted((at, at + nbytes) for at, nbytes in found if nbytes):
            if self._stops and start < self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
                self.are_apart = False
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def overlap(self, other: Extents) -> bool:
        """Whether any memory is in both."""
        for start, stop in zip(other._starts, other._stops):
            i = bisect_left(self._starts, stop)  # those before begin before it ends
            if i and self._stops[i - 1] > start:
                return True
        return False


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.size()) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a copy of the tensor's memory with the same layout is a copy of the tensor."""
    return not tensor.is_conj() and not tensor.is_neg() and (tensor.numel() == 0 or is_dense(tensor))


def is_compact(tensor: torch.Tensor) -> bool:
    """Whether the memory below a tensor is at most twice what its elements need, so that it may be copied whole."""
    return span(tensor) <= 2 * tensor.numel()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    return may_overlap_itself(tensor) and not is_dense(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The stretch of memory below a tensor that overlaps itself, which ``copy_`` can write to."""
    return tensor.as_strided((span(tensor),), (1,))


def view_of_storage(
    memory: torch.Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A tensor of any dtype on the storage of ``memory``; ``offset`` in elements of ``dtype``."""
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory.untyped_storage(), offset, size, stride)


def on_other_memory(tensor: torch.Tensor, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
    """What operators and torch.compile take for ``tensor``, on another storage; ``offset`` in its elements."""
    with torch.inference_mode(tensor.is_inference()):
        moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        moved.set_(storage, offset, tensor.size(), tensor.stride())
        return read_as(moved, conj=tensor.is_conj(), neg=tensor.is_neg())


def tracked_view(
    tensor: torch.Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Like `view_of_storage`, but autograd knows the view: a write to one shows in the version of both."""
    tensor = read_as(tensor, conj=tensor.is_conj(), neg=tensor.is_neg())
    if tensor.dtype != dtype:
        items = tensor.untyped_storage().nbytes() // tensor.element_size()
        items -= items % max(1, dtype.itemsize // tensor.element_size())
        tensor = tensor.as_strided((items,), (1,), 0).view(dtype)
    return tensor.as_strided(size, stride, offset)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, in as few calls as PyTorch can; autograd does not see it."""
    with torch.no_grad():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            copy_all_(targets, sources)
