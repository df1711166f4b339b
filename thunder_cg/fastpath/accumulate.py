"""Gradients of parameters, handed over in bulk where nothing could tell the difference.

To run autograd's nodes that accumulate gradients, one per parameter, costs more host time than all else in a step. So a
backward that is one replay puts gradients where those nodes would, and gives the nodes nothing, if

- a plain ``backward()`` runs all of them, not one with ``inputs=``, nor ``torch.autograd.grad``;
- the parameters have no gradient yet, so there is nothing to add to, in whatever order;
- the gradient shares no memory: of what does, autograd keeps copies, but for the last;
- no parameter has hooks, and its node has none either: see Note [Nodes without hooks];
- each node has the stream of the replay: see Note [Streams of nodes];
- no other call of the function waits for its backward, nor one of another function with a parameter of it: autograd
  sums all gradients of a parameter in the order in which they come, and adds the sum to what is there.

Note [Nodes without hooks]
    PyTorch does not say whether a node has hooks. A node that nobody holds (as a loss of an earlier step does) is made
    when it is asked for, and has no hooks; that is noted in the node, which Thunder's calls and ours use from then on.
    As long as nobody has registered a hook of any kind from Python, anywhere, the node still has none. Where somebody
    has, a hook of ours is registered and removed again, which shows the others. A node that somebody held before its
    first call may have hooks from C++, as those of data parallelism, and is left alone. The hooks that data parallelism
    adds to a node later run after the node and read the parameter's gradient, so they find what was put there.

Note [Streams of nodes]
    A node runs on the stream that was current when the node was made, and so do its hooks. Autograd orders that stream
    after the one that made a gradient only if the node is given the gradient, and at its end it makes the caller's
    stream wait for the streams of such nodes. A node that an earlier loss made on another stream and still holds would
    let a hook, or the caller, read a gradient before the replay has made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from thunder_cg.compat.autograd import (
    engine_will_execute,
    gradient_node,
    has_accumulate_hooks,
    hooks_of_node,
    registered_hooks,
)
from thunder_cg.compat.cuda import current_raw_stream
from thunder_cg.runtime.tensors import address_if_any

_NO_HOOKS = "thunder_cg"  # in a node's metadata: how many hooks had been registered when the node had none
_STREAM = "thunder_cg stream"  # in a node's metadata, with the former: the stream on which the node was made
_MAX_RENEWALS = 64  # of nodes, because somebody registered a hook somewhere


def _stream_of(device: torch.device) -> int:
    """The current stream of the device."""
    return current_raw_stream(device.index) if device.type == "cuda" else 0


def nodes_of(leaves: Iterable[torch.Tensor]) -> list[Any]:
    """The nodes that accumulate the gradients of leaves. Of those that are made here, it is noted that they are new."""
    return [_node_of(leaf) for leaf in leaves]


def _node_of(leaf: torch.Tensor) -> Any:
    if isinstance(gradient_node(leaf).metadata.get(_NO_HOOKS), int):
        return gradient_node(leaf)
    token = object()  # of this thread
    gradient_node(leaf).metadata[_NO_HOOKS] = token  # goes with the node at once, unless somebody holds the node
    node = gradient_node(leaf)
    found = node.metadata.get(_NO_HOOKS)
    if found is None:
        node.metadata[_NO_HOOKS] = registered_hooks()
        node.metadata[_STREAM] = _stream_of(leaf.device)
    elif found is token:
        del node.metadata[_NO_HOOKS]
    return node


def _has_no_hooks(node: Any) -> bool:
    """See Note [Nodes without hooks]."""
    known = node.metadata.get(_NO_HOOKS)
    if not isinstance(known, int) or (known != registered_hooks() and hooks_of_node(node)):
        return False
    node.metadata[_NO_HOOKS] = registered_hooks()
    return True


class Accumulators:
    """The nodes of some parameters, as they were for one or more forwards.

    To hold them pays even where gradients take the ordinary way: otherwise they live from forward to backward, and
    autograd's thread has to take the interpreter's lock to free each of them.
    """

    def __init__(self, positions: Sequence[int], leaves: Sequence[torch.Tensor], look_for_hooks: bool) -> None:
        self._positions = positions
        self._leaves = leaves
        self._nodes = nodes_of(leaves)
        is_tied = len(set(map(id, leaves))) < len(leaves)  # tied weights have one node for several gradients
        self._may_deliver = look_for_hooks and not is_tied and all(map(_has_no_hooks, self._nodes))
        for leaf, node in zip(leaves, self._nodes):
            self._may_deliver = self._may_deliver and node.metadata[_STREAM] == _stream_of(leaf.device)
        self._handles = registered_hooks()

    @property
    def is_current(self) -> bool:
        """Whether nobody has registered a hook since."""
        return self._handles == registered_hooks()

    def deliver(self, gradients: Sequence[Any], others: Sequence[Any] | None) -> Sequence[Any]:
        """Accumulates what may be accumulated in bulk of a backward's ``gradients``; returns them without it.

        ``others`` are what gradients may share memory with, besides each other; None if they share none.
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
        """Whether the backward under way accumulates all of them, and no parameter has a gradient or hooks."""
        for leaf in self._leaves:
            # A leaf that has been frozen since the forward gets no gradient.
            if leaf.grad is not None or has_accumulate_hooks(leaf) or not leaf.requires_grad:
                return False
        try:
            return all(map(engine_will_execute, self._nodes))
        except RuntimeError:  # torch.autograd.grad with one of them among its inputs
            return False


class Keeper:
    """Makes a function's accumulators, for one stream, and makes them anew for another or after a hook.

    ``positions`` are those of parameters among the arguments.
    """

    def __init__(self, device: torch.device, positions: Sequence[int]) -> None:
        self._device = device
        self._positions = positions
        self._stream = -1
        self._kept: Accumulators | None = None
        self._renewals = 0

    def keep(self, arguments: Sequence[Any]) -> Accumulators:
        """Those of these arguments: they are parameters that the guard has found where they were."""
        stream = _stream_of(self._device)
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
