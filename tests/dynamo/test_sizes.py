"""Sizes that change from call to call: Thunder compiles for few of them, until they come again."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support import replays, same
from torch import nn

from thunder_cg import explain, graphed_step, thunderfx
from thunder_cg.report.programs import jitted_parts
from thunder_cg.report.report import Report
from thunder_cg.runtime.changes import FEWER_SIZES, NEW_TOO_OFTEN


def _model(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)


def _versions(graphed):
    return sum(len(part._lc_cs.interpreter_cache) for part in jitted_parts(graphed))


def test_sizes_that_are_always_new(backend, device, caplog, tmp_path):
    model = _model(device)
    plain, graphed = copy.deepcopy(model), thunderfx(model, backend=backend)
    with caplog.at_level(logging.WARNING):
        for rows in range(2, 15):
            x = torch.randn(rows, 4, device=device)
            losses = [compiled(x).square().mean() for compiled in (graphed, plain)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
    torch.testing.assert_close(*([each.grad for each in net.parameters()] for net in (model, plain)))
    assert _versions(graphed) == 8  # one for two rows alone, and seven of the graph that takes any number
    warnings = [each.message for each in caplog.records if NEW_TOO_OFTEN in each.message]
    assert len(warnings) == 1 and FEWER_SIZES in warnings[0]
    report = explain(graphed)
    ((name, calls),) = [(each.function, each.calls) for each in report.new_sizes]
    assert (name, calls, report.python_calls) == ("Sequential, graph 1", 5, 0)
    said = f"5 calls of Sequential, graph 1 ran in PyTorch, without Thunder and graphs: {NEW_TOO_OFTEN}."
    assert said in str(report) and FEWER_SIZES in str(report)
    report.save(tmp_path / "report.json")
    assert said in str(Report.load(tmp_path / "report.json"))


def test_sizes_that_come_again(backend, device):
    """They replay, and make room for others."""
    model = _model(device)
    graphed = thunderfx(model, backend=backend)
    with torch.no_grad():
        for rows in (*range(2, 14),) * 5:
            x = torch.randn(rows, 4, device=device)
            same(graphed(x), model(x))
    assert _versions(graphed) == 12
    (left,) = explain(graphed).new_sizes
    assert left.calls == 8 and replays(graphed) >= 20


def test_sizes_that_follow_others(backend, device):
    """Those of a training after a validation: they were new too late, and have a graph nevertheless."""
    model = _model(device)
    graphed = thunderfx(model, backend=backend)
    with torch.no_grad():
        for rows in (*range(2, 12), *[20, 21] * 8):
            x = torch.randn(rows, 4, device=device)
            same(graphed(x), model(x))
    assert _versions(graphed) == 10 and replays(graphed) >= 4
    (left,) = explain(graphed).new_sizes
    assert left.calls == 12


def test_all_are_compiled_with_strict(backend, device):
    graphed = thunderfx(_model(device), backend=backend, strict=True)
    for rows in range(2, 6):
        graphed(torch.randn(rows, 4, device=device))
    assert _versions(graphed) == 4 and not explain(graphed).new_sizes


def test_a_number_that_is_for_the_caller_alone(backend, device):
    """Thunder gets no such number, so it compiles once."""

    def f(x, count):
        return torch.tanh(x).sin() * 2, count + 1

    graphed = thunderfx(f, backend=backend)
    x = torch.randn(3, 4, device=device)
    for count in range(2, 14):
        result, following = graphed(x, count)
        assert following == count + 1
        torch.testing.assert_close(result, torch.tanh(x).sin() * 2)
    assert not explain(graphed).new_sizes and replays(graphed) >= 6


def test_in_a_step(backend, device):
    """What runs in PyTorch is captured with the step."""
    model = _model(device)
    plain, graphed = copy.deepcopy(model), thunderfx(model, backend=backend)
    for rows in range(2, 12):
        graphed(torch.randn(rows, 4, device=device))
    (left,) = explain(graphed).new_sizes
    assert left.calls == 2

    def step_of(compiled, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, optimizer

    (ours, optimizer), (eager, _) = step_of(graphed, model), step_of(plain, plain)
    step = graphed_step(ours, modules=[model], optimizers=[optimizer], backend=backend)
    for _ in range(6):
        x = torch.randn(12, 4, device=device)
        torch.testing.assert_close(step(x), eager(x))
    same([*model.parameters()], [*plain.parameters()])
    assert explain(step).replays > 0


def test_a_number_that_positions_begin_at(backend, device):
    """As that of a cache with a sliding window, which counts its tokens: its graph takes a tensor."""

    def fn(x, first):
        positions = first + torch.arange(4, device=x.device)
        seen = positions[:, None] <= positions * 2 - first
        return x * positions.cos() @ seen.to(x.dtype), positions, first + 4

    graphed = thunderfx(fn, backend=backend)
    for first in (5, 6, 7, 8, 2**40, 1, 0, -3):
        x = torch.randn(4, 4, device=device, requires_grad=True)
        (y, *others), (expected, *expected_others) = graphed(x, first), fn(x, first)
        same([y.detach(), others], [expected.detach(), expected_others])
        same(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))
    report = explain(graphed)
    assert not report.outside and [trace.calls for trace in report.traces] == [1, 1, 7, 7]
    assert [trace.regions[0].replays for trace in report.traces] == [0, 0, 6, 6], report


def test_a_number_that_is_a_size_too(backend, device):
    def fn(x, first):
        return x[:first] * (torch.arange(4, device=x.device) + first)

    graphed = thunderfx(fn, backend=backend)
    for first in (5, 3, 4, 3, 4):
        x = torch.randn(6, 4, device=device)
        same(graphed(x, first), fn(x, first))


@pytest.mark.parametrize("combine", [torch.add, torch.mul, torch.lt, lambda p, n: n - p])
def test_a_number_that_no_tensor_of_integers_holds(backend, device, combine):
    """PyTorch wraps it: its bits are those of a negative number."""

    def fn(positions, number):
        return combine(positions, number) * 2

    graphed = thunderfx(fn, backend=backend)
    positions = torch.arange(4, device=device)
    for number in (5, 6, 7, 2**63 - 1, 2**63, 2**64 - 1, 8, -(2**63)):
        same(graphed(positions, number), fn(positions, number))
    assert not explain(graphed).outside
