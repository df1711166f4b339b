"""Tensors of the state to which a step gives other memory, as in ``p.data = new``.

Note [Replaced storages]
    After ``p.data = new``, ``p`` has the storage of ``new``, and whoever holds the storage before keeps what was there.
    A graph copies what the step leaves in ``p`` back to its original storage, that at the capture, and each replay
    leaves ``p`` there. Nobody sees that, unless a tensor besides ``p`` has one of the two storages. So before a replay
    it is counted who holds them, and the step runs in Python if somebody else does. What that gives ``p`` is copied
    back before the next replay. What the step carries that has the memory of ``p``, as in the state of an optimizer for
    SAM, has it in the graph, too, and after each replay.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, UntypedStorage

from thunder_cg.compat.objects import alive
from thunder_cg.compat.tensors import has_storage, holders_of_storage, storage_id, storage_use_count, tensor_use_count
from thunder_cg.errors import CaptureLater, CaptureRefused, SkipReason
from thunder_cg.runtime.backend import Backend, Pool
from thunder_cg.runtime.inputs import CopiedInput, place
from thunder_cg.runtime.tensors import copy_all, layout, same_tensors
from thunder_cg.step.gradients import place_of
from thunder_cg.step.other_memory import can_move

if TYPE_CHECKING:
    from thunder_cg.step.state import StepState

_KEEPS_BEFORE = "the step keeps or returns the memory that {} had before it got other memory"
KEPT_SHARES = SkipReason(
    "a tensor that the step keeps shares memory with another one that it uses", "have it keep a clone"
)
_KEEPS_PART = "the step keeps or returns a part of the memory that {} gets"


def _held(name: str) -> SkipReason:
    problem = f"{name} gets other memory in the step, and somebody holds a tensor or the storage of the memory before"
    fix = "hold a clone of it, or write in place, such as by .data.copy_()"
    return SkipReason(f"{problem}, which a replay would overwrite", fix)


def same_places(tensors: Sequence[Tensor], state: Sequence[Tensor]) -> dict[int, int]:
    """Positions of tensors that are where one of the state is, and laid out alike, and the position of that one."""
    if not tensors:
        return {}
    at = {place_of(each): i for i, each in enumerate(state) if has_storage(each) and each.numel()}
    return {i: at[place] for i, each in enumerate(tensors) if (place := place_of(each)) in at}


def _holders(get: Callable[[], UntypedStorage], at: int, backend: Backend) -> int:
    """How many tensors have the memory, and what refers to the storage that ``get`` returns, but for graphs."""
    own = sum(each is get() for known in alive(ReplacedStorages.all.valuerefs()) for each in known.originals)
    return holders_of_storage(get) - own - backend.storage_uses(at)  # its `storage_id`


class ReplacedStorages:
    """The tensors whose storages one graph replaces: see Note [Replaced storages].

    Args:
        tensors: are in their original storages.
        names: of them.
        views: of tensors that are carried, by position, those that have the memory of one, and which one.
        holders: how many tensors have the memory of each, at most.
    """

    all: ClassVar[weakref.WeakValueDictionary[int, ReplacedStorages]] = weakref.WeakValueDictionary()  # by identity

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        views: Mapping[int, int],
        holders: Sequence[int],
        backend: Backend,
    ) -> None:
        self._tensors, self._names, self._views, self._backend = tensors, names, views, backend
        self._allowed = holders
        self._not_held: Any = None  # the counts by which it was found that nobody else holds one
        self.originals = [tensor.untyped_storage() for tensor in tensors]  # which count as no tensors
        self.all[id(self)] = self
        self._ids, self._addresses = [*map(storage_id, tensors)], [tensor.data_ptr() for tensor in tensors]
        self._layouts = [(tensor.storage_offset(), tensor.size(), tensor.stride()) for tensor in tensors]

    def fit(self, carried: Sequence[Tensor]) -> bool:
        """Whether the same ones of these have the memory of one."""
        return not self._tensors or same_places(carried, self._tensors) == self._views

    def others(self, carried: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those that have memory of their own."""
        return [each for i, each in enumerate(carried) if i not in self._views] if self._views else carried

    def why_not(self, carried: Sequence[Tensor]) -> SkipReason | None:
        """Why no replay is right now: somebody holds memory that it would overwrite. Not if `is_lost`."""
        uses = Counter(map(id, carried)) if self._views else {}
        for at, i in self._views.items():
            owned = 2 * uses[id(carried[at])] + 1  # by its places, by the list, and by the call
            if sys.getrefcount(carried[at]) > owned or tensor_use_count(carried[at]) > 1:
                return _held(self._names[i])
        ids = [*map(storage_id, self._tensors)]
        references = map(sys.getrefcount, map(Tensor.untyped_storage, self._tensors))
        counts = [*map(storage_use_count, ids)], [*map(self._backend.storage_uses, ids)], [*references]
        if counts == self._not_held:
            return None
        for name, tensor, at, most in zip(self._names, self._tensors, ids, self._allowed):
            if _holders(tensor.untyped_storage, at, self._backend) > most:
                return _held(name)
        self._not_held = counts
        return None

    def is_lost(self) -> bool:
        """Whether a tensor has left its original storage, and somebody has that, maybe itself in another part."""
        return any(
            _holders(partial(self.originals.__getitem__, i), self._ids[i], self._backend) for i in self._elsewhere()
        )

    def _elsewhere(self) -> list[int]:
        """The positions of those that are not in their original storage, or not at its place there."""
        ids, at = [*map(storage_id, self._tensors)], [*map(Tensor.data_ptr, self._tensors)]
        if ids == self._ids and at == self._addresses:
            return []
        return [i for i in range(len(ids)) if (ids[i], at[i]) != (self._ids[i], self._addresses[i])]

    def copy_back(self, carried: Sequence[Tensor]) -> None:
        """Copies to the original storages what is elsewhere, after `why_not`."""
        if not (elsewhere := self._elsewhere()):
            return
        memory = {i: self._tensors[i].new_empty(0).set_(self.originals[i], *self._layouts[i]) for i in elsewhere}
        copy_all([*memory.values()], [self._tensors[i] for i in elsewhere])
        for tensor, i in [
            *((self._tensors[i], i) for i in elsewhere),
            *((carried[at], i) for at, i in self._views.items()),
        ]:
            if i in memory:
                tensor.data = memory[i]

    def close(self) -> None:
        """Lets go of the memory."""
        self._tensors, self.originals, self._ids, self._addresses = [], [], [], []


class OriginalStorages:
    """The storages of a state's tensors when a capture begins.

    Args:
        carried: tensors that are carried, which may have the memory of one of the state.
    """

    def __init__(self, state: StepState, carried: Sequence[Tensor], backend: Backend) -> None:
        self._state, self._backend = state, backend
        self._holders = [
            _holders(each.untyped_storage, storage_id(each), backend) if has_storage(each) else 0
            for each in state.memory
        ]
        self.views = same_places(carried, state.memory)
        self._viewed = Counter({id(carried[at]): i for at, i in self.views.items()}.values())
        self._memory = [each.data if has_storage(each) else None for each in state.memory]
        self._replaced: list[int] = []

    def others(self, carried: Sequence[Tensor]) -> list[Tensor]:
        """Those that have memory of their own."""
        return [each for i, each in enumerate(carried) if i not in self.views]

    def place(
        self, pool: Pool, batch: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[list[CopiedInput], list[Tensor]]:
        """Places the inputs and copies them; what is carried with memory of the state is there in the graph, too."""
        first, same = len(batch), same_tensors(inputs)
        copied, buffers = place(pool, inputs, frozenset(first + i for i in self.views), same)
        for at, i in self.views.items():
            buffers[first + at] = buffers[same[first + at]] if first + at in same else self._state.memory[i].data
        copy_all([each.target for each in copied], [each.source(inputs) for each in copied])
        return copied, buffers

    def copy_back(self, leaves: list[Any], stay: Iterable[Tensor]) -> None:
        """In a capture, after the step: has it copy back what it has left elsewhere, if that memory is its own.

        Args:
            leaves: what the step returns and keeps. Those that have the new memory get the original one.
            stay: what the step has found where something is carried, and left there.

        Raises:
            CaptureRefused: the step keeps the memory before, or a part of the one after.
            CaptureLater: somebody else has the memory before.
        """
        tensors = self._state.memory
        gradients = (parameter.grad for parameter in self._state.parameters)
        known = {storage_id(each) for each in (*self._memory, *gradients) if each is not None and has_storage(each)}
        now = Counter(storage_id(each) for each in tensors if has_storage(each))
        moved = [i for i, pair in enumerate(zip(tensors, self._memory)) if _is_moved(*pair)]
        self._replaced = [i for i in moved if now[at := storage_id(tensors[i])] == 1 and at not in known]
        kept = [each for each in (*leaves, *stay) if isinstance(each, Tensor)]
        pairs = [(tensors[i], original) for i in self._replaced if (original := self._memory[i]) is not None]
        for i, (tensor, original) in zip(self._replaced, pairs):
            if self._holders[i] > 1 + self._viewed[i]:
                raise CaptureLater(*_held(self._name(i)))
            if any(storage_id(each) == storage_id(original) for each in kept):
                raise CaptureRefused(_KEEPS_BEFORE.format(self._name(i)), "clone it")
            made: dict[int, Tensor] = {}
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and leaf is not tensor and storage_id(leaf) == storage_id(tensor):
                    if place_of(leaf) != place_of(tensor):
                        raise CaptureRefused(_KEEPS_PART.format(self._name(i)), "clone it")
                    leaves[at] = made.setdefault(id(leaf), original.detach())
        copy_all([original for _, original in pairs], [tensor for tensor, _ in pairs])
        for tensor, original in pairs:
            tensor.data = original

    def replaced(self) -> ReplacedStorages:
        """Those that the step has given other memory. `CaptureRefused` if it carries what has that of another one."""
        names, at = [*map(self._name, self._replaced)], {i: new for new, i in enumerate(self._replaced)}
        if not at.keys() >= {*self.views.values()}:
            raise CaptureRefused(*KEPT_SHARES)
        holders = [1 + self._viewed[i] for i in self._replaced]
        views = {position: at[i] for position, i in self.views.items()}
        tensors = [self._state.memory[i] for i in self._replaced]
        self._state.let_move(self._replaced)
        return ReplacedStorages(tensors, names, views, holders, self._backend)

    def _name(self, i: int) -> str:
        return self._state.name_of(self._state.tensors[i])


def _is_moved(now: Tensor, then: Tensor | None) -> bool:
    """Whether it has other memory, and is laid out alike there."""
    if then is None or not has_storage(now) or storage_id(now) == storage_id(then):
        return False
    return can_move(now) and layout(now)[:4] == layout(then)[:4]
