"""How a region's inputs reach its graph: at their own addresses, or copied into memory of the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from thunder_cg.compat.tensors import is_zero_tensor, read_as
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.backend import Pool
from thunder_cg.runtime.tensors import (
    ALIGNMENT,
    flat,
    is_dense,
    on_other_memory,
    overlaps_itself,
    span,
    view_of_storage,
)

_COMPARED_AT_ONCE = 2**26  # bytes: a comparison needs as many besides


@dataclass(frozen=True, slots=True)
class CopiedInput:
    """An input that is copied to where its graph reads it."""

    arg: int  # its position among the region's arguments
    buffer: torch.Tensor  # the memory that the graph reads
    target: torch.Tensor  # the same; the memory below it, if that is copied: see `_memory`

    @property
    def is_flat(self) -> bool:
        return self.target is not self.buffer

    def source(self, args: Sequence[Any]) -> torch.Tensor:
        return _memory(args[self.arg]) if self.is_flat else args[self.arg]

    def is_as_in(self, args: Sequence[Any]) -> bool:
        """Whether both hold the same bits: a graph may have written to its own."""
        pair = self.target, self.source(args)
        flats = (flat(each) if is_dense(each) else each.contiguous().flatten() for each in pair)
        ours, theirs = (each.view(torch.uint8).split(_COMPARED_AT_ONCE) for each in flats)
        return all(map(torch.equal, ours, theirs))


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What is copied of a tensor as it is there: it overlaps itself, or is conjugated or negated."""
    return flat(read_as(tensor, conj=tensor.is_conj(), neg=tensor.is_neg()))


# Makes buffers for a region's inputs: those that are copied in, and a buffer, or None, for each argument.
MakeBuffers = Callable[[], tuple[Sequence[CopiedInput], list[Any]]]


def static_buffer(pool: Pool, like: torch.Tensor) -> torch.Tensor:
    """Memory of the pool with the layout of ``like``, alignment included, for a graph to read in its place.

    The buffer is no inference tensor, even if ``like`` is: nobody could write to those outside of inference mode.
    """
    item = like.element_size()
    shift = like.data_ptr() % ALIGNMENT // item
    with torch.inference_mode(False):
        memory = pool.memory(max(1, (shift + span(like)) * item))
        buffer = view_of_storage(memory, like.dtype, shift, like.size(), like.stride())
        return read_as(buffer, conj=like.is_conj(), neg=like.is_neg()).data  # no view of another tensor


def place(
    pool: Pool, args: Sequence[Any], static: frozenset[int], same: Mapping[int, int]
) -> tuple[list[CopiedInput], list[Any]]:
    """Memory of the pool for each argument that is not static: what is copied there, and the buffer by argument.

    Args:
        same: arguments that are the same tensor as another one, which is static or comes before, and that one.
    """
    copied: list[CopiedInput] = []
    buffers: list[Any] = [None] * len(args)
    for i, arg in enumerate(args):
        if i in same:
            buffers[i] = buffers[same[i]]
        elif i not in static and arg is not None:
            if is_zero_tensor(arg):  # products with other zeros may differ in sign
                raise CaptureRefused(f"argument {i} is a tensor of zeros without memory")
            buffers[i] = static_buffer(pool, arg)
            alias = pool.alias(buffers[i])
            is_flat = overlaps_itself(arg) or arg.is_conj() or arg.is_neg()
            copied.append(CopiedInput(i, alias, _memory(alias) if is_flat else alias))
    return copied, buffers


def detached(args: Sequence[Any], written: Set[int]) -> list[Any]:
    """The arguments as warm-ups and captures see them: plain tensors without a history.

    They require grad if they did: ``matmul`` chooses its kernel by that, even where no gradients are recorded. Only
    written ones do not, since Thunder refuses to write to a leaf that requires grad. Arguments that are one tensor stay
    one: attention of a tensor with itself has another kernel.
    """
    plain = {
        (id(arg), i in written): arg.detach().requires_grad_(arg.requires_grad and i not in written)
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor)
    }
    return [plain.get((id(arg), i in written), arg) for i, arg in enumerate(args)]


def with_buffers(args: Sequence[Any], buffers: Sequence[torch.Tensor | None]) -> list[Any]:
    """The arguments, with buffers in the place of those that have one, which operators take for the arguments."""
    return [arg if buffer is None else _in_the_place_of(arg, buffer) for arg, buffer in zip(args, buffers)]


def _in_the_place_of(arg: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """The buffer, as an inference tensor if ``arg`` is one: torch.compile guards that, and would compile again."""
    if not arg.is_inference():
        return buffer.requires_grad_(arg.requires_grad)
    alike = on_other_memory(arg, buffer.untyped_storage(), int(buffer.storage_offset()))
    with torch.inference_mode():
        return alike.data.requires_grad_(arg.requires_grad)
