"""The gradients that a captured step finds, and those that it leaves.

Note [Gradients of a step]
    The gradients that a step leaves are memory of its graph, and each replay writes them again. If anybody still holds
    one of them from an earlier step, the step runs in Python. So it does before another graph of the step is replayed
    that was captured earlier, and may use the same memory for something else. If only the parameter has it, and the
    other graph leaves it there, as in a step that trains two networks in turn, it gets other memory before. What a step
    finds in ``.grad`` may be of three kinds. If the step drops a gradient before any kernel has read it, as
    ``zero_grad()`` does, any gradient may be there later, or none. There has to be one if code that is not PyTorch's
    names ``grad``, since it may ask whether there is one. If the step leaves it where it is, and no kernel uses it, as
    that of a generator while the discriminator is trained, any that is laid out alike may be there. Otherwise the graph
    reads it or adds to it, so it has to be the same tensor. The memory of a DTensor is that of its part on this rank,
    which somebody may hold without the DTensor.

Note [Gradients from outside]
    What a graph reads is at one place. A gradient that the loop's own backward makes is at another one in each call. If
    nobody else holds it, nor what was at the graph's place, a replay copies it there, as it does with the batch. One of
    a graph stays where it is, so there is another graph for it. That one copies these, too, since two graphs that read
    each other's gradients would be captured anew in turn.

Note [Gradients that add up]
    A loop that accumulates gradients has graphs for the micro-batch that makes them and for those that add to them. The
    first ones were made in Python, and those of a graph are elsewhere. So a call that finds gradients of a call in
    Python waits for the graph that makes them, unless they have outlasted an update of their parameters, as those do
    that are set to zero.

Note [Memory of the gradients before]
    Without graphs, a step that drops its gradients has their memory for its activations. A graph has it only if it is
    in the pool. So before the first capture the gradients move there, by way of the host, since the memory at both
    places is more than a step without graphs takes. If the capture fails, those that it has dropped come back from the
    host. Later captures find gradients that are in the pool already.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from thunder_cg.compat.distributed import layout_of_dtensor, local_tensor
from thunder_cg.compat.guards import addresses_equal, tensor_guards
from thunder_cg.compat.objects import alive, counting
from thunder_cg.compat.tensors import (
    has_memory,
    has_storage,
    holders_of_storage,
    storage_id,
    storage_use_count,
    tensor_use_count,
    version,
)
from thunder_cg.errors import CaptureRefused, SkipReason
from thunder_cg.runtime.backend import Backend, Pool
from thunder_cg.runtime.tensors import address_if_any, copy_all, layout, span, view_of_storage
from thunder_cg.step.calls import Calls
from thunder_cg.step.other_memory import Addresses, can_move


class GradientsBefore:
    """What a step found in ``.grad``, and whether it dropped that unread: see Note [Gradients of a step].

    It holds the memory of the gradients, and not the tensors, whose end shows that the step has dropped them.

    Args:
        pool: where the gradients move, if they do: see Note [Memory of the gradients before].
        needs: bytes that the capture needs in the pool, at least.
    """

    def __init__(
        self, parameters: Sequence[Tensor], backend: Backend, calls: Calls, pool: Pool | None, needs: int
    ) -> None:
        self._parameters, self._backend, self._calls = parameters, backend, calls
        self._on_host: dict[int, Tensor] = {}  # by position: those that have moved
        self._are_alone = [*map(_is_alone, parameters)]
        known = [GraphGradient.known(each.grad) for each in parameters]
        are_free = (each is not None and each.is_graphs() for each in known)
        self.are_graphs = [is_free or alone for is_free, alone in zip(are_free, self._are_alone)]  # and nobody else's
        if pool is not None:
            self._move(pool, needs)
        self.memory = [None if (gradient := each.grad) is None else gradient.detach() for each in parameters]
        self.moved = {address for i in self._on_host if (address := address_if_any(parameters[i].grad))}
        self._unread: set[int] = set()
        self._seen: tuple[int, Addresses] | None = None
        self._references = {
            i: weakref.ref(p.grad, partial(self._drop, i)) for i, p in enumerate(parameters) if p.grad is not None
        }

    def _move(self, pool: Pool, needs: int) -> None:
        gradients: list[tuple[Tensor, Tensor]] = []  # and their copies on the host
        for i, parameter in enumerate(self._parameters):
            if (gradient := parameter.grad) is not None and self._are_alone[i]:
                self._on_host[i] = torch.empty_like(gradient, device="cpu").copy_(gradient)
                gradients.append((gradient, self._on_host[i]))
        for gradient, _ in gradients:
            gradient.data = gradient.new_empty(0)
        self._backend.give_back()
        pool.reserve(needs)
        while gradients:
            gradient, host = gradients.pop()
            try:
                memory = pool.memory(max(1, host.untyped_storage().nbytes()))
                gradient.data = view_of_storage(memory, host.dtype, 0, host.size(), host.stride()).copy_(host)
            except BaseException:
                for each, content in [(gradient, host), *gradients]:
                    each.data = content.to(each.device)
                raise

    def _drop(self, i: int, _: Any) -> None:
        memory = self.memory[i]
        assert memory is not None
        if not self._backend.busy():  # another thread has held it for longer; `expected` finds out
            return
        with suppress(RuntimeError):  # the capture is broken, and will be refused
            if self._addresses().user_of(memory) is None:
                self._unread.add(i)
                if i in self._on_host:
                    self.memory[i] = None

    def _addresses(self) -> Addresses:
        """Of what has been captured up to now."""
        names = {**self._backend.captured_addresses(), **self._calls.communicated}
        if self._seen is None or self._seen[0] != len(names):
            self._seen = len(names), Addresses(names)
        return self._seen[1]

    def expected(self, addresses: Addresses) -> list[Any]:
        """After the capture. For each parameter None, `ANY`, `THERE`, `LIKE`, or the gradient that has to be there.

        Raises:
            CaptureRefused: a parameter has the gradient of another one, or a gradient that was read got other memory.
        """
        expected: list[Any] = []
        now = [_address_of(each.grad) for each in self._parameters]
        if any(then and then != there and then in now for then, there in zip(map(_address_of, self.memory), now)):
            raise CaptureRefused("the step leaves a parameter the gradient of another one", "have it keep a clone")
        for i, (parameter, memory) in enumerate(zip(self._parameters, self.memory)):
            gradient, is_other = parameter.grad, place_of(parameter.grad) != place_of(memory)
            is_same = gradient is not None and memory is not None and self._references[i]() is gradient
            is_unused = memory is not None and addresses.user_of(memory) is None
            if i in self._unread or (is_unused and is_other):
                expected.append(THERE if self._calls.reads_gradients else ANY)
            elif is_unused and is_same:
                expected.append(LIKE)
            elif is_same and is_other:
                raise CaptureRefused(*_MOVES)
            else:
                expected.append(memory if is_other else gradient)
        return expected

    def restore(self) -> None:
        """After a capture that failed."""
        references, self._references = self._references, {}  # what it did with gradients does not matter any more
        for i, (parameter, memory) in enumerate(zip(self._parameters, self.memory)):
            is_dropped = memory is None and i in self._on_host
            before = references[i]() if i in references else None  # which somebody may hold, and compare
            is_there = before is not None and place_of(before) == place_of(memory)
            parameter.grad = before if is_there else self._on_host[i].to(parameter.device) if is_dropped else memory

    def release(self) -> None:
        """Lets go of the memory, which reference cycles hold."""
        self.memory, self._references, self._on_host = [], {}, {}


def _is_alone(parameter: Tensor) -> bool:
    """Whether its gradient fills its memory, and nobody else holds the gradient or the memory, nor a graph."""
    if not _fills_memory(parameter.grad) or vars(parameter.grad):
        return False
    other = torch.zeros(1, requires_grad=True)
    other.grad = torch.zeros(1)
    return all(uses <= alone for uses, alone in zip(_uses_of_gradient(parameter), _uses_of_gradient(other)))


def _fills_memory(gradient: Tensor | None) -> bool:
    """Whether it is a plain tensor without a history, which is all that its memory has."""
    if gradient is None or gradient.requires_grad or not (can_move(gradient) and has_memory(gradient)):
        return False
    return gradient.nbytes == span(gradient) * gradient.element_size() == gradient.untyped_storage().nbytes()


def _uses_of_gradient(parameter: Tensor) -> tuple[int, int, int]:
    """References from Python, those from C++, and what holds its memory."""
    gradient = parameter.grad
    assert gradient is not None
    return sys.getrefcount(gradient), tensor_use_count(gradient), holders_of_storage(gradient.untyped_storage)


_MOVES = SkipReason(
    "the step reads a gradient, and gives the gradient other memory, as p.grad.data = new does",
    "write the gradient in place, such as by p.grad.copy_(new), or have zero_grad() set it to None first",
)
_MAX_WAITS = 8  # of calls that accumulate, for the graph that makes the gradients
ANY = object()  # what a step finds in ``.grad`` does not matter
THERE = object()  # it matters that there is one
LIKE = object()  # it matters that there is one, and how it is laid out

_gradient_of, _memory_of = attrgetter("grad"), attrgetter("memory")


class ExpectedGradients:
    """What has to be in ``.grad`` before a replay, where it matters: nothing, or a gradient that is at the same place.

    Args:
        expected: for each parameter None, `ANY`, `THERE`, `LIKE` or a gradient.
        are_graphs: whether nobody but graphs held its gradient.
        from_graphs: whether gradients of graphs are copied, too.
    """

    def __init__(
        self, parameters: Sequence[Tensor], expected: Sequence[Any], are_graphs: Sequence[bool], from_graphs: bool
    ) -> None:
        self._from_graphs = from_graphs
        self._with = [parameter for parameter, each in zip(parameters, expected) if each is THERE]
        self._alike = [parameter for parameter, each in zip(parameters, expected) if each is LIKE]
        self._layouts = [layout(gradient) for each in self._alike if (gradient := each.grad) is not None]
        self._without = [parameter for parameter, each in zip(parameters, expected) if each is None]
        pairs = [(parameter, each) for parameter, each in zip(parameters, expected) if isinstance(each, Tensor)]
        self._parameters, self.tensors = [each for each, _ in pairs], [each for _, each in pairs]
        may_copy = compress(are_graphs, (isinstance(each, Tensor) for each in expected))
        found = zip(pairs, may_copy)
        self.copied = [GraphGradient.known(g) or GraphGradient.of(g, p) if may else None for (p, g), may in found]
        self._elsewhere: list[int] = []  # positions of those to copy: see Note [Gradients from outside]
        self._places = [*map(place_of, self.tensors)]
        self._addresses, self._indices = [each.data_ptr() for each in self.tensors], [*range(len(pairs))]
        is_each_once = len({*map(id, self.tensors)}) == len(pairs)
        are_plain = all(map(is_, self.tensors, map(local_tensor, self.tensors)))
        self._metadata = tensor_guards(self.tensors) if is_each_once and are_plain else None

    def are_elsewhere(self) -> bool:
        """Whether there are gradients where the graph reads some, and it cannot read these."""
        return not self.are_there() and bool(self._elsewhere) and not any(p.grad is None for p in self._parameters)

    def are_there(self) -> bool:
        self._elsewhere = []
        if not all(map(is_, map(_gradient_of, self._without), repeat(None))):
            return False
        if any(map(is_, map(_gradient_of, self._with), repeat(None))):
            return False
        alike = [*map(_gradient_of, self._alike)]
        if any(map(is_, alike, repeat(None))) or [*map(layout, alike)] != self._layouts:
            return False
        gradients = [*map(_gradient_of, self._parameters)]
        if self._metadata is not None and all(map(is_, gradients, self.tensors)) and self._metadata.check(*gradients):
            return addresses_equal(gradients, self._addresses, self._indices)
        self._elsewhere = [i for i, each in enumerate(gradients) if place_of(each) != self._places[i]]
        del gradients
        return all(map(self._may_be_copied, self._elsewhere))

    def _may_be_copied(self, i: int) -> bool:
        home, parameter = self.copied[i], self._parameters[i]
        if home is None or home.is_held() or home.is_moved():
            return False
        known = GraphGradient.known(parameter.grad) if self._from_graphs else None
        is_free = _is_alone(parameter) if known is None else known.is_graphs()
        return is_free and layout(parameter.grad) == layout(home.tensor)

    def copy(self) -> None:
        """Copies gradients to where the graph reads them, after `are_there`."""
        found = [self._parameters[i].grad for i in self._elsewhere]
        copy_all([self.tensors[i] for i in self._elsewhere], [each for each in found if each is not None])

    def close(self) -> None:
        """Lets go of the gradients."""
        self.tensors, self.copied = [], []


class FirstGradients:
    """Those that calls in Python have made where there were none: see Note [Gradients that add up]."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, weakref.ref[Tensor], int]] = []  # parameters, with their versions
        self._waited = 0

    @contextmanager
    def noted(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Around a call in Python."""
        before = [(each, version(each)) for each in parameters if each.grad is None]
        yield
        made = [(each, weakref.ref(each.grad), then) for each, then in before if each.grad is not None]
        self._made = made or self._made

    def are_added_to(self) -> bool:
        """Whether a call is to wait for a graph that makes them. It does so a few times."""
        are_there = (p.grad is not None and p.grad is ref() and version(p) == then for p, ref, then in self._made)
        is_first = bool(self._made) and all(are_there)
        self._waited = self._waited + 1 if is_first else 0
        return 0 < self._waited <= _MAX_WAITS


_Owners = tuple[int, int, int]  # see `GraphGradient._count`


class GraphGradient:
    """A gradient that graphs write, and how many hold it if nobody comes to hold it besides.

    Args:
        is_shared: whether somebody has held it before a graph wrote it.
    """

    changes: ClassVar[int] = 0  # how often `owners` of one has changed
    _known: ClassVar[weakref.WeakValueDictionary[int, GraphGradient]] = weakref.WeakValueDictionary()  # by storage

    def __init__(self, tensor: Tensor, parameter: Tensor, *, is_shared: bool = False) -> None:
        self.tensor, self.local, self.parameter, self.is_shared = tensor, local_tensor(tensor), parameter, is_shared
        self.memory, self.storage, self._place = self.local.untyped_storage(), storage_id(self.local), place_of(tensor)
        self._memory = self.local.detach()  # keeps the storage if the tensor gets another one
        self.owners: _Owners | None = None
        self._known[self.storage] = self

    def count(self) -> None:
        """Takes whoever holds it now for the graphs and the parameter."""
        if self.owners is None:
            with counting:
                self.owners = self._count()
            GraphGradient.changes += 1

    def _count(self) -> _Owners:
        """References from Python, those from C++ without the parameter's, and what holds the memory that it has had."""
        tensor, local = self.tensor, self.local
        uses = tensor_use_count(tensor)
        has_left = storage_id(local) != self.storage
        # What holds it from C++, however often, counts as one more reference from Python.
        counts = [sys.getrefcount(tensor) - (uses > 1), uses - self.is_parameters()]
        if local is not tensor:
            uses = tensor_use_count(local)
            counts = [counts[0] + sys.getrefcount(local) - (uses > 1), counts[1] + uses]
        return counts[0], counts[1], holders_of_storage(partial(_memory_of, self)) + has_left

    @classmethod
    def of(cls, tensor: Tensor, parameter: Tensor, *, is_shared: bool = False) -> GraphGradient:
        """One for each tensor, whichever graphs use it, so that none of them holds the tensor itself."""
        known = cls.known(tensor)
        if known is None or known.tensor is not tensor or known.parameter is not parameter or known.is_moved():
            return cls(tensor, parameter, is_shared=is_shared)
        return known

    @classmethod
    def known(cls, tensor: Tensor | None) -> GraphGradient | None:
        """That of the same memory."""
        return None if tensor is None else cls._known.get(storage_id(local_tensor(tensor)))

    @classmethod
    def all(cls) -> list[GraphGradient]:
        return alive(cls._known.valuerefs())

    @classmethod
    def tensors(cls) -> list[Tensor]:
        return [tensor for known in cls.all() for tensor in (known.local, known._memory)]

    @classmethod
    @contextmanager
    def recounted(cls, parameters: Iterable[Tensor]) -> Iterator[None]:
        """What comes to hold gradients of these inside, or holds them no more, is part of graphs."""
        own = {*map(id, parameters)}  # other threads may come to hold those of others
        with counting:
            found = (known for known in cls.all() if id(known.parameter) in own)
            before = [(known, known._count(), known.owners) for known in found]
        yield
        cls.changes += 1
        with counting:
            for known, counted, owners in before:
                if owners is not None:
                    now = known._count()
                    python, cpp, storages = (then + new - old for then, new, old in zip(owners, now, counted))
                    known.owners = python, cpp, storages

    def is_held(self) -> bool:
        """Whether anybody holds the tensor besides the graphs and the parameter, or has a view of it."""
        if not self._has_more():
            return False
        with counting:  # another thread may just look at all tensors
            return self._has_more()

    def _has_more(self) -> bool:
        then = self.owners
        assert then is not None
        now = self._count()
        return now != then and (now[0] > then[0] or now[1] > then[1] or now[2] > then[2])

    def is_graphs(self) -> bool:
        """Whether only graphs and the parameter hold it, so that the parameter may get another one."""
        return not (self.is_shared or self.is_held())

    def is_parameters(self) -> bool:
        return self.parameter.grad is self.tensor

    def is_moved(self) -> bool:
        """Whether somebody has given the tensor other memory, or another layout."""
        return place_of(self.tensor) != self._place


class Overwritten:
    """The gradients that a replay overwrites without reading them. It holds none of the tensors."""

    def __init__(self, gradients: Iterable[GraphGradient]) -> None:
        self.gradients = [*{id(each.tensor): each for each in gradients}.values()]
        self._are_plain = all(each.local is each.tensor for each in self.gradients)
        tensors = self._tensors()
        self._metadata = tensor_guards(tensors)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._indices = [*range(len(tensors))]
        self._storages = [each.storage for each in self.gradients]
        self._parameters = [each.parameter for each in self.gradients]
        self._not_held: Any = None  # the counts by which it was found that nobody holds one

    def _tensors(self) -> list[Tensor]:
        tensors = [each.tensor for each in self.gradients]
        return tensors if self._are_plain else [*tensors, *(each.local for each in self.gradients)]

    def are_held(self) -> bool:
        """Whether somebody holds one, or has a view of it."""
        if (counts := self._counts()) == self._not_held:
            return False
        if any(each.is_held() for each in self.gradients):
            return True
        self._not_held = counts
        return False

    def _counts(self) -> Any:
        """All that `GraphGradient.is_held` looks at. A loop in Python would take several times as long."""
        tensors = self._tensors()
        return (
            [*map(sys.getrefcount, tensors)],
            [*map(tensor_use_count, tensors)],
            [*map(storage_use_count, self._storages)],
            [*map(sys.getrefcount, map(_memory_of, self.gradients))],
            [*map(is_, map(_gradient_of, self._parameters), tensors)],
            GraphGradient.changes,
        )

    def are_moved(self) -> bool:
        """Whether somebody has given one other memory, or another layout."""
        if not self.gradients:
            return False
        if self._are_plain:
            tensors = self._tensors()
            if addresses_equal(tensors, self._addresses, self._indices) and self._metadata.check(*tensors):
                return False
        return any(each.is_moved() for each in self.gradients)


def place_of(tensor: Tensor | None) -> Any:
    """Where a gradient is, and how it is laid out. That of one without an address is equal to no other."""
    if tensor is None:
        return None
    local = local_tensor(tensor)
    return (local.data_ptr(), layout(local), layout_of_dtensor(tensor)) if has_storage(local) else object()


def is_changed(tensor: Tensor, before: Any) -> bool:
    """Whether a tensor that had nothing of this has attributes, or a gradient, or is not at ``before``, its place."""
    has_gradient = tensor.requires_grad or tensor.grad is not None
    return has_gradient or bool(vars(tensor)) or place_of(tensor) != before


def _address_of(gradient: Tensor | None) -> int:
    """Where its first element is; 0 if it has none."""
    return gradient.data_ptr() if gradient is not None and gradient.numel() and has_memory(gradient) else 0
