"""For which sizes of a graph of Dynamo's Thunder compiles, where they may change from call to call.

Thunder compiles a version for each set of sizes and numbers, which may take seconds, and a version pays once it is
replayed. Boxes that a detector found have new sizes in each call, and nothing of them is ever replayed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import thunder
import torch
from torch.fx import GraphModule

from thunder_cg.compat.fx import example, symbols_of_sizes
from thunder_cg.runtime.changes import FEW, FEWER_SIZES, NEW_TOO_OFTEN

_REPLAYS = 3  # the first call for some sizes warms up, the second one captures, and the third one replays
_LATELY = 16  # calls that went to PyTorch
_OFTEN = 5  # times that sizes have to come among these

_logger = logging.getLogger(__name__)


def numbers_that_count(module: GraphModule) -> list[int]:
    """The positions of those inputs of a graph that are numbers, and that its operators or sizes of tensors have."""
    inputs = module.graph.find_nodes(op="placeholder")
    numbers = [i for i, node in enumerate(inputs) if isinstance(example(node), torch.SymInt)]
    used = symbols_of_sizes(*(node for i, node in enumerate(inputs) if node.users and i not in numbers))
    return [i for i in numbers if inputs[i].users or symbols_of_sizes(inputs[i]) & used]


class SizesOfGraph:
    """Calls a graph as Thunder has compiled it, or in PyTorch if its sizes are new, as they have been too often.

    New sizes go to PyTorch while more than `FEW` sets of sizes, for which Thunder has compiled, have come fewer than
    three times each. Sizes that make up a third of the last calls that went to PyTorch are not new any more: a training
    may follow a validation with many sizes. What has an ``__dict__`` would be part of the state of a graphed step, and
    these numbers change.

    Attributes:
        in_torch: how many calls went to PyTorch.
    """

    __slots__ = ("_calls", "_compiled", "_in_torch", "_lately", "_name", "_numbers", "_parts", "in_torch")

    def __init__(
        self,
        name: str,
        numbers: Sequence[int],
        parts: Sequence[Any],
        compiled: Callable[..., Any],
        in_torch: Callable[..., Any],
    ) -> None:
        self._name, self._numbers, self._compiled, self._in_torch = name, numbers, compiled, in_torch
        self._parts = [thunder.compile_stats(part) for part in parts]
        self._calls: dict[tuple[int, ...], int] = {}  # up to three, by the sizes for which Thunder has compiled
        self._lately: deque[tuple[int, ...]] = deque(maxlen=_LATELY)  # sizes that went to PyTorch
        self.in_torch = 0

    def __call__(self, *args: Any) -> Any:
        sizes = tuple(args[i] for i in self._numbers)
        calls = self._calls.get(sizes, 0)
        if calls == _REPLAYS:
            return self._compiled(*args)
        if not calls and self._rarely_used() > FEW and self._lately.count(sizes) < _OFTEN:
            if not self.in_torch:
                problem = "calls with new ones run in PyTorch from now on, without Thunder and graphs"
                _logger.warning("%s: %s; %s; %s", self._name, NEW_TOO_OFTEN, problem, FEWER_SIZES)
            self.in_torch += 1
            self._lately.append(sizes)
            return self._in_torch(*args)
        before = self._versions()
        result = self._compiled(*args)
        if calls or self._versions() > before:
            self._calls[sizes] = calls + 1
        return result

    def _rarely_used(self) -> int:
        """How many sets of sizes Thunder has compiled for that never replayed."""
        return sum(calls < _REPLAYS for calls in self._calls.values())

    def _versions(self) -> int:
        return sum(part.cache_misses for part in self._parts)
