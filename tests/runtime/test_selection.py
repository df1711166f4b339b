"""``select="measured"``: regions whose graphs do not pay are left eager, and each call still does everything once."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from models import Dropout, Linear
from support import fast_path_calls, programs, replays, same, same_state, training_step, twice
from thunder.distributed import ddp
from torch import nn

from thunder_cg import OptionError, cudagraph_transform, explain, graphed_step, profile, thunderfx
from thunder_cg.runtime import backend as protocols, skip_reasons, tape
from thunder_cg.runtime.call import Mode
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.selection import _CALLS, _MOST_REPLAYS, Selection

SETTLED = 1 + _CALLS + 1 + 1 + _CALLS  # the call that knows, if all regions pay: ops, warm-up, capture, replays
AGAIN = 1 + _CALLS + 1  # calls after a decision, whose call warms up, until the next one: capture, replays

Microseconds = float | Iterable[float]


class Clock:
    """The host's clock, which only moves while a region runs, by what a test says that this takes."""

    def __init__(self) -> None:
        self.now = 0
        self.graph: dict[str, Any] = {}
        self.eager: dict[str, Any] = {}

    def takes(self, region: str, *, graph: Microseconds, eager: Microseconds) -> None:
        """Microseconds of each run; of several, one run after the other, from the first one again at the end."""
        for times, given in ((self.graph, graph), (self.eager, eager)):
            times[region] = itertools.cycle([given] if isinstance(given, (int, float)) else given)

    def passes(self, times: dict[str, Any], region: str) -> None:
        self.now += int(next(times[region]) * 1000) if region in times else 10_000 + 40_000 * (times is self.eager)

    def perf_counter_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Regions take 10 µs as a graph and 50 µs eagerly, unless a test says otherwise."""
    made = Clock()
    monkeypatch.setattr(protocols, "time", made)
    run, replay = RuntimeRegion._run_eagerly, RegionGraph.replay

    def run_eagerly(self: RuntimeRegion, call: Any, args: Any) -> Any:
        results = run(self, call, args)
        made.passes(made.eager, self.name)
        return results

    def replay_graph(self: RegionGraph, args: Any) -> Any:
        results = replay(self, args)
        made.passes(made.graph, self.label.partition(" of ")[0])
        return results

    monkeypatch.setattr(RuntimeRegion, "_run_eagerly", run_eagerly)
    monkeypatch.setattr(RegionGraph, "replay", replay_graph)
    return made


def measured(**options: Any) -> Any:
    return cudagraph_transform(**{"backend": "tape", "debug": True, "select": "measured", **options})


def pieces(x: torch.Tensor) -> torch.Tensor:
    """Three regions: CUDAGraph1, which draws, CUDAGraph2 and CUDAGraph3."""
    y = torch.tanh(torch.nn.functional.dropout(x, 0.5)) * 2
    z = torch.relu(y * y.sum().item()) + 1
    return torch.exp(z.sin() * z.sum().item() + y.cos())


class Net(nn.Module):
    """Two regions forward and two backward, which write and draw. The first one saves for the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = Linear(4, 4), Linear(4, 4), Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        y = self.drop(torch.tanh(self.first(x)))
        y = y * y.sum().item()
        return torch.tanh(self.second(self.drop(y)))


def left_eager(jfn: Any) -> dict[str, str]:
    """The regions that select="measured" leaves eager, and why."""
    regions = [region for program in programs(jfn) for region in program.regions]
    return {region.name: str(region.failure) for region in regions if region.is_deselected}


def test_a_region_that_does_not_pay_is_eager_and_the_others_are_captured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[Any] = []
    monkeypatch.setattr(tape.TapeBackend, "give_back", lambda self: given_back.append(self))
    clock.takes("CUDAGraph2", graph=30, eager=12)
    plain, graphed = twice(pieces, measured(strict=True))

    def call() -> None:
        x = torch.randn(5)
        results = []
        for jfn in (plain, graphed):
            torch.manual_seed(3)
            results.append((jfn(x), torch.rand(3)))
        same(*results)

    for _ in range(SETTLED - 1):
        call()
    (program,) = programs(graphed)
    (recording,) = program.pair.recordings
    assert program.counts.fallbacks == {skip_reasons.TIMED.problem: _CALLS} and program.counts.warm_ups == 1
    assert [region.stats.replays for region in program.regions] == [1 + _CALLS] * 3 and not left_eager(graphed)
    assert not program.awaiting_capture and "leaves eager" not in str(explain(graphed))
    gone = [weakref.ref(each) for each in (recording.arena, *(graph.graph for graph in recording.forward.graphs))]
    del recording
    call()  # which decides, and warms up anew
    assert not any(reference() for reference in gone) and len(given_back) == 1
    assert program.counts.warm_ups == 2 and program.awaiting_capture == 1
    for _ in range(AGAIN + 3):
        call()
    assert program.pair.selection is None and program.counts.warm_ups == 2
    assert [region.stats.captures for region in program.regions] == [2, 1, 2]
    assert [region.stats.replays for region in program.regions] == [(n := 1 + _CALLS + AGAIN + 3), 1 + _CALLS, n]
    assert program.counts.fallbacks == {skip_reasons.TIMED.problem: _CALLS}
    said = "30.0 µs as a graph, 12.0 µs eagerly; remove what splits its trace, since larger regions pay more"
    assert left_eager(graphed) == {"CUDAGraph2": f'{said}, or capture it with select="all"'}
    report = explain(graphed)
    assert [region.deselected for region in report.traces[0].regions] == [False, True, False]
    for form in (str(report), report._repr_html_()):
        assert "leaves eager what does not pay: CUDAGraph2 (30.0 µs as a graph, 12.0 µs eagerly). To change" in form
        assert f"found that it does not pay: {said}" in " ".join(form.split())
    assert [region.microseconds is None for region in profile(graphed, torch.ones(5)).traces[0].regions] == [0, 1, 0]


class Region:
    """A region that falls back to its ops in the middle of a replay, if ``falls_back``."""

    device, stays_eager = torch.device("cpu"), False

    def __init__(self, falls_back: bool = False) -> None:
        self._falls_back = falls_back

    def run_untimed(self, call: Any, args: Any) -> Any:
        if self._falls_back:
            call.mode = Mode.EAGER
        return args


@pytest.mark.parametrize("mode", [Mode.REPLAY, Mode.EAGER])
def test_what_is_not_timed(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """Replays that fall back, verified ones, all inside of a capture, and runs beside one that is timed."""
    selection = Selection(tape.TapeBackend())

    def count(region: Any, verifies: bool = False) -> int:
        call: Any = SimpleNamespace(mode=mode, verifies=verifies)
        assert selection.run(region, call, (1,)) == (1,)
        times = selection._graph if mode is Mode.REPLAY else selection._eager
        return times[region].count if region in times else 0

    region = Region()
    assert [count(region), count(region), count(region, verifies=True), count(region)] == [1, 2, 2, 3]
    assert count(Region(falls_back=True)) == int(mode is Mode.EAGER)
    with selection._lock:
        assert count(region) == 3 and not selection.is_complete()
    monkeypatch.setattr(tape.TapeBackend, "busy", lambda self: True)
    assert count(region) == 3


def test_noise_does_not_decide(clock: Clock) -> None:
    """Outliers, a first run that compiles, and differences of less than a tenth."""
    clock.takes("CUDAGraph1", graph=[10, 10, 10, 900, 10, 10], eager=[12, 12, 12, 12, 1])
    clock.takes("CUDAGraph2", graph=10.9, eager=itertools.chain([1_000_000, 500], itertools.repeat(10)))
    clock.takes("CUDAGraph3", graph=11.1, eager=itertools.chain([1_000_000, 500], itertools.repeat(10)))
    graphed = thunder.jit(pieces, transforms=[measured()])
    for _ in range(SETTLED):
        graphed(torch.ones(5))
    assert [*left_eager(graphed)] == ["CUDAGraph3"]


def test_the_advice_for_a_region_that_is_its_whole_trace(clock: Clock) -> None:
    clock.takes("CUDAGraph1", graph=30, eager=12)
    graphed = thunder.jit(lambda x: torch.tanh(x).sin() * 2, transforms=[measured()])
    for _ in range(2 * _CALLS + 3):
        graphed(torch.ones(3))
    said = "30.0 µs as a graph, 12.0 µs eagerly"
    assert left_eager(graphed) == {"CUDAGraph1": f'{said}; capture it with select="all"'}


def test_what_is_left_is_timed_anew_until_all_of_it_pays(clock: Clock) -> None:
    """A region that gets copies from an eager one, where a graph handed it fixed addresses, may pay no more."""
    clock.takes("CUDAGraph1", graph=90, eager=60)
    clock.takes("CUDAGraph2", graph=itertools.chain([40] * (1 + _CALLS), itertools.repeat(70)), eager=60)
    graphed = thunder.jit(pieces, transforms=[measured()])
    for calls, names in ((SETTLED - 1, []), (1, ["CUDAGraph1"]), (AGAIN - 1, ["CUDAGraph1"])):
        for _ in range(calls):
            graphed(torch.ones(5))
        assert [*left_eager(graphed)] == names
    clock.takes("CUDAGraph3", graph=60, eager=1)  # the times of the ops are known, and no graph was so slow before
    for _ in range(1 + AGAIN + AGAIN):
        graphed(torch.ones(5))
    (program,) = programs(graphed)
    assert [*left_eager(graphed)] == ["CUDAGraph1", "CUDAGraph2", "CUDAGraph3"]
    assert program.counts.fallbacks[skip_reasons.DESELECTED.problem] == AGAIN and program.pair.arenas()[0].nbytes() == 0
    report = explain(graphed)
    assert "no region pays" in str(report) and not report.memory.recordings
    (trace,) = report.traces
    assert trace.replays == 3 * _CALLS and trace.eager_calls == trace.calls - 3 * (1 + _CALLS)
    assert program.pair.selection is None


@pytest.mark.parametrize("names", ["1", "2", "3", "4", "14", "123", "1234"])
@pytest.mark.nightly_after(2)
def test_training_stays_the_same_whatever_is_left_eager(clock: Clock, names: str) -> None:
    """Forwards that are in flight at the decision included: the tape poisons what no call may read."""
    for name in names:
        clock.takes(f"CUDAGraph{name}", graph=90, eager=60)
    plain, graphed = twice(Net(), measured(strict=True))
    batches = [torch.randn(3, 4) for _ in range(4)]
    losses = []
    for model in (plain, graphed):
        torch.manual_seed(7)
        losses.append([])
        for step in range(SETTLED + AGAIN + 4):
            if SETTLED - 3 < step < SETTLED + 2:  # two forwards, and then both backwards
                both = [model(batches[step % 4]).square().sum() for _ in range(2)]
                losses[-1] += [each.detach() for each in both]
                sum(both).backward()
            else:
                losses[-1].append(loss := model(batches[step % 4]).square().sum())
                loss.backward()
            losses[-1][-1] = losses[-1][-1].detach()
    same(*losses)
    same_state(plain, graphed)
    assert [*left_eager(graphed)] == [f"CUDAGraph{name}" for name in names]
    forward, backward = programs(graphed)
    assert forward.pair.selection is None and [len(program.regions) for program in (forward, backward)] == [2, 2]
    for number, program in zip("1234", (forward, forward, backward, backward)):
        assert (program.newest_graph(f"CUDAGraph{number}") is None) == (number in names)


class OnDevice:
    """A device's timer: each run takes so many microseconds there."""

    def __init__(self, took: float) -> None:
        self._took, self._runs = took, 0

    def start(self) -> None:
        pass

    def mark(self) -> None:
        self._runs += 1

    def runs(self) -> list[list[float]]:
        runs, self._runs = self._runs, 0
        return [[self._took]] * runs


@pytest.mark.parametrize(
    ("kind", "eagerly", "as_graph", "left"),
    [
        ("function", 100, 90, "200.0 µs as a graph, 100.0 µs eagerly"),  # its host takes 200 µs and 30 µs
        ("function", 300, 250, None),  # the device is busy for longer
        ("module", 100, 210, None),  # the host's 200 µs do not count: the fast path goes around
        ("module", 100, 330, "130.0 µs as a graph, 100.0 µs eagerly"),
    ],
)
def test_the_host_counts_where_no_fast_path_spares_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: str, eagerly: float, as_graph: float, left: str | None
) -> None:
    timers = iter([OnDevice(eagerly), OnDevice(as_graph)])  # the ops are timed first
    monkeypatch.setattr(tape.TapeBackend, "timer", lambda self, device: next(timers))
    clock.takes("CUDAGraph1", graph=200, eager=30)
    model = nn.Sequential(Linear(4, 4), nn.Tanh()).requires_grad_(False)
    graphed = thunder.jit(model if kind == "module" else pieces_of_one, transforms=[measured()])
    x = torch.ones(2, 4)
    for _ in range(SETTLED + 1):
        graphed(x)
    found = left_eager(graphed)
    assert ([text.partition(";")[0] for text in found.values()] or [None]) == [left]
    assert fast_path_calls(graphed) == int(kind == "module" and left is None)


def pieces_of_one(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


def test_a_backward_that_never_comes_is_not_waited_for(clock: Clock) -> None:
    clock.takes("CUDAGraph2", graph=90, eager=60)
    graphed = thunder.jit(nn.Sequential(Linear(4, 4), nn.Tanh()), transforms=[measured()])
    x = torch.ones(2, 4)
    graphed(x).sum().backward()
    for _ in range(SETTLED - _CALLS + _MOST_REPLAYS):
        graphed(x)
    assert programs(graphed)[0].pair.selection is None and not left_eager(graphed)
    assert fast_path_calls(graphed) == 1, "the forward that followed the call that knew"


def test_inside_of_a_graphed_step_nothing_is_timed() -> None:
    model = thunder.jit(nn.Sequential(Linear(4, 4), nn.Tanh()), transforms=[measured()])
    graphed = graphed_step(training_step(model), backend="tape")
    for _ in range(2 * SETTLED):
        graphed(torch.ones(2, 4))
    forward, _ = programs(model)
    assert graphed.captures == 1 and skip_reasons.TIMED.problem not in forward.counts.fallbacks and not replays(model)


def test_thunderfx_takes_it_too(clock: Clock) -> None:
    compiled = thunderfx(pieces_of_one, backend="tape", select="measured")
    for _ in range(SETTLED + 1):
        same(compiled(torch.ones(3)), pieces_of_one(torch.ones(3)))
    (program,) = programs(compiled)
    assert program.counts.fallbacks == {skip_reasons.TIMED.problem: _CALLS} and program.pair.selection is None
    torch._dynamo.reset()


def test_the_real_clock(transform: Any, device: str) -> None:
    """Whatever it says: it decides, and results are the same before and after."""
    plain, graphed = twice(pieces, transform(select="measured"))
    for _ in range(SETTLED + 3 * AGAIN):
        x = torch.randn(5, device=device)
        results = []
        for jfn in (plain, graphed):
            torch.manual_seed(3)
            results.append(jfn(x))
        same(*results)
    (program,) = programs(graphed)
    assert program.pair.selection is None
    for name, said in left_eager(graphed).items():
        as_graph, eagerly = (float(each) for each in re.findall(r"([\d.]+) µs", said))
        assert as_graph > eagerly > 0 and program.newest_graph(name) is None


def test_a_backward_without_regions_is_no_reason() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.cos(torch.sin(y)).exp()

    graphed = thunder.jit(scaled, transforms=[cudagraph_transform(backend="tape")])
    for _ in range(3):
        graphed(torch.ones(3, requires_grad=True), torch.ones(3)).sum().backward()
    forward, backward = programs(graphed)
    assert (len(forward.regions), len(backward.regions)) == (1, 0) and not backward.counts.fallbacks


def test_another_value_is_refused() -> None:
    with pytest.raises(OptionError, match=r"select='best'.*one of 'all', 'measured'; pass \"measured\""):
        cudagraph_transform(backend="tape", select="best")  # type: ignore[arg-type]


@pytest.fixture
def lone_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("lone_rank")
def test_ranks_time_nothing_as_they_have_to_capture_alike(clock: Clock) -> None:
    clock.takes("CUDAGraph1", graph=90, eager=60)
    clock.takes("CUDAGraph2", graph=90, eager=60)
    model = ddp(thunder.jit(nn.Sequential(Linear(4, 4), nn.Tanh()), transforms=[measured()]))
    for _ in range(SETTLED + AGAIN):
        model(torch.ones(2, 4)).sum().backward()
    forward, backward = programs(model)
    assert backward.collectives is not None and not left_eager(model)
    assert replays(model) == 2 * (SETTLED + AGAIN - 1) and not forward.counts.fallbacks
    assert 'select="measured" times nothing, because it communicates, and ranks have to capture alike' in str(
        explain(model)
    )
