"""Gradients that callers get where a backward made them, in the arena's memory, without a copy.

Note [Lent gradients]
    Without graphs, the gradients of a backward take the memory of activations that it does not need any more. If graphs
    copied them out, there would be memory for both. So a backward that allocates in the arena of its forward lends its
    gradients: the caller gets tensors of the arena's memory. Before anybody uses the arena again, they have to be back,
    which means that nobody holds them any more, nor views of them: ``zero_grad()`` before the next forward sees to it.
    Those that somebody still holds are moved: their storages get memory of their own, with the same contents, so that
    whoever holds them sees no change. From then on the pair copies its gradients out, because a loop that holds
    gradients once does so again, and a storage that was moved cannot be lent a second time. Only the thread that they
    were lent to moves them: it does nothing else with them meanwhile. To other threads the arena is not free.
    Before, what a backward that raised has left in autograd's queue is dropped: nobody holds that.

    Between two replays nobody owns the memory of what replays lend: the pool hands it out to whoever holds the arena.
    The storages keep the pool, so that the memory stays mapped where they outlive the graphs.

    Nothing is lent with ``verify=``, which runs a backward twice, nor with ``memory_budget=``, which would count it.

    Some users of memory cannot be seen. One is a stream that still reads a gradient which nobody holds. Of memory of
    the caching allocator, ``record_stream`` says so. A gradient that is lent has to be held until the stream is done.
    The others know the address: a CUDA graph of the user's, or another thread in the middle of an operator. The
    gradient that they share is moved, and they are not told. Another library that got the gradient through DLPack holds
    its memory without a tensor of Python. Then nothing moves, and the arena is not free until that is over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch

from thunder_cg.compat.guards import addresses_equal
from thunder_cg.compat.objects import counting
from thunder_cg.compat.tensors import holders_of_storage, storage_id, storage_use_count
from thunder_cg.runtime.backend import Pool


class Lent:
    """Gradients that one region of a backward lends, in the arena's memory.

    Args:
        tensors: by their position among the region's results. Callers have no tensors of their memory yet.
        stop_lending: is called when some were moved, so that no replay lends them again.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor], stop_lending: Callable[[], None]) -> None:
        self.is_owned = True
        self._tensors, self.stop_lending = dict(tensors), WeakMethod(stop_lending)
        self._by_storage = {storage_id(tensor): tensor for tensor in tensors.values()}
        self._each = [*self._by_storage.values()]
        self._storages = [tensor.untyped_storage() for tensor in self._each]
        with counting:
            self._owners = self._count()
        self._not_held: Any = None  # the counts by which it was found that nobody holds one
        self._addresses, self._indices = [t.data_ptr() for t in self._each], [*range(len(self._each))]
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in self._each)
        self.are_apart = len(self._each) == len(self._tensors)  # whether no two share memory

    def hand_out(self, results: list[Any]) -> None:
        """Puts new tensors of the memory into ``results``."""
        for i, tensor in self._tensors.items():
            results[i] = tensor.detach()

    @property
    def device(self) -> torch.device:
        return self._each[0].device

    def disown(self, pool: Pool) -> None:
        """From here on the pool may use the memory again, and only replays lend it."""
        pool.disown(self._each)
        self.is_owned = False

    def is_in_place(self) -> bool:
        """Whether no storage has got other memory, as ``resize_`` of a caller's tensor gives it."""
        return addresses_equal(self._each, self._addresses, self._indices)

    def _count(self) -> list[int]:
        return [holders_of_storage(each.untyped_storage) for each in self._each]

    def held(self) -> list[torch.Tensor]:
        """Of each storage that callers still hold, a tensor."""
        counts = [*map(storage_use_count, self._by_storage)], [*map(sys.getrefcount, self._storages)]
        if counts == self._not_held:
            return []
        held = [tensor for tensor, uses, owners in zip(self._each, self._count(), self._owners) if uses > owners]
        if not held:
            self._not_held = counts
        return held
