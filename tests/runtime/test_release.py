"""`release` gives all memory back at once, whoever holds results of earlier calls. The next calls are right."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import thunder
import torch
from models import Linear
from support import programs, same, same_state, training_step
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from thunder_cg import NotCompiledError, cudagraph_transform, graphed_step, release, thunderfx


@pytest.fixture
def pair(twins) -> tuple[Any, Any]:
    return twins(nn.Sequential(Linear(4, 8), nn.Tanh(), Linear(8, 4)))


def held_by(jfn: Any) -> list[weakref.ref[Any]]:
    """The arenas of a compiled function, and its graphs."""
    pairs = {program.pair for program in programs(jfn)}
    arenas = [arena for pair in pairs for arena in pair.arenas()]
    recordings = [recording for pair in pairs for recording in pair.recordings]
    traces = [trace for r in recordings for trace in (r.forward, *r.backwards)]
    return [weakref.ref(each) for each in {*arenas, *(graph.graph for trace in traces for graph in trace.graphs)}]


def alive(references: list[weakref.ref[Any]]) -> int:
    return sum(reference() is not None for reference in references)


def counts(jfn: Any) -> list[tuple[int, int]]:
    """Of each program: warm-ups, and captures of its region."""
    return [(program.counts.warm_ups, program.regions[0].stats.captures) for program in programs(jfn)]


def test_all_memory_is_back_and_the_next_calls_are_right(pair, device):
    plain, graphed = pair
    x = torch.randn(3, 4, device=device)
    for rounds in (1, 2):
        losses: list[list[torch.Tensor]] = [[], []]
        for jfn, mine in zip(pair, losses):
            for _ in range(4):
                mine.append(jfn(x).square().mean())
                mine[-1].backward()
        with torch.no_grad():
            results = [[jfn(x) for _ in range(4)] for jfn in pair]
        same(*[[loss.detach() for loss in mine] for mine in losses])
        same(*results)
        same_state(plain, graphed)
        held = held_by(graphed)
        assert alive(held) == 4  # an arena, and three graphs
        release(graphed)
        assert alive(held) == 0  # though all losses and results live
        assert not any(program.pair.arenas() for program in programs(graphed))
        assert counts(graphed) == [(rounds, rounds)] * 3
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        losses[1][-1].backward()


def test_calls_in_flight_keep_what_they_hold_until_they_end(pair, device):
    """Be the forward one that warms up, captures, or replays, on the fast path or not."""
    plain, graphed = pair
    x = torch.randn(3, 4, device=device)
    for calls_before in range(4):
        for _ in range(calls_before):
            graphed(x).square().sum().backward()
        plain.zero_grad()
        graphed.zero_grad()
        y = graphed(x)
        held = held_by(graphed)
        release(graphed)
        assert alive(held) >= 1
        for _ in range(2):  # other calls, in arenas of their own
            results = [jfn(x) for jfn in pair]
            same(*[result.detach() for result in results])
            for result in results:
                result.square().sum().backward()
        y.square().sum().backward()
        plain(x).square().sum().backward()
        same_state(plain, graphed)
        assert alive(held) == 0, calls_before
        release(graphed)


def test_functions_and_graphs_of_dynamo(backend, device):
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(x * 2) + 1)

    x = torch.randn(4, device=device)
    jitted = thunder.jit(fn, transforms=[cudagraph_transform(backend=backend)])
    compiled = thunderfx(fn, backend=backend)
    for function in (jitted, compiled):
        for _ in range(3):
            results = [function(x) for _ in range(3)]
            same(results, [fn(x)] * 3)
            held = held_by(function)
            assert alive(held) == 2
            release(function)
            assert alive(held) == 0
    torch._dynamo.reset()


def test_steps(backend, device, monkeypatch):
    # Earlier tests leave fake tensors of Dynamo's behind, and a step is not captured while there are any.
    objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: [each for each in objects() if type(each) is not FakeTensor])
    model = nn.Linear(4, 4).to(device)
    x = torch.randn(4, device=device)
    step = graphed_step(training_step(model), backend=backend)
    for captures in (1, 2):
        losses = [step(x) for _ in range(5)]
        assert step.captures == captures and losses == sorted(losses, reverse=True)
        held = [weakref.ref(step.recordings[0].graph), weakref.ref(step.arena)]
        release(step)
        assert alive(held) == 0 and not step.recordings


def test_what_is_not_compiled_is_refused():
    with pytest.raises(NotCompiledError, match=r"^release\(Linear\): Thunder did not compile this; pass what"):
        release(nn.Linear(2, 2))
