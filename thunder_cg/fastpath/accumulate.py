"""Gradients of parameters, handed over in bulk where nothing could tell the difference.

Autograd has one node per parameter that accumulates its gradient. To run these nodes costs more host time than all else
in a step. So a backward that is one replay puts gradients where those nodes would, and gives the nodes nothing, if

- a plain ``backward()`` runs all of them, not one with ``inputs=``, nor ``torch.autograd.grad``;
- the parameters have no gradient yet, so there is nothing to add to, in whatever order;
- the gradient shares no memory: of what does, autograd keeps copies, but for the last;
- no parameter has hooks, and its node has none either: nobody but us held it when it was made, and since then nobody
  has registered a hook of any kind from Python;
- no other call of the function waits for its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from thunder_cg.runtime.tensors import address_if_any

_MARK = "thunder_cg"
_MAX_RENEWALS = 64  # of nodes, because somebody registered a hook somewhere


class Accumulators:
    """The nodes of some parameters, as they were for one or more forwards.

    To hold them pays even where gradients go the ordinary way: otherwise they live from forward to backward, and
    autograd's thread has to take the interpreter's lock to free each of them.
    """

    def __init__(self, positions: Sequence[int], leaves: Sequence[torch.Tensor], look_for_hooks: bool) -> None:
        self._positions = positions
        self._leaves = leaves
        alone = len(set(map(id, leaves))) == len(leaves)  # tied weights have one node for several gradients
        self._may_deliver = look_for_hooks and alone and all(map(_is_new, leaves))
        self._nodes = [_node(leaf) for leaf in leaves]
        self._handles = RemovableHandle.next_id

    @property
    def is_current(self) -> bool:
        """Whether nobody has registered a hook since."""
        return bool(self._handles == RemovableHandle.next_id)

    def deliver(self, gradients: Sequence[Any], others: Sequence[Any] | None) -> Sequence[Any]:
        """Takes what may be accumulated in bulk out of a backward's results, and does that.

        Args:
            gradients: the results.
            others: what they may share memory with, besides each other; None if they share none.
        """
        if not (self._may_deliver and self.is_current and self._run_all()):
            return gradients
        rest = list(gradients)
        uses = Counter(map(address_if_any, (*rest, *others))) if others is not None else {}
        for position, leaf in zip(self._positions, self._leaves):
            gradient = rest[position]
            if gradient is None or (uses and uses[address_if_any(gradient)] > 1):
                continue
            if gradient.stride() == leaf.stride() and gradient.dtype == leaf.dtype:
                try:
                    leaf.grad = gradient
                except RuntimeError:  # the user wants it in another dtype, which the leaf's node knows how to make
                    continue
                rest[position] = None
        return rest

    def _run_all(self) -> bool:
        """Whether the backward under way accumulates all of them, and no parameter has a gradient or hooks.

        One that has been frozen since the forward gets no gradient.
        """
        for leaf in self._leaves:
            if leaf.grad is not None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                return False
            if not leaf.requires_grad:
                return False
        try:
            return all(map(torch._C._will_engine_execute_node, self._nodes))
        except RuntimeError:  # torch.autograd.grad with one of them among its inputs
            return False


class Keeper:
    """Makes a function's accumulators, for one stream, and makes them anew for another or after a hook."""

    def __init__(self, device: torch.device, positions: Sequence[int]) -> None:
        self._index = device.index if device.type == "cuda" else None
        self._positions = positions  # of parameters among the arguments
        self._stream = -1
        self._kept: Accumulators | None = None
        self._renewals = 0

    def keep(self, arguments: Sequence[Any]) -> Accumulators:
        """Those of these arguments: they are parameters that the guard has found where they were."""
        stream = 0 if self._index is None else torch._C._cuda_getCurrentRawStream(self._index)
        kept = self._kept
        if kept is None or stream != self._stream or (not kept.is_current and self._renewals < _MAX_RENEWALS):
            self._renewals += kept is not None and stream == self._stream
            self._kept = kept = None  # before it is asked whether somebody else holds a node
            positions = [i for i in self._positions if (t := arguments[i]).is_leaf and t.requires_grad]
            look = self._renewals <= _MAX_RENEWALS
            self._kept = kept = Accumulators(positions, [arguments[i] for i in positions], look)
            self._stream = stream
        return kept

    def drop(self) -> None:
        """Lets go of nodes and parameters."""
        self._kept = None


def _node(leaf: torch.Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _is_new(leaf: torch.Tensor) -> bool:
    """Whether nobody holds the leaf's node: one that is asked for twice in a row is made twice then."""
    _node(leaf).metadata[_MARK] = True
    return _node(leaf).metadata.pop(_MARK, None) is None
