"""Pure functions on the memory of tensors: its extent, its layout, copies of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thunder_cg.compat.torch import copy_all_


def span(tensor: torch.Tensor) -> int:
    """Elements between the tensor's first and its last, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride()))


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
    """Whether the tensor's memory is at most twice what its elements need, so that all of it may be copied."""
    return span(tensor) <= 2 * tensor.numel()


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source to its target, in as few calls as PyTorch can; autograd does not see it."""
    with torch.no_grad():
        if len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            copy_all_(targets, sources)
