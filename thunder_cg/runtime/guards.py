"""What has to hold of a call's tensors for a graph to be replayed: addresses, metadata, alignment, no new overlaps."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch

from thunder_cg.compat.guards import addresses_equal, tensor_guards
from thunder_cg.compat.settings import Settings, kernel_settings
from thunder_cg.compat.tensors import is_zero_tensor
from thunder_cg.runtime.tensors import ALIGNMENT, address, addresses


class Guard:
    """The check, in few C++ calls, that a call's tensors are what was captured.

    Args:
        tensors: the tensors at capture; None where an operator made none, though Thunder says that it does.
        static: positions whose address is baked in.
        written: positions that the regions write. A graph sees that a written input shares memory with another one only
            if both are static, so no other sharing is admitted.
        settings: the settings that have to be as they are now; None to check none.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | None],
        static: Sequence[int],
        written: frozenset[int],
        settings: Settings | None = None,
    ) -> None:
        present = [(i, t) for i, t in enumerate(tensors) if t is not None]
        self._absent = [i for i, t in enumerate(tensors) if t is None]
        first: dict[int, int] = {}
        self._same = [(i, j) for i, t in present if (j := first.setdefault(id(t), i)) != i]
        self._unique = list(first.values()) if len(first) < len(tensors) else None
        self.metadata = tensor_guards([t for i, t in present if first[id(t)] == i])
        fixed = set(static)
        self.static = list(static)
        self.addresses = [t.data_ptr() if t is not None and i in fixed else None for i, t in enumerate(tensors)]
        self.aligned = [(i, t.data_ptr() % ALIGNMENT) for i, t in present if i not in fixed]
        self._movable, self._rests = [i for i, _ in self.aligned], [rest for _, rest in self.aligned]
        self._overlap = OverlapGuard(tensors, fixed, written) if written else None
        self._leaves = [(i, t.is_leaf) for i, t in present if i in written and t.requires_grad]
        self.settings = settings
        self._read_settings = kernel_settings(settings)
        self._settings = self._read_settings()

    def holds(self, tensors: list[Any]) -> bool:
        """Whether a graph captured with the guard's tensors may be replayed with these."""
        try:
            unique = tensors if self._unique is None else [tensors[i] for i in self._unique]
            if not addresses_equal(tensors, self.addresses, self.static) or (
                unique and not self.metadata.check(*unique)  # before a sparse tensor is asked for its address
            ):
                return False
            movable = [tensors[i] for i in self._movable]
            if [at % ALIGNMENT for at in map(torch.Tensor.data_ptr, movable)] != self._rests:
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
            return (self._overlap is None or self._overlap.admits(tensors)) and self.settings_hold()
        except (AttributeError, TypeError, RuntimeError):  # no tensor where there was one, or one without memory
            return False

    def settings_hold(self) -> bool:
        """Whether PyTorch would choose the same kernels."""
        return self._read_settings() == self._settings

    @property
    def is_simple(self) -> bool:
        """Whether addresses, metadata, alignment and settings are all there is to check."""
        return self._unique is None and not self._same and not self._absent and self._overlap is None

    def moved(self, tensors: Sequence[Any]) -> list[int]:
        """Positions of the static tensors that are at another address now."""
        return [i for i in self.static if tensors[i] is None or tensors[i].data_ptr() != self.addresses[i]]


class OverlapGuard:
    """Which memory the inputs that are copied must not share."""

    def __init__(self, tensors: Sequence[torch.Tensor | None], static: Set[int], written: frozenset[int]) -> None:
        copied = [i for i, t in enumerate(tensors) if i not in static and t is not None and not is_zero_tensor(t)]
        self._written, self._read = [i for i in copied if i in written], [i for i in copied if i not in written]
        self._static_all = {address(tensors[i]) for i in static} - {0}  # where their storages begin
        self._static_written = {address(tensors[i]) for i in static & written} - {0}

    def admits(self, tensors: Sequence[Any]) -> bool:
        """Whether no written input shares memory with another input, unless both are static."""
        written = [*filter(None, addresses([tensors[i] for i in self._written]))]
        wrote, read = {*written}, {*addresses([tensors[i] for i in self._read])}
        return (
            len(wrote) == len(written)
            and wrote.isdisjoint(read)
            and wrote.isdisjoint(self._static_all)
            and read.isdisjoint(self._static_written)
        )
