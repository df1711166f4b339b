"""Results that leave a region as soon as nothing in it needs them, so that the arena can use their memory again.

Most of what a backward makes leaves: the gradients of all parameters. Copied out at the end of the region, all of them
would be in the arena and in the caller's memory at once. Copied out one by one, they would cost a node of the graph
each. So they wait, in the arena, until they are worth a copy together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder_cg.runtime.cuda.copy_nodes import is_whole


class CopiedEarly:
    """A result that left while its region ran.

    Attributes:
        order: how many departed before it.
        tensor: in a warm-up, what the caller gets; in a capture, the memory that replays copy from.
    """

    __slots__ = ("order", "tensor")

    def __init__(self, order: int) -> None:
        self.order = order
        self.tensor: torch.Tensor | None = None


class EarlyCopier:
    """Takes each result from a region's function, as soon as nothing in the region will touch its memory.

    Args:
        device: of what may go.
        send: copies tensors out, or captures that, and returns what becomes the `tensor` of each. It may not keep them.
        together: bytes that wait to be sent together.
        admits: whether a tensor may go, which is a whole block of memory.
        must: raise what ``send`` raises; else what could not be sent stays, and so does all after it.
    """

    def __init__(
        self,
        device: torch.device,
        send: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        together: float,
        admits: Callable[[torch.Tensor], bool] = lambda tensor: True,
        *,
        must: bool = True,
    ) -> None:
        self._device = device
        self._send = send
        self._together = together
        self._admits = admits
        self._must = must
        self._sent = 0
        self._waiting: list[torch.Tensor] = []
        self._departing: list[CopiedEarly] = []
        self._nbytes = 0

    def __call__(self, tensor: Any) -> Any:
        """What the function is to return in its place: itself, if it does not go."""
        if not (self._is_block(tensor) and self._admits(tensor)):
            return tensor
        self._waiting.append(tensor)
        self._departing.append(departed := CopiedEarly(self._sent + len(self._departing)))
        self._nbytes += tensor.numel() * tensor.element_size()
        if self._nbytes >= self._together:
            self._send_all()
        return departed

    def _send_all(self) -> None:
        try:
            left = self._send(self._waiting)
        except Exception:
            if self._must:
                raise
            self._together = math.inf
            return
        for departed, tensor in zip(self._departing, left):
            departed.tensor = tensor
        self._sent += len(self._departing)
        self._waiting, self._departing, self._nbytes = [], [], 0

    def _is_block(self, tensor: Any) -> bool:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor._is_zerotensor():
            return False
        return tensor.device == self._device and tensor.numel() > 0 and is_whole(tensor)

    def settle(self, results: Sequence[Any]) -> list[Any]:
        """The function's results, with those that still wait: they leave with the others, at the end."""
        waiting = {id(departed): tensor for departed, tensor in zip(self._departing, self._waiting)}
        self._waiting, self._departing = [], []
        return [waiting.get(id(result), result) for result in results]
