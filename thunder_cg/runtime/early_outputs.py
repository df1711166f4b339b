"""Results that are copied out as soon as the rest of the region does not need them, so that their memory can be reused.

If all gradients were copied at the end of a backward, they would be in the arena and in the caller's memory at once. If
they were copied one by one, each would cost a node of the graph. So they wait until enough can be copied together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thunder_cg.compat.tensors import is_zero_tensor
from thunder_cg.runtime.tensors import is_whole


@dataclass(slots=True, eq=False)
class CopiedEarly:
    """Stands for a result that was copied out while its region ran."""

    order: int  # how many were copied before it
    tensor: torch.Tensor | None = None  # in a warm-up, what the caller gets; in a capture, what replays copy from


@dataclass(eq=False)
class EarlyCopier:
    """Takes each result from a region's function as soon as nothing in the region will use its memory."""

    device: torch.device  # of the results that may be copied early
    # Copies tensors out, or captures the copies, and returns the `tensor` of each. It keeps no argument.
    copy: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    batch_bytes: float  # results wait until they have so many bytes
    may_copy: Callable[[torch.Tensor], bool] = lambda tensor: True  # of a tensor that fills a block of memory
    must: bool = True  # raise what `copy` raises; otherwise results that could not be copied, and all later ones, stay

    def __post_init__(self) -> None:
        self._count = self._nbytes = 0  # how many were copied, and the bytes of those that wait
        self._waiting: list[tuple[CopiedEarly, torch.Tensor]] = []

    def __call__(self, tensor: Any) -> Any:
        """What the function is to return instead of the tensor: the tensor itself if it is not copied early."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or is_zero_tensor(tensor):
            return tensor
        is_block = tensor.device == self.device and tensor.numel() > 0 and is_whole(tensor)
        if not (is_block and self.may_copy(tensor)):
            return tensor
        copied = CopiedEarly(self._count + len(self._waiting))
        self._waiting.append((copied, tensor))
        self._nbytes += tensor.numel() * tensor.element_size()
        if self._nbytes >= self.batch_bytes:
            self._copy_waiting()
        return copied

    def _copy_waiting(self) -> None:
        try:
            copies = self.copy([tensor for _, tensor in self._waiting])
        except Exception:
            if self.must:
                raise
            self.batch_bytes = math.inf
            return
        for (copied, _), tensor in zip(self._waiting, copies):
            copied.tensor = tensor
        self._count += len(self._waiting)
        self._waiting, self._nbytes = [], 0

    def finish(self, results: Sequence[Any]) -> list[Any]:
        """The function's results, with those that still wait in the place of their stand-ins."""
        waiting = {id(copied): tensor for copied, tensor in self._waiting}
        self._waiting = []
        return [waiting.get(id(result), result) for result in results]
