"""`memory_budget=` bounds what all arenas of a transform hold, and is never an error."""

from __future__ import annotations

from typing import Any

import thunder
import torch
from models import Linear
from support import programs, same, same_state, twice
from torch import nn

from thunder_cg import cudagraph_transform, explain
from thunder_cg.runtime.tape import TapeBackend, TapePool


def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x * 2) + 1)


class Module(nn.Module):
    """It has fast paths, which functions have not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fn(x)


class Budgeted:
    """`fn` under a memory budget, on the tape. A recording for n elements holds 20 n bytes; the estimate is 12 n."""

    def __init__(self, budget: int | float, **options: Any) -> None:
        self.transform = cudagraph_transform(backend="tape", memory_budget=budget, **options)
        self.compiled = thunder.jit(Module(), transforms=[self.transform])
        self._budget = budget

    def call(self, n: int, times: int = 1) -> None:
        for _ in range(times):
            x = torch.randn(n)
            same(fn(x), self.compiled(x))
            assert self.transform._shared.arenas.nbytes() <= self._budget

    def recorded(self) -> list[int]:
        """How many elements the inputs of each recording have."""
        memory = explain(self.compiled).memory
        return [recording.regions[0].copied_in // 4 for recording in memory.recordings]

    def reasons(self) -> dict[str, int]:
        traces = explain(self.compiled).traces
        return {f"{reason}; {t.fixes[reason]}": n for t in traces for reason, n in t.fallbacks.items()}


def test_the_least_valuable_recording_goes_first():
    """By what it saves per byte, of any function of the transform."""
    budgeted = Budgeted(3000)
    budgeted.call(50, 4)  # two replays in 1000 bytes
    budgeted.call(40, 12)  # ten in 800
    budgeted.call(20, 3)  # one in 400
    assert budgeted.recorded() == [50, 40, 20]
    budgeted.call(60, 2)  # needs 1200
    assert budgeted.recorded() == [40, 20, 60]
    budgeted.call(32, 2)  # needs 640; the one of 60 has not been replayed at all
    assert budgeted.recorded() == [40, 20, 32]
    budgeted.call(50, 1)  # what was discarded is captured anew, without another warm-up
    assert 50 in budgeted.recorded()
    assert budgeted.reasons() == {}


def test_a_recording_is_worth_the_launches_that_it_saves():
    """Of two that need the same memory, the one with fewer operators, though it has been replayed more often, is worth
    less."""

    def many(x):
        for _ in range(8):
            x = x.sin() * 2
        return x

    x, recordings = torch.randn(50), []
    for function, calls in ((lambda x: x.sin() * 2, 10), (many, 6)):
        compiled = thunder.jit(function, transforms=[cudagraph_transform(backend="tape")])
        for _ in range(calls):
            compiled(x)
        ((recording,),) = [program.pair.recordings for program in programs(compiled)]
        recording.nbytes = 1000  # the tape keeps what a graph would write over
        recordings.append(recording)
    few, often = recordings
    assert few.replays == often.replays + 4 == 8 and often.value == few.value * 4


def test_what_was_used_long_ago_does_not_stay_for_ever():
    budgeted = Budgeted(1600)
    budgeted.call(30, 20)
    for n in range(31, 37):
        budgeted.call(n, 6)
    assert 30 not in budgeted.recorded()


def test_past_max_recordings_the_least_valuable_goes_too():
    budgeted = Budgeted(10**6, max_recordings=2)
    memory = torch.randn(64)

    def call(offset: int, times: int) -> None:
        for _ in range(times):  # recordings differ by the alignment of the argument
            x = memory[offset : offset + 16]
            same(fn(x), budgeted.compiled(x))

    call(0, 10)
    call(1, 4)
    (program,) = programs(budgeted.compiled)
    often, seldom = program.pair.recordings[::-1]
    call(2, 3)
    assert often in program.pair.recordings and seldom.dropped and len(program.pair.recordings) == 2
    for _ in range(8):  # the first one is not used any more
        call(1, 2)
        call(2, 2)
    assert often.dropped and len(program.pair.recordings) == 2


def test_what_cannot_fit_is_not_tried(monkeypatch):
    """The reason names both values. With strict=True, too, it is no error."""
    budgeted = Budgeted(1000, strict=True)
    budgeted.call(50, 3)
    for name in ("warm_up", "capture"):
        monkeypatch.setattr(TapePool, name, None)
    budgeted.call(100, 20)
    reason = "memory_budget is 1,000 bytes, and its graphs need about 1,200 bytes; raise memory_budget"
    assert budgeted.reasons() == {reason: 20}
    assert budgeted.recorded() == [50]  # nothing had to go for it
    assert all(part in str(explain(budgeted.compiled)) for part in reason.split("; "))


def test_an_estimate_that_was_too_low_is_learned_from():
    """1200 bytes are expected, and 2000 come: that capture is discarded, and there is no other."""
    budgeted = Budgeted(1500)
    budgeted.call(100, 30)
    assert budgeted.recorded() == []
    (program,) = programs(budgeted.compiled)
    assert program.regions[0].stats.captures == 1
    (reason,) = budgeted.reasons()
    assert reason == "memory_budget is 1,500 bytes, and its graphs need about 2,000 bytes; raise memory_budget"


def test_new_work_gets_the_memory_of_old_work():
    budgeted = Budgeted(3000)
    for n in range(20, 26):
        budgeted.call(n, 2)
    for program in programs(budgeted.compiled):
        for recording in program.pair.recordings:
            recording.replays = 10**6
    for _ in range(100):
        budgeted.call(40)
        budgeted.call(42)
    assert {40, 42} <= set(budgeted.recorded())
    assert [program.regions[0].stats.replays > 60 for program in programs(budgeted.compiled)[-2:]] == [True, True]


def test_recordings_that_replace_each_other_are_not_captured_all_the_time():
    budgeted = Budgeted(1000)
    for _ in range(100):
        budgeted.call(30)
        budgeted.call(40)
    captures, replays = (
        [getattr(program.regions[0].stats, name) for program in programs(budgeted.compiled)]
        for name in ("captures", "replays")
    )
    assert sum(captures) <= 40, captures
    assert sum(replays) >= 100, replays  # of 200 calls: while one of them is eager, the other one replays
    assert any("have replaced each other too often" in reason for reason in budgeted.reasons())
    assert len(budgeted.recorded()) == 1


def test_calls_in_flight_are_not_disturbed():
    """Several forwards hold their memory. Others run eagerly with that reason, and later they are captured."""
    model = nn.Sequential(Linear(4, 8), nn.Tanh(), Linear(8, 4))
    transform = cudagraph_transform(backend="tape", memory_budget=4000)
    plain, graphed = twice(model, transform)
    x = torch.randn(3, 4)
    for _ in range(3):
        for jfn in (plain, graphed):
            losses = [jfn(x).square().mean() for _ in range(6)]
            assert transform._shared.arenas.nbytes() <= 4000
            for loss in losses:
                loss.backward()
    same_state(plain, graphed)
    reasons = {reason for program in programs(graphed) for reason in program.counts.fallbacks}
    assert any(reason.endswith("besides what other calls still use") for reason in reasons)
    before = [program.regions[0].stats.replays for program in programs(graphed)]
    for _ in range(20):
        for jfn in (plain, graphed):
            jfn(x).square().mean().backward()
    same_state(plain, graphed)
    now = [program.regions[0].stats.replays for program in programs(graphed)]
    assert all(b >= a + 15 for a, b in zip(before, now)), (before, now)


def test_a_share_of_the_device(monkeypatch):
    monkeypatch.setattr(TapeBackend, "device_nbytes", lambda backend, device: 4000)
    budgeted = Budgeted(0.25)
    budgeted._budget = 1000
    budgeted.call(50, 3)
    budgeted.call(100, 3)
    assert budgeted.recorded() == [50]
    assert explain(budgeted.compiled).memory.budget == 1000


def test_the_tape_knows_the_machines_memory():
    assert 2**28 < TapeBackend().device_nbytes(torch.device("cpu")) < 2**50
