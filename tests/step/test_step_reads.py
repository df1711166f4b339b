"""What a step depends on from far away: each change is seen before a replay, or the step is not captured."""

from __future__ import annotations

import array
import itertools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from thunder_cg import explain

SCALE = 1.0
pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")


def make_step(of, optimizer=SGD):
    """Makes steps whose loss ``of`` computes from what the model returns."""

    def make(model):
        made = optimizer(model.parameters(), lr=0.1)

        def step(x, y):
            made.zero_grad()
            loss = of(model(x)).square().mean()
            loss.backward()
            made.step()
            return loss

        step.optimizer = made
        return step

    return make


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 1.0

    def forward(self, y):
        return y * self.k * SCALE


class Head(nn.Module):
    """Has a module that is in no dictionary of modules."""

    def __init__(self):
        super().__init__()
        self.others = [Scaled()]

    def forward(self, y):
        return self.others[0](y)


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's and Lightning's are: what it does is installed code that reads the wrapped one."""

    def __init__(self, parameters, lr):
        self.optimizer = SGD(parameters, lr)

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    zero_grad = torch.no_grad()(lambda self: self.optimizer.zero_grad())
    step = torch.no_grad()(lambda self: self.optimizer.step())


def changing(step_twins, of, change, calls=9, **options):
    """Trains with a change after five calls, which has to be seen."""

    def between(i, model, fn, batch):
        if i == 4:
            change(model, fn)
        elif i == calls - 1:
            change(model, fn, back=True)

    return step_twins.train(make_step(of, **options), calls, between)


def set_scale(*_, back=False):
    global SCALE
    SCALE = 1.0 if back else 3.0


def test_a_global_of_a_modules_code(step_twins):
    head = nn.Sequential(Scaled())
    step = changing(step_twins, lambda y: head(y), set_scale)
    assert step.captures == 2, explain(step)


def test_a_module_in_a_list(step_twins):
    head = Head()

    def change(*_, back=False):
        head.others[0].k = 1.0 if back else 2.0

    assert changing(step_twins, lambda y: head(y), change).captures == 2


def test_an_optimizer_in_another_one(step_twins):
    def change(model, fn, back=False):
        fn.optimizer.optimizer.param_groups[0]["lr"] = 0.1 if back else 0.01

    assert changing(step_twins, lambda y: y, change, optimizer=Wrapper).captures == 2


@pytest.mark.parametrize("make", [itertools.count, lambda: iter([1.0] * 99), lambda: (1.0 for _ in range(99))])
def test_iterators(step_twins, make):
    """Nobody can tell how far one has been read."""
    value = make()
    step = step_twins.graphed(make_step(lambda y: y * (1 + float(next(value))))(step_twins.model()))
    for _ in range(4):
        step(*step_twins.batch())
    assert step.captures == 0 and "which no replay would advance; take the next item outside" in str(explain(step))
    assert step_twins.device == "cuda" or sum(1 for _ in zip(value, range(10))) == 10


VALUES = {
    "array of NumPy": np.ones(3),
    "scalar of NumPy": np.ones(1, np.float32)[0],
    "array": array.array("d", [1.0]),
    "queue": deque([1.0]),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_that_change_without_a_trace(step_twins, kind):
    holder = SimpleNamespace(of=VALUES[kind])

    def change(*_, back=False):
        if kind == "scalar of NumPy":
            holder.of = np.float32(1 if back else 2)
        else:
            holder.of[0] = 1.0 if back else 2.0

    def of(y):
        return y * float(holder.of if kind == "scalar of NumPy" else holder.of[0])

    assert changing(step_twins, of, change).captures == 2


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_of_random_numbers(step_twins, make):
    generator, twin = make(0), make(0)
    draw = "rand" if make is np.random.RandomState else "random"
    step = step_twins.graphed(make_step(lambda y: y * float(getattr(generator, draw)()))(step_twins.model()))
    for _ in range(12):
        step(*step_twins.batch())
        getattr(twin, draw)()
    assert step.captures == 0 and "generator holds changed" in str(explain(step))
    assert getattr(generator, draw)() == getattr(twin, draw)()  # no call has drawn twice, or not at all


def test_what_is_too_large_to_compare(step_twins):
    for value in ([1.0] * 10_001, np.ones(10_000)):
        step = step_twins.graphed(make_step(lambda y, value=value: y * float(value[0]))(step_twins.model()))
        for _ in range(3):
            step(*step_twins.batch())
        assert step.captures == 0 and "are compared before a replay" in str(explain(step))
