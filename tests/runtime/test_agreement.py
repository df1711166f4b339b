"""Rounds of votes in a store, without other processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError, HashStore

from thunder_cg.compat import distributed
from thunder_cg.errors import RanksDiffer
from thunder_cg.runtime import agreement
from thunder_cg.runtime.agreement import Collectives, Round, call_of_step


class Group:
    """What a round asks of a process group, for the rank 0 of two."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class Other:
    """Rank 1, which writes its votes down before rank 0 asks."""

    def __init__(self, store: HashStore) -> None:
        self._store = store

    def says(self, call: int, stage: str, vote: str) -> None:
        self._store.set(f"thunder_cg/{call}/{stage}/1", vote)


def watched(groups: object) -> None:
    """There is no device to watch."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    made = HashStore()
    monkeypatch.setattr(distributed, "store", lambda group: made)
    monkeypatch.setattr(distributed, "is_alive", lambda group: True)
    monkeypatch.setattr(agreement, "_TIMEOUT", 0.02)
    return made


@pytest.fixture
def group() -> Group:
    return Group()


def test_ranks_that_say_the_same_agree(store: HashStore, group: Group) -> None:
    Other(store).says(1, "before", "subject")
    Collectives([group], asks=True, watch=watched).next_round().ask("before", "subject")
    assert store.get("thunder_cg/1/before/0") == b"subject"


@pytest.mark.parametrize(
    ("stage", "vote", "message", "may_pass"),
    [
        ("before", "another", "rank 1 captures something else", False),
        ("before", "no: its store is full", "rank 1 does not capture it: its store is full", True),
        ("before", "never: cannot", "rank 1 does not capture it: cannot", False),
        ("", "no: it warms up", "rank 1 does not capture it: it warms up", True),
        ("after", "subject", "rank 1 did not answer within 0.02 s", True),
    ],
)
def test_ranks_that_differ(store: HashStore, group: Group, stage: str, vote: str, message: str, may_pass: bool) -> None:
    Other(store).says(1, stage, vote)
    with pytest.raises(RanksDiffer, match=message) as caught:
        Collectives([group], asks=True, watch=watched).next_round().ask("before", "subject")
    assert caught.value.may_pass is may_pass
    mine = store.get("thunder_cg/1/before/0").decode()
    assert mine.startswith("no: " if may_pass else "never: ") and message in mine  # for a rank that asks later


def test_steady_calls_are_counted_and_say_nothing(store: HashStore, group: Group) -> None:
    collectives = Collectives([group], asks=True, watch=watched)
    for _ in range(3):
        collectives.count_replay()
    assert store.num_keys() == 0
    Other(store).says(4, "before", "subject")
    collectives.next_round().ask("before", "subject")


def test_functions_of_one_group_count_together(store: HashStore, group: Group) -> None:
    first, second = (Collectives([group], asks=True, watch=watched) for _ in range(2))
    first.count_replay()
    second.next_round().decline("it warms up")
    assert store.get("thunder_cg/2//0") == b"no: it warms up"


def test_a_step_is_one_call(store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in it, replayed or in Python. A capture is none, and neither is a step that does not communicate."""
    issued = {"cpu": 0}
    monkeypatch.setattr(distributed, "groups", lambda: [group])
    monkeypatch.setattr(distributed, "progress", lambda group: dict(issued))
    monkeypatch.setattr(distributed, "capture_problem", lambda group, device_type: None)
    collectives = Collectives([group], asks=True, watch=watched)
    for communicates in (collectives.count_replay, lambda: issued.update(cpu=1)):
        votes = Round([group], asks=True)
        votes.decline("it runs in Python")
        with call_of_step("cpu", votes) as call:
            communicates()
            collectives.next_round().decline("it warms up")
        assert call.groups == [group] and call.objection is None
    assert store.num_keys() == 4
    assert all(store.check([f"thunder_cg/{key}//0"]) for key in ("1", "1/2", "2", "2/1"))
    collectives.count_replay()
    for is_capture in (True, False):
        votes = Round([group], asks=True)
        votes.decline("it runs in Python")
        with call_of_step("cpu", None if is_capture else votes, is_capture=is_capture) as call:
            if is_capture:
                collectives.next_round().decline("inside another capture")
        assert call.groups == [group] * is_capture
    assert store.check(["thunder_cg/4/captured/1//0"]) and not store.check(["thunder_cg/4//0"])
    Other(store).says(4, "before", "subject")
    collectives.next_round().ask("before", "subject")


def test_nobody_is_asked_where_the_user_vouches_for_all(store: HashStore, group: Group) -> None:
    round_ = Collectives([group], asks=False, watch=watched).next_round()
    round_.ask("before", "subject")
    round_.decline("it warms up")
    assert store.num_keys() == 0


def test_a_store_that_is_gone(store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object) -> None:
        raise DistNetworkError("connection reset")

    votes = Collectives([group], asks=True, watch=watched).next_round()
    votes.decline("it warms up")
    monkeypatch.setattr(distributed, "store", lambda group: SimpleNamespace(set=gone, check=gone, delete_key=gone))
    votes.decline("it warms up")
    votes.withdraw([])
    with pytest.raises(RanksDiffer, match="the store of its group fails: connection reset"):
        votes.ask("before", "subject")


def test_time_outs_are_bounded(store: HashStore, group: Group) -> None:
    collectives = Collectives([group], asks=True, watch=watched)
    for _ in range(agreement._MAX_TIMEOUTS):
        with pytest.raises(RanksDiffer, match="did not answer"):
            collectives.next_round().ask("before", "subject")
    with pytest.raises(RanksDiffer, match=r"failed to answer 6 times") as caught:
        collectives.next_round().ask("before", "subject")
    assert not caught.value.may_pass


def test_holders_are_told_before_a_group_goes(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "before_shutdown", lambda callback: None)
    told = []

    class Holder:
        def close_recordings(self, *, may_wait: bool) -> None:
            told.append((self, may_wait))

    holder, other = Holder(), Holder()
    Collectives([group], asks=True, watch=watched).held_by(holder)
    Collectives([Group()], asks=True, watch=watched).held_by(other)
    agreement._close_holders(group, may_wait=False)
    assert told == [(holder, False)]
