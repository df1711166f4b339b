"""Memory that a step uses without naming it: found, and told from numbers that only look like its address."""

from __future__ import annotations

import ctypes
import gc
import re
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from support import usual_step
from torch.nn.functional import cross_entropy

from thunder_cg import explain, graphed_step
from thunder_cg.runtime.backends import resolve
from thunder_cg.step import other_memory
from thunder_cg.step.other_memory import Addresses

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")


def make_step(of):
    """Makes steps that add ``of()`` to what the model returns."""
    return lambda model: usual_step(model, compiled=lambda x: model(x) + of())


@pytest.fixture
def looks_used(monkeypatch, backend):
    """Each capture finds a tensor's address among the arguments of its kernels."""
    kind = type(resolve(backend))
    addresses = kind.captured_addresses

    def pretend(tensor):
        number = tensor.data_ptr()
        monkeypatch.setattr(kind, "captured_addresses", lambda self: addresses(self) | {number: "some kernel"})

    return pretend


def test_a_tensor_that_nothing_names(step_twins, device):
    """What objects without attributes hold is not looked at, so nobody would notice another tensor."""
    hidden = ctypes.py_object(torch.ones((), device=device))
    step = step_twins.train(make_step(lambda: getattr(hidden, "val" + "ue")))
    said = str([*step.in_python])
    assert step.captures == 0 and "the step seems to use a tensor () of float32 in " in said
    assert "it is not known where from; pass it as an argument" in said


@pytest.mark.parametrize("around", [{"enabled": False}, {"dtype": torch.bfloat16}], ids=["off", "on"])
def test_autocast_around_the_step_is_said(device, backend, around):
    """It keeps weights as they were cast before the optimizer changed them, also where it is off itself."""
    linear, x = torch.nn.Linear(2, 2).to(device), torch.ones(2, 2, device=device)

    def fn(x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return linear(x).sum()

    step = graphed_step(fn, modules=[linear], backend=backend)
    with torch.autocast(x.device.type, **around):
        for _ in range(4):
            step(x)
    assert not step.captures and re.search("autocast .*; enter it in the step alone", str([*step.in_python]))
    inside = graphed_step(fn, modules=[linear], backend=backend)
    for _ in range(4):
        inside(x)
    assert inside.replays


def test_a_tensor_that_the_step_lets_go_of(step_twins, device, capsys):
    """Such as a batch that it takes from somewhere: afterwards nobody has the memory that a graph would read."""
    hidden = ctypes.py_object(deque(torch.ones((), device=device) for _ in range(20)))

    def fn(x):
        print("runs")
        return x * getattr(hidden, "val" + "ue").popleft()

    step = step_twins.graphed(fn)
    for _ in range(4):
        step(step_twins.batch()[0])
    assert step.captures == 0 and "lets go of it; pass it as an argument" in str([*step.in_python])
    ran = capsys.readouterr().out.count("runs")
    assert ran <= 4 + 2 * 2, "two attempts for each of two captures: nothing can be moved before another one"


class Log:
    last = None


def test_who_holds_a_tensor_that_escapes_is_named(step_twins, device):
    hidden = ctypes.py_object(Log())

    def fn(x):
        getattr(hidden, "val" + "ue").last = x * 2
        return x * 3

    step = step_twins.graphed(fn)
    for _ in range(4):
        step(step_twins.batch()[0])
    said = "still held by the attribute last of a Log after it, and a replay would"
    assert step.captures == 0 and said in str([*step.in_python])


def test_a_number_that_looks_like_an_address(step_twins, device, looks_used):
    kept = torch.arange(6.0, device=device).requires_grad_() * 1
    row, address = kept.detach()[2:], kept.data_ptr()
    looks_used(kept)
    step = step_twins.train(make_step(lambda: 1.0))
    assert step.captures == 1 and step.replays > 2, explain(step)
    assert kept.data_ptr() == address and row.data_ptr() == address + 8
    assert kept.tolist() == [0, 1, 2, 3, 4, 5] and row.tolist() == [2, 3, 4, 5] and kept.grad_fn is not None


def test_numbers_that_look_like_other_addresses_each_time(step_twins, device, backend, monkeypatch):
    """What nobody has set varies, so the next capture has another tensor's address."""
    kept = [torch.arange(3.0, device=device) for _ in range(3)]
    numbers, kind = [each.data_ptr() for each in kept], type(resolve(backend))
    addresses, left = kind.captured_addresses, [*numbers]
    monkeypatch.setattr(
        kind, "captured_addresses", lambda self: addresses(self) | ({left.pop(): "some kernel"} if left else {})
    )
    step = step_twins.train(make_step(lambda: 1.0))
    assert step.captures == 1 and step.replays > 2 and not left, explain(step)
    assert [each.data_ptr() for each in kept] == numbers and all(each.tolist() == [0, 1, 2] for each in kept)


def test_tensors_without_an_address(step_twins, device):
    """The derivative of ``sgn`` is zeros without memory, a sparse tensor consists of several."""
    x = torch.ones(2, device=device, requires_grad=True)
    tensors = [*torch.autograd.grad(x.sgn().sum(), x), torch.ones(2, device=device).to_sparse()]
    step = step_twins.train(make_step(lambda: 1.0))
    assert step.captures == 1 and step.replays > 2, explain(step)
    assert [Addresses({1: "some kernel"}).user_of(tensor) for tensor in tensors] == [None, None]


def test_memory_that_cannot_be_moved(step_twins, device, looks_used):
    """Autograd holds the result of exp() from C++, where no move would reach it."""
    result = torch.ones(3, device=device, requires_grad=True).exp()
    total, kept = result.sum(), result.detach()
    del result
    looks_used(kept)
    step = step_twins.train(make_step(lambda: 1.0))
    assert step.captures == 0 and "a tensor (3,) of float32 in some kernel" in str([*step.in_python])
    assert total.requires_grad


@pytest.mark.nightly
def test_what_views_hold_is_said(step_twins, device):
    """As where all gradients are written as parts of one vector."""

    def run(of):
        weight = torch.nn.Parameter(torch.ones(2, device=device))

        def fn(x, y):
            weight.grad = of((x.sum() * torch.ones(4, device=device))[:2])
            return weight.grad * 2

        step = step_twins.graphed(fn)
        found = [step(*step_twins.batch()) for _ in range(6)]
        assert all(torch.equal(each, each.flip(0)) for each in found)
        return step

    said = "is still held by a view, such as a gradient, after it, and a replay would overwrite it; have the step"
    assert said in str([*run(lambda view: view).in_python])
    assert run(torch.clone).captures == 1


@pytest.mark.parametrize("leaves_a_cycle", [False, True])
def test_garbage_is_collected_again_only_before_a_tensor_is_refused(step_twins, monkeypatch, leaves_a_cycle):
    """It takes long. On CUDA, a tensor in a cycle is in the graph's memory, and would be refused."""
    collections: list[int] = []
    monkeypatch.setattr(other_memory, "gc", SimpleNamespace(collect=lambda: collections.append(gc.collect())))

    def leave(loss):
        if leaves_a_cycle:
            cycle = [loss * 2]
            cycle.append(cycle)
        return loss

    step = step_twins.train(lambda model: usual_step(model, loss_of=lambda x, y: leave(cross_entropy(x, y))))
    assert step.captures == 1 and len(collections) <= leaves_a_cycle, step.in_python
