"""How ranks number their calls, whatever each of them counts: ranks are threads here, with groups over one store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed import HashStore

from thunder_cg.compat import distributed
from thunder_cg.errors import RanksDiffer
from thunder_cg.runtime import agreement

CALLS = 12


class Group:
    """What agreement asks of a group of threads."""

    def __init__(self, store: HashStore, rank: int, ranks: threading.Barrier) -> None:
        self.store, self.index, self._ranks = store, rank, ranks
        self.issued = 0

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self._ranks.parties

    def communicate(self) -> None:
        self.issued += 1
        self._ranks.wait(10)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_alive", lambda group: True)
    monkeypatch.setattr(distributed, "store", lambda group: group.store)
    monkeypatch.setattr(distributed, "ranks", lambda group: range(group.size()))
    monkeypatch.setattr(distributed, "progress", lambda group: {"cpu": group.issued})
    monkeypatch.setattr(distributed, "default_group", lambda: None)
    monkeypatch.setattr(agreement, "_TIMEOUT", 0.2)
    monkeypatch.setattr(agreement, "_SHORTEST", 0.1)


def captures(group: Any, uncounted: int) -> list[bool]:
    """Which calls a rank captures, if it makes the collectives of the first ones by itself."""
    calls, found = agreement.Collectives([group], asks=True, watch=lambda groups: None), []
    for i in range(CALLS):
        if i >= uncounted:
            votes = calls.next_round()
            try:
                votes.ask("before", "the same")
                votes.ask("after", "the same")
                found.append(True)
            except RanksDiffer:
                found.append(False)
        group.communicate()
    return found


@pytest.mark.parametrize("uncounted", [(0, 2, 3), (3, 0, 1, 2), (0, 1, 2, 3)])
def test_ranks_that_count_otherwise(threads: None, uncounted: Sequence[int]) -> None:
    """Each may lack another number of calls, and all agree after asking in vain a few times."""
    store, ranks = HashStore(), threading.Barrier(len(uncounted))
    found: list[list[bool]] = [[] for _ in uncounted]
    running = [
        threading.Thread(target=lambda i=i: found[i].extend(captures(Group(store, i, ranks), uncounted[i])))
        for i in range(len(uncounted))
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(20)
    assert all(each[-4:] == [True] * 4 for each in found), found


def test_a_rank_that_has_waited_in_vain_very_often(threads: None) -> None:
    """Half of the time after each time-out is no time at some point, and no error."""
    group = Group(HashStore(), 0, threading.Barrier(2))
    votes = agreement.Collectives([group], asks=True, watch=lambda groups: None).next_round()
    agreement._states[group].timeouts = 5000
    with pytest.raises(RanksDiffer, match="did not answer within 0.1 s"):
        votes.ask("before", "the same")
