"""Rounds of votes in a store, without other processes."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

import pytest
import thunder
import torch
from support import replays
from torch import distributed as dist
from torch.distributed import DistNetworkError, HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from thunder_cg import cudagraph_transform
from thunder_cg.compat import distributed
from thunder_cg.errors import OptionsDiffer, RanksDiffer
from thunder_cg.runtime.ranks import agreement, groups as ranks_groups
from thunder_cg.runtime.ranks.agreement import Collectives, Round
from thunder_cg.runtime.ranks.groups import meets, state_of
from thunder_cg.runtime.ranks.same_options import SameOptions
from thunder_cg.runtime.ranks.steps import call_of_step


class Group:
    """What a round asks of a process group, for its rank 0."""

    def __init__(self, size: int = 2) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


class Other:
    """Rank 1, which writes its votes down before rank 0 asks."""

    def __init__(self, store: HashStore) -> None:
        self._store = store

    def says(self, call: int | str, stage: str, vote: str) -> None:
        self._store.set(f"thunder_cg/1/1/{stage}/1", f"{call} {vote}")


def watched(groups: object) -> None:
    """There is no device to watch."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=1))  # who reads a key that is not there waits for it
    monkeypatch.setattr(distributed, "store", lambda group: made)
    monkeypatch.setattr(distributed, "is_alive", lambda group: True)
    monkeypatch.setattr(distributed, "ranks", lambda group: [*range(group.size())])
    issued = count()
    monkeypatch.setattr(distributed, "progress", lambda group: {"cpu": next(issued)})
    monkeypatch.setattr(ranks_groups, "_TIMEOUT", 0.02)
    monkeypatch.setattr(agreement, "_CAPTURE_TIMEOUT", 0.03)
    return made


def said(store: HashStore, stage: str = "", depth: int = 1, generation: int = 1) -> str:
    """What rank 0 has said last, after the number of the call."""
    return store.get(f"thunder_cg/{generation}/{depth}/{stage}/0").decode()


@pytest.fixture
def group() -> Group:
    return Group()


def test_ranks_that_say_the_same_agree(store: HashStore, group: Group) -> None:
    Other(store).says(1, "before", "subject")
    Collectives([group], asks=True, watch=watched).next_round().ask("before", "subject")
    assert said(store, "before") == "1 subject"


@pytest.mark.parametrize(
    ("stage", "vote", "message", "word"),
    [
        ("before", "another", "rank 1 captures something else", "no"),
        ("before", "no: its store is full", "rank 1 does not capture it: its store is full", "no"),
        ("before", "late: it waited", "rank 1 does not capture it: it waited", "no"),
        ("before", "never: cannot", "rank 1 does not capture it: cannot", "never"),
        ("", "no: it warms up", "rank 1 does not capture it: it warms up", "no"),
        ("before", "no: rank 0 does not capture it: it warms up", "^rank 0 does not capture it: it warms up", "no"),
        ("after", "subject", "rank 1 did not answer within 0.02 s", "late"),
    ],
)
def test_ranks_that_differ(store: HashStore, group: Group, stage: str, vote: str, message: str, word: str) -> None:
    Other(store).says(1, stage, vote)
    with pytest.raises(RanksDiffer, match=message) as caught:
        Collectives([group], asks=True, watch=watched).next_round().ask("before", "subject")
    assert caught.value.may_pass is (word != "never")
    mine = said(store, "before")
    assert mine.startswith(f"1 {word}: ") and message.removeprefix("^") in mine  # for a rank that asks later


def test_a_rank_that_is_always_first_to_look_catches_up(
    store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one call behind. When it looks, the other rank has given this call up, and is about to ask for the next."""
    monkeypatch.setattr(ranks_groups, "_TIMEOUT", 5.0)
    collectives, other = Collectives([group], asks=True, watch=watched), Other(store)
    for number in (1, 2):
        other.says(number, "before", "late: rank 0 did not answer")
        asks = threading.Timer(0.05, other.says, (number + 1, "before", "subject"))
        asks.start()
        with pytest.raises(RanksDiffer, match="rank 0 did not answer"):
            collectives.next_round().ask("before", "subject")
        asks.join()
    other.says(4, "before", "subject")
    assert not collectives.next_round().ask("before", "subject")
    assert said(store, "before") == "4 subject"


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
    assert said(store) == "2 no: it warms up"


@pytest.mark.parametrize("issued", [{"cpu": 7}, {}], ids=["", "by a backend that does not count"])
def test_a_call_that_raises(
    store: HashStore, group: Group, issued: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has communicated, while another rank waits for it: the next call has its number, if that is known."""
    monkeypatch.setattr(distributed, "progress", lambda group: dict(issued))
    collectives = Collectives([group, other := Group()], asks=True, watch=watched)
    calls, is_known = state_of(other), bool(issued)
    for _ in range(2):
        collectives.next_round().decline("it warms up")
    assert said(store) == f"{2 - is_known} no: it warms up"
    assert not collectives.meets() and calls.next_call == (3 - 2 * is_known,)
    collectives.count_replay()
    collectives.next_round()
    assert calls.next_call == (5 - 3 * is_known,)
    collectives.next_round()
    collectives.note_launch()  # PyTorch does not count what is in a graph
    assert calls.next_call == (6 - 3 * is_known,)


def test_a_step_is_one_call(store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in it, replayed or in Python. A capture is none, and neither is a step that does not communicate."""
    issued = {"cpu": 0}
    monkeypatch.setattr(distributed, "groups", lambda: [group])
    monkeypatch.setattr(distributed, "progress", lambda group: dict(issued))
    monkeypatch.setattr(distributed, "capture_problem", lambda group, device_type: None)
    collectives = Collectives([group], asks=True, watch=watched)

    def communicate() -> None:
        issued["cpu"] += 1

    for communicates in (collectives.count_replay, communicate):
        votes = Round([group], asks=True)
        votes.decline("it runs in Python")
        with call_of_step("cpu", votes) as call:
            communicates()
            collectives.next_round().decline("it warms up")
            communicate()
        assert call.groups == [group] and call.objection is None
        assert said(store, depth=2) in ("1.2 no: it warms up", "2.1 no: it warms up")
    assert said(store) == "2 no: it runs in Python" and said(store, depth=2).startswith("2.1 ")
    collectives.count_replay()
    for is_capture in (True, False):
        votes = Round([group], asks=True)
        votes.decline("it runs in Python")
        with call_of_step("cpu", None if is_capture else votes, is_capture=is_capture) as call:
            collectives.next_round().decline("inside another capture, or raises")
            issued["cpu"] += is_capture
        assert call.groups == [group] * is_capture
    assert said(store) == "4 " and said(store, depth=2).startswith("4.1 ")
    Other(store).says(4, "before", "subject")
    collectives.next_round().ask("before", "subject")


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        (("cpu",), ("it communicates on the CPU, and its graph is on cuda; do that outside of the step", True)),
        (("cpu", "cuda"), ("it communicates on the CPU, and its graph is on cuda; do that outside of the step", True)),
        (("cuda",), ("the host waits; do not wait", False)),
    ],
)
def test_a_step_on_a_gpu_that_communicates(
    group: Group, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], problem: tuple[str, bool]
) -> None:
    """What was on the CPU, as is all that gloo does, may be a thread's that saves a checkpoint: it may pass."""
    issued = {"cpu": 0, "cuda": 0}
    monkeypatch.setattr(distributed, "groups", lambda: [group])
    monkeypatch.setattr(distributed, "is_alive", lambda group: True)
    monkeypatch.setattr(distributed, "progress", lambda group: dict(issued))
    monkeypatch.setattr(distributed, "capture_problem", lambda group, device_type: ("the host waits", "do not wait"))
    with call_of_step("cuda") as call:
        issued |= dict.fromkeys(kinds, 1)
    assert call.objection is not None and (str(call.objection), call.objection.may_pass) == problem


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
    monkeypatch.setattr(distributed, "store", lambda group: SimpleNamespace(set=gone, check=gone, add=gone))
    votes.decline("it warms up")
    votes.withdraw([])
    monkeypatch.setattr(ranks_groups, "_PERIOD", 1)
    monkeypatch.delitem(vars(state_of(group)), "generation")
    state_of(group).count(None)
    with pytest.raises(RanksDiffer, match="the store of its group fails: connection reset"):
        votes.ask("before", "subject")


def test_a_fake_group_has_no_other_ranks() -> None:
    """Its store has no methods, and nobody answers."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:

        def reduced(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            dist.all_reduce(y)
            return torch.tanh(y)

        compiled = thunder.jit(reduced, transforms=[cudagraph_transform(backend="tape")])
        for _ in range(3):
            compiled(torch.ones(2))
        assert replays(compiled) == 2
    finally:
        dist.destroy_process_group()


def test_time_outs_get_short(store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank that differs does not keep a group from agreeing later."""
    monkeypatch.setattr(ranks_groups, "_SHORTEST", 0.01)
    collectives = Collectives([group], asks=True, watch=watched)
    for seconds in (0.02, 0.01, 0.01):
        with pytest.raises(RanksDiffer, match=f"did not answer within {seconds:g} s") as caught:
            collectives.next_round().ask("before", "subject")
        assert caught.value.may_pass
    Other(store).says(4, "before", "subject")
    collectives.next_round().ask("before", "subject")
    with pytest.raises(RanksDiffer, match=r"did not answer within 0.01 s"):  # one of three is forgotten
        collectives.next_round().ask("before", "subject")


def test_a_group_with_a_short_time_out(store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank may be in a collective, which would fail if this one waited as long for its vote."""
    monkeypatch.setattr(distributed, "timeout", lambda group: 0.08)
    monkeypatch.setattr(ranks_groups, "_SHORTEST", 0.001)
    with pytest.raises(RanksDiffer, match=r"did not answer within 0.01 s"):
        Collectives([group], asks=True, watch=watched).next_round().ask("before", "subject")


def test_a_rank_that_has_asked_in_vain_very_often(store: HashStore, group: Group) -> None:
    votes = Collectives([group], asks=True, watch=watched).next_round()
    state_of(group).timeouts = 5000  # half as long so often is less than a float can be
    with pytest.raises(RanksDiffer, match=r"did not answer within 0.02 s"):
        votes.ask("before", "subject")


def test_after_a_capture(store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are at the same capture, so they get time for it, and another one is one for ever."""
    monkeypatch.setattr(distributed, "ranks", lambda group: [4, 6])
    votes = Collectives([group], asks=True, watch=watched).next_round()
    state_of(group).timeouts = 9
    Other(store).says(1, "before", "subject")
    votes.ask("before", "subject")
    assert state_of(group).timeouts == 4  # they are there again, so the next capture gets more time
    Other(store).says(1, "after", "another")
    with pytest.raises(RanksDiffer, match="rank 6 captures something else") as caught:
        votes.ask("after", "subject")
    assert not caught.value.may_pass
    Other(store).says(0, "after", "")
    with pytest.raises(RanksDiffer, match=r"did not answer within 0.03 s"):
        votes.ask("after", "subject")


@pytest.mark.parametrize("others", [[], [Group(1)]], ids=["", "in a mesh with a dimension of one rank"])
def test_ranks_meet(store: HashStore, group: Group, others: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time-out; those who could replay do so if all could."""
    monkeypatch.setattr(ranks_groups, "_PERIOD", 4)
    monkeypatch.setattr(ranks_groups, "_MEETING", 3)
    monkeypatch.setattr(ranks_groups, "_MEETING_TIMEOUT", 0.01)
    collectives, met, asked = Collectives([*others, group], asks=True, watch=watched), [], []
    for call in range(1, 40):
        if meets([group]):
            met.append(call)
            Other(store).says(call, "before", "subject again" if call % 2 else "subject")
            assert collectives.next_round().ask("before", "subject", could_replay=call != 10) is bool(call % 2)
        elif call % 2:
            with pytest.raises(RanksDiffer, match="did not answer"):
                collectives.next_round().ask("before", "subject")
        else:
            collectives.count_replay()
        asked += [int(store.get("thunder_cg/1/meeting"))]
    assert met == [9, 10, 11, 21, 22, 23, 37, 38, 39]
    assert sorted({*asked}) == [8, 20, 36]
    Other(store).says(40, "before", "subject")
    monkeypatch.setattr(state_of(group), "meeting", 50)
    with pytest.raises(RanksDiffer, match=r"did not answer within 0.01 s"):
        Round([group], asks=True).ask("after", "subject", could_replay=True)
    assert not meets([group])


@pytest.mark.parametrize("is_mesh", [True, False])
def test_calls_in_several_groups_meet_apart(
    store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch, is_mesh: bool
) -> None:
    """In a mesh, or in the default group and another one: the ranks of one would not see a meeting of the other one."""
    world = Group(4)
    other = Group() if is_mesh else world
    monkeypatch.setattr(distributed, "default_group", lambda: weakref.ref(world))
    monkeypatch.setattr(ranks_groups, "_PERIOD", 4)
    both, alone = (Collectives(groups, asks=True, watch=watched) for groups in ([group, other], [group]))
    backward = Collectives([other], asks=True, watch=watched, together=[group, other])
    state_of(group).meeting = state_of(other).meeting = 5
    assert alone.meets() and not both.meets() and not backward.meets()
    with pytest.raises(RanksDiffer, match="did not answer"):
        both.next_round().ask("before", "subject")
    assert store.get(ranks_groups._common[world].key_of_meeting()) == b"8"
    for i in range(7):
        assert not both.meets()
        (both, backward)[i % 2].count_replay()
        alone.count_replay()
    assert both.meets() and backward.meets() and not alone.meets() and not meets([])


def test_a_vote_says_what_other_groups_have_said(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So in a mesh of two dimensions each rank hears of all, though it shares no group with some."""
    stores = [HashStore(), HashStore()]
    groups = [Group(), Group()]
    monkeypatch.setattr(distributed, "store", lambda group: stores[groups.index(group)])
    collectives = Collectives(groups, asks=True, watch=watched)
    for could_replay in (True, False):
        call = state_of(groups[0]).calls + 1
        for each in map(Other, stores):
            each.says(call, "before", "subject again")
        Other(stores[0]).says(call, "before", "subject" + " again" * could_replay)
        assert collectives.next_round().ask("before", "subject", could_replay=True) is could_replay
        heard = " again" * could_replay
        assert [said(each, "before") for each in stores] == [f"{call} subject again", f"{call} subject{heard}"]


def test_a_rank_that_is_elsewhere(store: HashStore, group: Group) -> None:
    """What it says of later calls is an answer, and what it has said of earlier ones is none."""
    collectives = Collectives([group], asks=True, watch=watched)
    Other(store).says(10, "", "no: it warms up")
    with pytest.raises(RanksDiffer, match="in the group, and this rank at 1; there, it warms up"):
        collectives.next_round().ask("before", "subject")
    for _ in range(9):
        collectives.count_replay()
    with pytest.raises(RanksDiffer, match="did not answer"):
        collectives.next_round().ask("before", "subject")


def test_a_rank_that_has_counted_less(store: HashStore, group: Group) -> None:
    """It counts as another one does once it hears twice of the same difference."""
    collectives = Collectives([group], asks=True, watch=watched)
    for other in (3, 5, 6):
        Other(store).says(other, "before", "subject")
        with pytest.raises(RanksDiffer, match=f"it is at call {other} that communicates in the group"):
            collectives.next_round().ask("before", "subject")
    Other(store).says(7, "before", "subject")
    collectives.next_round().ask("before", "subject")


class Thread:
    """A group as one of several ranks has it that are threads, and meet in each collective."""

    def __init__(self, rank: int, ranks: threading.Barrier) -> None:
        self.rank, self.size, self.communicate = (lambda: rank), (lambda: ranks.parties), partial(ranks.wait, 10)


def captures(group: Thread, uncounted: int) -> list[bool]:
    """Which of twelve calls a rank captures, if it makes the collectives of the first ones by itself."""
    collectives, found = Collectives([group], asks=True, watch=watched), []
    for i in range(12):
        if i >= uncounted:
            votes = collectives.next_round()
            try:
                votes.ask("before", "subject")
                votes.ask("after", "subject")
                found.append(True)
            except RanksDiffer:
                found.append(False)
        group.communicate()
    return found


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("uncounted", [(0, 2, 3), (3, 0, 1, 2), (0, 1, 2, 3)])
def test_ranks_that_all_count_otherwise(
    store: HashStore, uncounted: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lacks another number of calls, and all agree after they have asked in vain a few times."""
    monkeypatch.setattr(ranks_groups, "_TIMEOUT", 0.2)
    monkeypatch.setattr(ranks_groups, "_SHORTEST", 0.1)
    monkeypatch.setattr(agreement, "_CAPTURE_TIMEOUT", 10.0)
    ranks = threading.Barrier(len(uncounted))
    groups = [Thread(rank, ranks) for rank in range(len(uncounted))]
    with ThreadPool(len(uncounted)) as threads:
        found = threads.starmap(captures, zip(groups, uncounted), chunksize=1)
    agreed = [*map(all, zip(*(each[-7 + max(uncounted) :] for each in found)))]  # from five calls later on
    assert agreed == [True] * (7 - max(uncounted)), found


def test_keys_are_few_and_a_new_group_has_others(store: HashStore, group: Group) -> None:
    collectives = Collectives([group], asks=True, watch=watched)
    for i in range(1, 20):
        votes = collectives.next_round()
        votes.decline("it runs eagerly")
        Other(store).says(i, "before", "subject")
        votes.ask("before", "subject")
    assert store.num_keys() == 4
    Other(store).says(1, "before", "subject")  # of the old group
    anew = Group()
    with pytest.raises(RanksDiffer, match="did not answer"):
        Collectives([anew], asks=True, watch=watched).next_round().ask("before", "subject")
    assert said(store, "before", generation=2).startswith("1 late: ")


def test_a_function_that_one_rank_has_compiled_alone(
    store: HashStore, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the options of all others, so it waits for less; and other ranks count functions as this one does."""
    monkeypatch.setattr(distributed, "timeout", lambda group: 0.1)
    usual, other = {"deny": "[]"}, {"deny": "['gelu']"}

    def check(options: dict[str, str], said: str | None = None) -> None:
        if said is not None:
            store.set(f"thunder_cg/1/options/{state_of(group).functions + 1}/1", said)
        SameOptions([group], Group(), options, needs_answers=True).check("f")

    ranks_groups._states[group] = ranks_groups.GroupState(group)
    check(usual, json.dumps(usual))
    for _ in range(2):
        check(usual)
        assert store.get("thunder_cg/1/options/2/0").decode() == "alone: " + json.dumps(usual)
    monkeypatch.setattr(ranks_groups, "_TIMEOUT", 60.0)
    check(usual, "alone: " + json.dumps(usual))  # of a rank that has not waited for this one for longer
    with pytest.raises(OptionsDiffer, match=r"rank 1 has run no function .*, in 0.1 s"):
        check(other, "alone: " + json.dumps(usual))
    with pytest.raises(OptionsDiffer, match=r"rank 1 has deny=\[\], not \['gelu'\]"):
        check(other, json.dumps(usual))
    with pytest.raises(OptionsDiffer, match=r"rank 1 has run no function .*, in 0.1 s"):  # ranks have differed
        check(usual)


def test_holders_are_told_before_a_group_goes(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "before_shutdown", lambda callback: None)
    told = []

    class Holder:
        def close_recordings(self, *, may_wait: bool) -> None:
            told.append((self, may_wait))

    holder, other = Holder(), Holder()
    Collectives([group], asks=True, watch=watched).held_by(holder)
    Collectives([Group()], asks=True, watch=watched).held_by(other)
    ranks_groups.close_holders(group, may_wait=False)
    assert told == [(holder, False)]
