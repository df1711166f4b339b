"""A capture that fails has changed nothing: the step runs once more, in Python, and as if it ran for the first time."""

from __future__ import annotations

import ctypes
import os
import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import same, sgd
from torch.nn.functional import cross_entropy

from thunder_cg.errors import ReplayRefused
from thunder_cg.step.recording import StepRecording
from thunder_cg.step.snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
DEPTH = 1.0


class Plain:
    def __init__(self):
        self.depth = 1.0


class Slots:
    __slots__ = ("__dict__", "depth")

    def __init__(self):
        self.depth = 1.0


class OfClass:
    depth = 1.0


class Outer:
    def __init__(self):
        self.inner = Plain()


def in_attribute(owner):
    """How to get a number that is 1 between the steps, and to multiply it."""
    return lambda: owner.depth, lambda k: setattr(owner, "depth", owner.depth * k)


def in_attribute_of_attribute(model):
    outer = Outer()

    def multiply(k):
        outer.inner.depth *= k

    return lambda: outer.inner.depth, multiply


def in_variable(model):
    depth = 1.0

    def multiply(k):
        nonlocal depth
        depth *= k

    return lambda: depth, multiply


def in_global(model):
    def multiply(k):
        global DEPTH
        DEPTH *= k

    return lambda: DEPTH, multiply


def in_class(model):
    def multiply(k):
        OfClass.depth *= k

    return lambda: OfClass.depth, multiply


def in_function(model):
    def multiply(k):
        multiply.depth *= k

    multiply.depth = 1.0
    return lambda: multiply.depth, multiply


def in_list(model):
    numbers = [1.0]
    return lambda: sum(numbers), lambda k: numbers.append(1.0) if k > 1 else numbers.pop()


def in_dictionary(model):
    numbers = {}
    return lambda: 1.0 + len(numbers), lambda k: numbers.update(depth=k) if k > 1 else numbers.clear()


def by_methods_in_a_dictionary(model):
    """No bytecode names the object."""
    owner = Multiplied()
    methods = {"get": owner.get, "multiply": owner.multiply}
    return lambda: methods["get"](), lambda k: methods["multiply"](k)


class Multiplied(Plain):
    def get(self):
        return self.depth

    def multiply(self, k):
        self.depth *= k


def in_array(make):
    def holder(model):
        numbers = make([1.0])
        return lambda: float(numbers[0]), lambda k: numbers.__setitem__(0, numbers[0] * k)

    return holder


def in_tensors_attribute(model):
    tensor = torch.ones(())
    tensor.depth = 1.0
    return in_attribute(tensor)


def in_environment(model):
    os.environ["DEPTH_OF_STEP"] = "1"
    return lambda: float(os.environ["DEPTH_OF_STEP"]), lambda k: os.environ.update(DEPTH_OF_STEP=str(int(k + 0.5)))


def in_grad_mode(model):
    return lambda: 1.0 if torch.is_grad_enabled() else 2.0, lambda k: torch.set_grad_enabled(k < 1)


def in_dtype(model):
    dtypes = {True: torch.float64, False: torch.float32}
    return lambda: 1.0 + (torch.get_default_dtype() == dtypes[True]), lambda k: torch.set_default_dtype(dtypes[k > 1])


def in_requires_grad(model):
    weight = next(model.parameters())
    return lambda: 1.0 if weight.requires_grad else 2.0, lambda k: weight.requires_grad_(k < 1)


def in_memory(model):
    weight = next(model.parameters())
    at, other = weight.data_ptr(), torch.zeros_like(weight)

    def swap(k):
        weight.data, other.data = other.data, weight.data

    return lambda: 1.0 + (weight.data_ptr() != at), swap


def in_random(generator):
    def holder(model):
        states = []

        def draw(k):
            if k > 1:
                states.append(generator.getstate())
                generator.random()
            else:
                generator.setstate(states.pop())

        generator.seed(3)
        return lambda: 1.0 + hash(generator.getstate()) % 8, draw

    return holder


def in_container_of_container(model):
    history = {"epochs": [[1.0]]}
    return lambda: len(
        history["epochs"][0]
    ), lambda k: history["epochs"][0].extend([k]) if k > 1 else history["epochs"][0].pop()


def in_default(model):
    def multiply(k, numbers=[1.0]):  # noqa: B006
        numbers[0] *= k
        return numbers[0]

    return lambda: multiply(1.0), multiply


def in_a_module_beside(model):
    """Which the step does not know of, unless a function is known that names it."""
    beside = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def multiply(k):
        beside[0].depth = getattr(beside[0], "depth", 1.0) * k

    return lambda: getattr(beside[0], "depth", 1.0), multiply


KINDS = {
    "an attribute": lambda model: in_attribute(Plain()),
    "a slot": lambda model: in_attribute(Slots()),
    "a namespace": lambda model: in_attribute(SimpleNamespace(depth=1.0)),
    "an attribute of an attribute": in_attribute_of_attribute,
    "a variable": in_variable,
    "a global": in_global,
    "a class": in_class,
    "a function": in_function,
    "a list": in_list,
    "a dictionary": in_dictionary,
    "a list in a list in a dictionary": in_container_of_container,
    "a default": in_default,
    "a module beside": in_a_module_beside,
    "methods in a dictionary": by_methods_in_a_dictionary,
    "an array": in_array(lambda numbers: array("d", numbers)),
    "an array of NumPy": in_array(np.array),
    "an attribute of a tensor": in_tensors_attribute,
    "the environment": in_environment,
    "the grad mode": in_grad_mode,
    "the default dtype": in_dtype,
    "requires_grad": in_requires_grad,
    "memory": in_memory,
    "random numbers": in_random(random),
    "a generator": in_random(random.Random(3)),
}


def losses_of(step_twins, kind, graphed, in_dictionary_only):
    """Of a step that reads a value on the host while the number is 2.

    Args:
        in_dictionary_only: has no bytecode name the functions.
    """
    model = step_twins.model()
    depth, multiply = KINDS[kind](model)
    if in_dictionary_only:
        functions = {"depth": depth, "multiply": multiply}
        depth, multiply = lambda: functions["depth"](), lambda k: functions["multiply"](k)
    optimizer = sgd(model.parameters())

    def fn(x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y) * depth()
        loss.backward()
        optimizer.step()
        multiply(2.0)
        assert loss.item() > 0
        multiply(0.5)
        return loss

    torch.manual_seed(1)
    step = step_twins.graphed(fn) if graphed else fn
    return [step(*step_twins.batch()).detach() for _ in range(5)], step


@pytest.mark.parametrize("in_dictionary_only", [False, True], ids=["named", "in a dictionary"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nightly_after(12)
def test_what_a_capture_has_changed_is_undone(step_twins, kind, in_dictionary_only):
    expected, _ = losses_of(step_twins, kind, False, in_dictionary_only)
    losses, step = losses_of(step_twins, kind, True, in_dictionary_only)
    same(losses, expected)
    assert step.captures == 0 and max(step.in_python.values()) == 3, step.in_python


def test_a_variable_that_a_function_counts_in_and_that_no_bytecode_names(step_twins):
    """Who looks for the function after the call finds another number in it."""
    count = 0

    def counts():
        nonlocal count
        count += 1

    functions = {"count": counts}

    def fn(x, y):
        functions["count"]()
        return x * 2

    step = step_twins.graphed(fn)
    for _ in range(6):
        step(*step_twins.batch())
    assert count == 6 and step.replays == 3, step.in_python


def append_to(owner, loss):
    owner.losses.append(loss)


def test_what_a_function_of_a_dictionary_closes_over_is_undone(step_twins):
    def run(graphed):
        mean = torch.zeros((), device=step_twins.device)

        def add(y):
            nonlocal mean
            mean = 0.5 * mean + y.mean()
            return y * mean

        functions = {"f": add}
        step = graphed(lambda y: functions["f"](y))
        return [step(step_twins.batch()[0]) for _ in range(8)], step

    step = step_twins.both(run)
    assert step.replays >= 3, step.in_python


def test_what_a_capture_has_appended_to_a_list_of_an_object_is_undone(step_twins):
    """The step passes the object on, so that no bytecode names the list."""
    owner = Plain()
    owner.losses = []

    def fn(x, y):
        append_to(owner, loss := x.sum())
        return torch.ones(int(loss.item() > 0), device=loss.device)

    step = step_twins.graphed(fn)
    for _ in range(6):
        step(*step_twins.batch())
    assert len(owner.losses) == 6 and "the host reads a value" in str([*step.in_python]), step.in_python


@pytest.mark.parametrize("changes", [False, True], ids=["nothing", "a flag"])
def test_what_a_first_replay_that_is_refused_has_changed_is_undone(step_twins, monkeypatch, changes):
    """The capture has set a flag, which replays would not, and has left gradients that were not computed."""

    def losses(graphed):
        model, flags, is_second = step_twins.model(), Plain(), ctypes.py_object(count := [0])

        def fn(x, y):
            if changes and getattr(is_second, "val" + "ue")[0] == 1:
                flags.depth *= 2
            loss = cross_entropy(model(x), y) * flags.depth
            loss.backward()
            return loss

        torch.manual_seed(1)
        step, found = step_twins.graphed(fn) if graphed else fn, []
        for i in range(6):
            count[0] = i
            model.zero_grad()
            found += [step(*step_twins.batch()).detach(), *(p.grad.clone() for p in model.parameters())]
        return found

    refused = []
    replay = StepRecording.replay

    def refuse_the_first(recording, *tensors):
        if refused:
            return replay(recording, *tensors)
        refused.append(recording.only_once)
        raise ReplayRefused("CUDA error: out of memory")

    expected = losses(graphed=False)
    monkeypatch.setattr(StepRecording, "replay", refuse_the_first)
    same(losses(graphed=True), expected)
    assert len(refused) == 1 and (refused[0] is not None) == changes


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_is_set_back_with_its_check():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        snapshot = Snapshot([], [], [])
        torch.autograd.set_detect_anomaly(False)
        snapshot.restore()
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
