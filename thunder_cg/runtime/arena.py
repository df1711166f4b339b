"""Arenas: memory pools that one call holds at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from thunder_cg.runtime.backend import Backend, Pool


class Arena:
    """One pool per device, and the lock that says who may use them.

    A release may come from a destructor: on any thread, at any point, even while this thread looks for an arena. So
    holding and releasing are single atomic steps without a queue.
    """

    def __init__(self, backend: Backend, poison: bool) -> None:
        self._backend, self._poison = backend, poison
        self._held = threading.Lock()
        self._pools: dict[torch.device, Pool] = {}
        # Takes the arena for the caller if nobody has it, and ends the life of everything in its memory. Each steady
        # call does both, so they are the lock's own functions.
        self.try_hold: Callable[[], bool] = partial(self._held.acquire, False)
        self.release: Callable[[], None] = self._held.release
        if poison:
            self.release = partial(_poison_and_release, self._pools, self._held)

    def is_held(self) -> bool:
        return self._held.locked()

    def forget(self, values: Iterable[torch.Tensor], kept: Iterable[torch.Tensor]) -> None:
        """While a call runs: nobody owns the memory of ``values`` any more, but what is ``kept``: it may be reused."""
        if self._poison:
            spared = {tensor.untyped_storage().data_ptr() for tensor in kept}
            for storage in [tensor.untyped_storage() for tensor in values]:
                if storage.data_ptr() not in spared:
                    self._pools[storage.device].forget(storage)

    def pool(self, device: torch.device) -> Pool:
        """The arena's memory on ``device``. Only for the holder."""
        if device not in self._pools:
            self._pools[device] = self._backend.pool(device)
            self._pools[device].enter()
        return self._pools[device]

    def enter(self) -> None:
        """Orders the caller's streams after what used the arena before. Only for the holder."""
        for pool in self._pools.values():
            pool.enter()

    def nbytes(self) -> int:
        return sum(pool.nbytes() for pool in self._pools.values())

    def trim(self) -> None:
        """Gives back memory that no graph needs. Only for the holder."""
        for pool in self._pools.values():
            pool.trim()

    def __del__(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _poison_and_release(pools: Mapping[torch.device, Pool], held: threading.Lock) -> None:
    try:
        for pool in pools.values():
            pool.poison()
    finally:
        held.release()


class Arenas:
    """The arenas of one transform, up to a limit for each trace pair: what was split has many calls in flight at once.

    Programs keep an arena alive; when the last one that used it is gone, it goes too.

    Note [Scratch arenas]
        A forward holds its arena until its backward is over, so calls in flight have an arena each. If each backward
        had its temporary memory in the arena of its forward, there would be as much of it as there are calls in flight,
        although backwards run one after the other. So once there are two arenas, a backward allocates in a scratch
        arena, which it holds only while it runs: all backwards share it. Where one call is in flight at a time, a
        backward allocates in its forward's arena, and reuses the memory of saved values that it needs no more.
    """

    def __init__(self, backend: Backend, limit: int, poison: bool) -> None:
        self._backend, self._limit, self._poison = backend, limit, poison
        self._lock = threading.Lock()
        self._arenas: list[weakref.ref[Arena]] = []
        self._scratch: list[weakref.ref[Arena]] = []
        self._pairs: weakref.WeakSet[object] = weakref.WeakSet()

    def join(self, pair: object) -> None:
        """Raises the limit while ``pair`` lives, by what each may have."""
        self._pairs.add(pair)

    def hold(self, preferred: list[Arena]) -> Arena | None:
        """Takes a free arena, one of ``preferred`` if possible, a new one if none is free; None past the limit."""
        for arena in preferred:
            if arena.try_hold():
                return arena
        return self._hold_one_of(self._arenas)

    def hold_scratch(self) -> Arena | None:
        """Takes a scratch arena for a backward; None where it should allocate in the arena of its forward."""
        several = len(_alive(self._arenas)) > 1
        return self._hold_one_of(self._scratch) if several else None

    def _hold_one_of(self, arenas: list[weakref.ref[Arena]]) -> Arena | None:
        with self._lock:
            alive = _alive(arenas)
            for arena in alive:
                if arena.try_hold():
                    return arena
            if len(alive) >= self._limit * len(self._pairs):
                return None
            arena = Arena(self._backend, self._poison)
            arena.try_hold()
            arenas[:] = [weakref.ref(a) for a in (*alive, arena)]
            return arena


def _alive(arenas: list[weakref.ref[Arena]]) -> list[Arena]:
    return [arena for arena in (ref() for ref in arenas) if arena is not None]
