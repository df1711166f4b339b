"""Moving averages in a step: `torch.optim.swa_utils.AveragedModel`, whose counter decides what an update does.

The first update copies the parameters, and later ones average them, so each update compares its counter with zero on
the host, and needs nothing else of it there. A graph is for later ones: the state has as a fact that the counter is
positive, and the counter itself is on the device, where replays advance it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from thunder_cg.compat.torch import disabled_torch_function


def move_counters(averages: Sequence[AveragedModel], device: torch.device) -> bool:
    """Moves the counters of models on the device there. Returns whether there was one to move."""
    there = [each for each in averages if any(parameter.device == device for parameter in each.parameters())]
    elsewhere = [each for each in there if each.n_averaged.device != device]
    for each in elsewhere:
        each.n_averaged = each.n_averaged.to(device)
    return bool(elsewhere)


@contextmanager
def known_to_be_positive(averages: Sequence[AveragedModel]) -> Iterator[None]:
    """Comparisons of the counters with zero do not read them. They have to be positive."""
    counters = [each.n_averaged for each in averages]
    for each, counter in zip(averages, counters):
        each.n_averaged = _Positive.of(counter)
    try:
        yield
    finally:
        for each, counter in zip(averages, counters):
            each.n_averaged = counter


class _Positive(Tensor):
    """A counter that is known to be positive."""

    __torch_function__ = disabled_torch_function
    plain: Tensor

    @classmethod
    def of(cls, plain: Tensor) -> _Positive:
        positive = plain.as_subclass(cls)
        positive.plain = plain
        return positive

    def __eq__(self, other: object) -> Any:
        return False if type(other) is int and other == 0 else self.plain == other

    def __gt__(self, other: Any) -> Any:
        return True if type(other) is int and other == 0 else self.plain > other

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """A plain tensor: what the user's function of an average does with it is the user's."""
        return self.plain.to(*args, **kwargs)

    __hash__ = Tensor.__hash__


__all__ = ["known_to_be_positive", "move_counters"]
