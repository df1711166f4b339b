"""A graphed step leaves what the plain step leaves, bit for bit, and says why where it runs in Python."""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import re
import sys
import types
import warnings
import weakref
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from support import on_threads, regions, replays, same, same_state, sgd, training_step, usual_step
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from thunder_cg import OptionError, explain, graphed_step, thunderfx
from thunder_cg.compat.objects import without_garbage_collection
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.backends import resolve
from thunder_cg.step import graphed
from thunder_cg.step.calls import Calls
from thunder_cg.step.gradients import GradientsBefore, GraphGradient
from thunder_cg.step.packages import is_installed
from thunder_cg.step.recording import StepCapture
from thunder_cg.step.state import StepState

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")


def adam(parameters, make=torch.optim.Adam, **options):
    """One that a graph can hold: on a GPU, it has to be capturable."""
    parameters = [*parameters]
    return make(parameters, fused=True, capturable=parameters[0].is_cuda, **options)


adamw = partial(adam, make=torch.optim.AdamW)


def why(step):
    return "; ".join(step.in_python)


# ---------------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "momentum": sgd,
    "nesterov": partial(sgd, nesterov=True, weight_decay=0.1),
    "sgd, one by one": partial(sgd, foreach=False),
    "sgd, fused": partial(sgd, fused=True),
    "adam, fused": adam,
    "adam, amsgrad": partial(adam, amsgrad=True),
    "adamw, fused": partial(adamw, weight_decay=0.1),
    "adamw, lr as a tensor": lambda p: adamw(p := [*p], lr=torch.tensor(0.01, device=p[0].device)),
}
# They read a counter on the host, so on the tape each of them runs in Python; on CUDA those that may be `capturable`.
ON_HOST = {
    name: getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
}
OTHERS = {  # none of them may be `capturable`
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(step_twins, name):
    step = step_twins.train(partial(usual_step, make=OPTIMIZERS[name]), 30)
    assert step.captures == 1 and step.replays >= 26, why(step)


@pytest.mark.parametrize("name", [*ON_HOST, *OTHERS])
def test_optimizers_that_read_a_counter_on_the_host(step_twins, name):
    step = step_twins.train(partial(usual_step, make={**ON_HOST, **OTHERS}[name]), 30)
    assert step.replays >= 26 or "the optimizer reads its state on the host" in why(step), why(step)


def test_forward_and_backward_of_a_step_without_a_graph_are_captured(step_twins):
    models = []
    make = partial(usual_step, make=torch.optim.NAdam)
    step = step_twins.train(make, 12, between=lambda i, model, *rest: models.append(model))
    assert step.replays == 0 and "the optimizer reads its state on the host" in why(step), why(step)
    assert replays(models[-1]) >= 2 * 8


def test_a_loader_whose_loss_is_read_now_and_then(step_twins):
    """As most loops have it: pinned batches, copies that do not block, and a total that is read every four steps."""
    on_gpu, device = step_twins.device == "cuda", step_twins.device
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))

    def run(graphed):
        model = step_twins.model()
        step, read, total = graphed(usual_step(model)), [], torch.zeros((), device=device)
        for epoch in range(3):
            for i, batch in enumerate(DataLoader(data, batch_size=5, pin_memory=on_gpu)):
                x, y = (each.to(device, non_blocking=True) for each in batch)
                if on_gpu and epoch:  # PyTorch raises where it would wait for the GPU
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    total += step(x, y).detach()
                finally:
                    if on_gpu:
                        torch.cuda.set_sync_debug_mode("default")
                if i % 4 == 3:
                    read.append(total.item())
                    total.zero_()
        return [read, [*map(torch.detach, model.parameters())]], step

    step = step_twins.both(run)
    assert step.captures == 1 and step.replays >= 20, why(step)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(ON_HOST.keys() - {"Adagrad"}))
def test_capturable_optimizers(step_twins, backend, name):
    if backend == "tape":
        pytest.skip("PyTorch has capturable optimizers on GPUs only")
    step = step_twins.train(partial(usual_step, make=partial(ON_HOST[name], capturable=True)), 30)
    assert step.captures == 1 and step.replays >= 26, why(step)


@pytest.mark.nightly
def test_what_inductor_compiles_is_in_the_graph(step_twins):
    """No dispatch mode sees its kernels, so the tape is told of them."""
    weigh = torch.compile(lambda y: torch.sin(y) * 2)
    step = step_twins.train(lambda model: usual_step(model, compiled=lambda x: weigh(model(x))), 8)
    assert step.captures == 1 and step.replays >= 4, why(step)


# ----------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("where", ["first", "after the forward", "last", "to zero", "never", "by hand"])
@pytest.mark.nightly_after(2)
def test_gradients_are_dropped_wherever(step_twins, where):
    def make(model):
        optimizer = sgd(model.parameters())

        def step(x, y):
            if where in ("first", "to zero"):
                optimizer.zero_grad(set_to_none=where == "first")
            if where == "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
            loss = cross_entropy(model(x), y)
            if where == "after the forward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if where == "last":
                optimizer.zero_grad()
            return loss

        return step

    step = step_twins.train(make, 10)
    assert step.replays >= 5, why(step)


def test_gradients_of_a_graph_that_is_gone(step_twins):
    """A later graph of the step expects them, and still does when the smaller batch is captured."""

    def make(model):
        optimizer = sgd(model.parameters())

        def step(x, y, is_last):
            loss = cross_entropy(model(x), y) / 3
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step

    model = step_twins.model()
    twin, graphed = copy.deepcopy(model), step_twins.graphed(make(model), max_recordings=2)
    results = []
    for step in (make(twin), graphed):
        torch.manual_seed(1)
        sizes = [5] * 12 + [3] * 4
        results.append([step(*step_twins.batch(size), i % 2 == 1).detach() for i, size in enumerate(sizes)])
    same(*results)
    same_state(model, twin)
    assert graphed.captures == 4 and "still held" not in why(graphed), why(graphed)


def test_gradients_are_accumulated_over_steps(step_twins):
    def train(model, graphed):
        optimizer = sgd(model.parameters())

        def micro(x, y):
            loss = cross_entropy(model(x), y) / 3
            loss.backward()
            return loss

        def update():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        micro, update = (step_twins.graphed(micro), step_twins.graphed(update)) if graphed else (micro, update)
        torch.manual_seed(1)
        results = []
        for _ in range(8):
            results += [micro(*step_twins.batch()).detach() for _ in range(3)]
            results.append(update())
        return results, micro, update

    model = step_twins.model()
    twin = thunder.jit(copy.deepcopy(model))
    model = step_twins.compiled(model)
    expected, _, _ = train(twin, False)
    results, micro, update = train(model, True)
    same(results, expected)
    same_state(model, twin)
    assert micro.captures <= 3 and micro.replays >= 12, why(micro)
    assert update.replays >= 3, why(update)


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("form", ["a flag", "two steps"])
def test_accumulation_captures_each_kind_of_call_once(step_twins, form, to_none):
    """The first micro-batch, those that add to it, and the last; if gradients stay, the first adds, too."""

    def run(graphed):
        model = step_twins.model()
        optimizer = sgd(model.parameters())

        def micro(x, y, is_last=False):
            loss = cross_entropy(model(x), y) / 3
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            return loss

        def last(x, y):
            return micro(x, y, True)

        steps = [micro, last] if form == "two steps" else [micro]
        steps = [*map(graphed, steps)]
        found = []
        for i in range(27):
            is_last = i % 3 == 2
            args = (is_last,) if form == "a flag" else ()
            found.append(steps[is_last and len(steps) > 1](*step_twins.batch(), *args).detach())
        return [*found, *model.state_dict().values()], steps

    steps = step_twins.both(run)
    captures = sum(step.captures for step in steps)
    assert captures == (3 if to_none else 2) and steps[0].replays >= 12, [*map(why, steps)]


@pytest.mark.parametrize("held", ["nothing", "one", "all", "a view"])
@pytest.mark.nightly_after(2)
def test_gradients_that_are_made_outside_of_the_step(step_twins, held):
    """They are elsewhere in each call, and what somebody holds is not overwritten."""

    def run(graphed):
        model = step_twins.model()
        optimizer = sgd(model.parameters())

        def update():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        step = graphed(update)
        found, kept = [], []
        for i in range(16):
            x, y = step_twins.batch()
            cross_entropy(model(x), y).backward()
            kept.append(torch.empty(64 + i, device=step_twins.device))  # so that memory is not used again
            if held == "all" or (held == "one" and i == 8):
                kept.append(model[0].weight.grad)
            elif held == "a view":
                kept.append(model[0].weight.grad[0])
            found.append(step())
        return [*found, *(each for each in kept if len(each) < 64), *model.state_dict().values()], step

    step = step_twins.both(run)
    if held in ("nothing", "one"):
        assert step.captures <= 2 and step.replays >= 12, why(step)
    else:
        assert step.captures == 2 and "somebody holds that memory; make them in the step" in why(step), why(step)


def test_gradients_that_somebody_held_before_the_capture(step_twins):
    """A graph adds to them where they are. If the parameter gets others, they are not where the graph reads these."""

    def run(graphed):
        model = step_twins.model()

        def accumulate(x, y):
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        step = graphed(accumulate)
        found, held = [], []
        for i in range(24):
            if i % 2 == 0:
                model[0].zero_grad()
            if i % 8 == 7:  # a backward elsewhere has made others
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
            found.append(step(*step_twins.batch()))
            if i == 1:
                held = [parameter.grad for parameter in model[3].parameters()]
            found += [each.clone() for each in (*held, *(parameter.grad for parameter in model.parameters()))]
        return found, step

    step = step_twins.both(run)
    assert step.replays, why(step)


def test_gradients_of_another_step(step_twins):
    """A GAN with a step for each network: one leaves the gradients of the other alone, which come and go."""

    def run(graphed):
        torch.manual_seed(2)
        generator, critic = step_twins.model(nn.Linear(3, 4)), step_twins.model(nn.Linear(4, 1))
        optimizers = [sgd(each.parameters()) for each in (generator, critic)]

        def train_critic(x, z):
            optimizers[1].zero_grad()
            loss = critic(generator(z).detach()).mean() - critic(x).mean()
            loss.backward()
            optimizers[1].step()
            return loss

        def train_generator(z):
            optimizers[0].zero_grad()
            loss = -critic(generator(z)).mean()
            loss.backward()
            optimizers[0].step()
            return loss

        steps = train_critic, train_generator
        steps = [*map(graphed, steps)]
        found = []
        for i in range(24):
            x, z = torch.randn(5, 4), torch.randn(5, 3)
            found.append(steps[0](x.to(step_twins.device), z.to(step_twins.device)).detach())
            if i % 2:
                found.append(steps[1](z.to(step_twins.device)).detach())
            if i == 14:
                optimizers[0].zero_grad()
            elif i == 17:
                generator[0].weight.grad = torch.ones_like(generator[0].weight)
            found.append([p.grad.clone() for p in critic.parameters()])
        return [*found, *generator.state_dict().values(), *critic.state_dict().values()], steps

    steps = step_twins.both(run)
    assert [step.replays for step in steps] >= [16, 8], [*map(why, steps)]


def test_gradients_from_outside_that_a_function_of_a_dictionary_drops(step_twins):
    """A capture that is given up, as nobody knew of the function, leaves the gradients where they were."""

    def run(graphed):
        model = step_twins.model()
        optimizer = sgd(model.parameters())

        def update():
            norm = nn.utils.clip_grad_norm_([*model.parameters()], 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        functions = {"update": update}

        def call(name):
            return functions[name]()

        step, found = graphed(call), []
        for _ in range(10):
            x, y = step_twins.batch()
            cross_entropy(model(x), y).backward()
            found.append(step("update"))
        return [*found, *model.state_dict().values()], step

    step = step_twins.both(run)
    assert step.replays >= 4, why(step)


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("between", ["critic", "critic, score"])
def test_one_step_for_two_networks_in_turn(step_twins, between):
    """Each graph leaves the gradients of the other network alone, also where it was captured before these were made."""

    def run(graphed):
        torch.manual_seed(2)
        generator, critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)), nn.Linear(4, 1)
        generator, critic = generator.to(step_twins.device), critic.to(step_twins.device)
        optimizers = {"generator": sgd(generator.parameters()), "critic": sgd(critic.parameters())}

        def train(x, z, which):
            if which == "score":
                with torch.no_grad():
                    return critic(generator(z)).mean() + critic(torch.cat([x] * 4)).square().mean()
            optimizers[which].zero_grad()
            loss = -critic(generator(z)).mean()
            if which == "critic":
                loss = critic(x).mean() - loss
            loss.backward()
            optimizers[which].step()
            return loss

        step = graphed(train)
        kinds = ["generator", *between.split(", ")]
        found = []
        for i in range(24):
            x, z = torch.randn(5, 4), torch.randn(5, 3)
            found.append(step(x.to(step_twins.device), z.to(step_twins.device), kinds[i % len(kinds)]).detach())
            found += [p.grad.clone() for p in (*generator.parameters(), *critic.parameters()) if p.grad is not None]
        return [*found, *generator.state_dict().values(), *critic.state_dict().values()], step

    step = step_twins.both(run)
    assert step.captures <= 4 and step.replays >= 14, why(step)


def test_accumulation_with_an_evaluation_between(step_twins):
    """The graph of the evaluation, which was captured before, does not overwrite gradients that are added to."""

    def run(graphed):
        model = step_twins.model()
        optimizer = sgd(model.parameters())

        def train(x, y, kind):
            if kind == "score":
                with torch.no_grad():
                    return cross_entropy(model(torch.cat([x] * 5)), torch.cat([y] * 5))
            loss = cross_entropy(model(x), y) / 2
            loss.backward()
            if kind == "last":
                optimizer.step()
                optimizer.zero_grad()
            return loss

        step = graphed(train)
        kinds = ["micro", "score", "micro", "last", "score"]
        return [step(*step_twins.batch(), kinds[i % 5]).detach() for i in range(40)], step

    step = step_twins.both(run)
    assert step.captures <= 5 and step.replays >= 18, why(step)


def test_a_capture_that_fails_leaves_what_another_thread_does(step_twins, monkeypatch):
    """That trains another model meanwhile: it has its new gradients, and none where it has dropped them."""
    step, others = step_twins.graphed(usual_step(step_twins.model())), [*step_twins.model().parameters()]
    gradients = [torch.full_like(each, 2.0) for each in others]

    def refuse(self, *args):
        def train():
            others[0].grad, others[1].grad = gradients[0], None

        on_threads(train)
        raise CaptureRefused("a fault")

    for each, gradient in zip(others, gradients):
        each.grad = torch.zeros_like(gradient)
    monkeypatch.setattr(StepCapture, "_record", refuse)
    for _ in range(4):
        step(*step_twins.batch())
    assert "a fault" in why(step)
    assert others[0].grad is gradients[0] and others[1].grad is None


@pytest.mark.parametrize("is_in", ["list", "history"])
def test_a_capture_that_fails_leaves_gradients_of_what_is_not_compared(step_twins, monkeypatch, is_in):
    """Autograd reaches parameters that are too deep in containers, or in no object of Python that the step names."""
    model, other = step_twins.model(nn.Linear(4, 4)), step_twins.model(nn.Linear(4, 4))
    x, record, tried = step_twins.batch()[0], StepCapture._record, []
    history, nested = other(x), other
    for _ in range(12):
        nested = [nested]

    def uses(x):
        found = nested
        while type(found) is list:
            found = found[0]
        return history + x if is_in == "history" else found(x)

    monkeypatch.setitem(globals(), "uses", uses)
    name = ["sin"]

    def train(x):
        get = globals()[name[0]] if name[0] == "uses" else torch.sin
        get(model(x)).square().mean().backward(retain_graph=True)
        model.zero_grad()

    def refuse(self, *args):
        tried.append(name[0])
        record(self, *args)
        raise CaptureRefused("a fault")

    step = step_twins.graphed(train)
    monkeypatch.setattr(StepCapture, "_record", refuse)
    for name[0] in ("sin", "sin", "uses", "uses", "uses"):
        found = []
        for run in (train, step):
            other.zero_grad()
            run(x)
            found.append([parameter.grad for parameter in other.parameters()])
        same(*found)
    assert tried == ["sin", "uses"]


def test_a_capture_counts_no_holders_of_others(step_twins):
    """Another thread may hold a gradient of its own while a step is captured."""
    mine, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    known = []
    for each in (mine, other):
        each.grad = torch.ones(1)
        known.append(GraphGradient.of(each.grad, each))
        known[-1].count()
    with GraphGradient.recounted([mine]):
        kept = [mine.grad, other.grad]
    assert [each.is_held() for each in known] == [False, True]
    kept.clear()
    assert [each.is_held() for each in known] == [False, False]


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_steps_on_several_threads(step_twins, is_compiled):
    """Each trains its own model, and captures while others are in the middle of theirs."""
    models = [step_twins.model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(3)]
    plain, found, steps = copy.deepcopy(models), {}, []

    def train(model, i, graphed):
        generator, results = torch.Generator().manual_seed(i), []
        step = usual_step(step_twins.compiled(model) if graphed and is_compiled else model)
        if graphed:
            steps.append(step := step_twins.graphed(step))
        for _ in range(12):
            x, y = torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)
            results.append(step(x.to(step_twins.device), y.to(step_twins.device)).detach())
        found[i, graphed] = results

    on_threads(*(partial(train, model, i, True) for i, model in enumerate(models)))
    for i, model in enumerate(plain):
        train(thunder.jit(model) if is_compiled else model, i, False)
        same(found[i, True], found[i, False])
        same_state(models[i], model)
    assert all(step.captures == 1 and step.replays >= 8 for step in steps), [*map(why, steps)]


def test_a_gradient_that_is_still_held_is_not_overwritten(step_twins):
    held = {}

    def between(i, model, fn, batch):
        held.setdefault(id(model), []).append([p.grad if i % 2 else p.grad.view(-1) for p in model.parameters()])

    step = step_twins.train(usual_step, 8, between)
    plain, graphed = held.values()
    same(plain, graphed)
    assert "still held" in why(step)


def test_the_storage_of_a_gradient_that_is_held_is_not_overwritten(step_twins):
    held = []

    def between(i, model, fn, batch):
        if i == 5:
            held.append([p.grad.untyped_storage() for p in model.parameters()])

    step = step_twins.train(usual_step, 8, between)
    plain, graphed = ([each.tolist() for each in storages] for storages in held)
    assert plain == graphed and "still held" in why(step)


def test_a_gradient_that_gets_other_memory_is_refused(step_twins):
    def make(model):
        optimizer = sgd(model.parameters())

        def step(x, y):
            optimizer.zero_grad(set_to_none=False)
            loss = cross_entropy(model(x), y)
            loss.backward()
            for p in model.parameters():
                p.grad.data = p.grad.data * 0.5
            optimizer.step()
            return loss

        return step

    step = step_twins.train(make)
    assert step.captures == 0 and "write the gradient in place, such as by p.grad.copy_(new)" in why(step), why(step)


def test_gradients_that_another_graph_left_are_not_overwritten(step_twins):
    """A graph may use memory for activations in which one that was captured later has its gradients."""
    model = step_twins.model(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 3))
    step = step_twins.graphed(usual_step(model))
    large, small = step_twins.batch(512), step_twins.batch(256)
    for batch in (large, small):
        for _ in range(4):
            step(*batch)
    replays = step.replays
    assert replays >= 3
    held = [parameter.grad for parameter in model.parameters()]
    contents = [gradient.clone() for gradient in held]
    for _ in range(2):
        step(*large)
        same(held, contents)
    assert step.replays == replays and "still held" in why(step)
    del held
    step(*large)
    assert step.replays == replays + 1


def test_gradients_that_an_interrupted_capture_dropped_come_back(step_twins):
    model = step_twins.model()
    fn, x, backend = usual_step(model), step_twins.batch(), resolve(step_twins.backend)

    def interrupted(*batch):
        loss = fn(*batch)
        if backend.busy():
            raise KeyboardInterrupt
        return loss

    step = step_twins.graphed(interrupted)
    for _ in range(2):
        step(*x)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(KeyboardInterrupt):
        step(*x)
    same([parameter.grad for parameter in model.parameters()], before)


def test_gradients_move_into_the_pool_unless_somebody_holds_them(step_twins, device):
    backend, parameters = (
        resolve(step_twins.backend),
        [*step_twins.model(*(nn.Linear(4, 4) for _ in range(4))).parameters()],
    )
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    contents, at = [p.grad.clone() for p in parameters], [p.grad.data_ptr() for p in parameters]
    held = parameters[0].grad, parameters[1].grad.view(-1)
    parameters[2].grad = torch.randn(8, 4, device=device)[::2].copy_(contents[2])
    parameters[3].grad = None
    found = GradientsBefore(parameters, backend, Calls(), backend.pool(torch.device(device)), 1000)
    assert all(torch.equal(p.grad, content) for p, content in zip(parameters, contents) if p.grad is not None)
    assert found.moved == {p.grad.data_ptr() for p in parameters[4:]} and [each.data_ptr() for each in held] == at[:2]


def test_gradients_may_be_cleared_or_changed_between_the_steps(step_twins):
    def between(i, model, fn, batch):
        for parameter in model.parameters():
            if i % 3 == 0:
                parameter.grad = None
            elif i % 3 == 1:
                parameter.grad.mul_(7)
            else:
                parameter.grad = torch.ones_like(parameter)

    step = step_twins.train(usual_step, 12, between)
    assert step.replays >= 8, why(step)


def test_a_step_that_asks_whether_there_is_a_gradient(step_twins):
    def make(model):
        inner = usual_step(model)
        weight = next(model.parameters())

        def step(x, y):
            scale = 1.0 if weight.grad is None else 2.0
            inner.optimizer.zero_grad()
            loss = cross_entropy(model(x), y) * scale
            loss.backward()
            inner.optimizer.step()
            return loss

        step.optimizer = inner.optimizer
        return step

    def between(i, model, fn, batch):
        if i == 6:
            model.zero_grad()

    step = step_twins.train(make, 10, between)
    assert step.captures == 2 and step.replays >= 6, why(step)


@pytest.mark.parametrize("to_none", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("change", ["memory", "strides"])
def test_a_gradient_may_get_other_memory_or_strides(step_twins, device, to_none, change):
    """It is the same tensor as before, though not at the place where the graph writes it."""
    results = []
    made = step_twins.model(nn.Linear(4, 4), nn.Linear(4, 3))
    for is_graphed in (False, True):
        model = copy.deepcopy(made)
        inner = usual_step(model)

        def step(x, y, model=model, inner=inner):
            inner.optimizer.zero_grad(set_to_none=to_none)
            loss = cross_entropy(model(x), y)
            loss.backward()
            inner.optimizer.step()
            return loss

        step = step_twins.graphed(step) if is_graphed else step
        torch.manual_seed(1)
        results.append([])
        for i in range(10):
            results[-1].append([step(*step_twins.batch()).detach(), *(p.grad.clone() for p in model.parameters())])
            if i == 6 and change == "memory":
                model[0].weight.grad.data = torch.ones(4, 4, device=device)
            elif i == 6:
                model[0].weight.grad.t_()
    same(*results)
    assert step.captures == 2, why(step)


def test_a_write_between_forward_and_backward_is_noticed(step_twins):
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(usual_step(model))
    for _ in range(5):
        step(*step_twins.batch())
    x, y = step_twins.batch()
    weight = next(model.parameters())
    loss = (weight * weight).sum()
    step(x, y)
    assert step.replays >= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------------------------------------- what changes midway


def scheduled(model, make=sgd):
    step = usual_step(model, make)
    step.scheduler = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda epoch: 0.9**epoch)
    return step


def test_learning_rates(step_twins):
    def between(i, model, fn, batch):
        if i in (6, 12):
            fn.optimizer.param_groups[0]["lr"] *= 0.5

    step = step_twins.train(usual_step, 18, between)
    assert step.captures == 3 and step.replays >= 8, why(step)
    assert "'lr'] changed from 0.05 to 0.025" in why(step)
    report = explain(step)
    lines = str(report).splitlines()
    assert lines[0] == f"Step step: {step.replays} of 18 calls replayed the whole step as one graph; 3 captures"
    first = next(i for i, line in enumerate(lines) if line.endswith("['lr'] changed, between calls"))
    assert lines[first + 1] == "      from 0.05 to 0.025 and later to others"
    assert max(map(len, lines[1 : first + 2])) <= 80
    assert len(report.memory.recordings) == 3
    assert report.replays + report.captures + sum(report.in_python.values()) == report.calls == 18
    assert report.to_dict()["in_python"] == report.in_python


def test_a_learning_rate_that_changes_in_each_step_is_said(step_twins):
    """As what it is: between calls, and by no line of the step, though some name the optimizer."""
    told = r"'lr'\] changed from \S+ to \S+, between calls; make SGD with fused=True, whose kernels take"
    with pytest.warns(UserWarning, match=told):
        step = step_twins.train(scheduled, 14, lambda i, model, fn, batch: fn.scheduler.step())
    assert step.captures == 0
    report = explain(step)
    (merged,) = (reason for reason in report.in_python if " and later to others, between calls; " in reason)
    assert report.in_python[merged] > 2 and merged.count(" changed from ") == 1
    assert "; make SGD with fused=True" in merged
    assert sum("'lr'] changed" in line for line in report.lines()) == 1, "once it is known as well"
    assert "there is nothing to change" not in str(report)


def cycled(step, every=1):
    """Has a scheduler write the momentum after each call of a step, or after each second one."""
    step.scheduler = torch.optim.lr_scheduler.OneCycleLR(step.optimizer, max_lr=0.1, total_steps=60)
    step.after = lambda i: (i + 1) % every or step.scheduler.step()
    return step


@pytest.mark.parametrize("every", [1, 2])
def test_a_momentum_that_changes_in_each_step_is_said(step_twins, every):
    """The step has the group by another name, which the first capture shows. What two calls see is captured in the
    second one, not for long.
    """

    def make(model):
        rate = torch.tensor(0.01, device=step_twins.device)
        groups = []
        make = partial(torch.optim.SGD, lr=rate, momentum=0.9, fused=True)
        step = usual_step(model, make, after=lambda: groups[0])
        groups += step.optimizer.param_groups
        return cycled(step, every)

    told = (
        r"groups\[0\]\['momentum'\] changed from \S+ to \S+ \(see \S+\), between calls; keep it constant, as OneCycleLR"
    )
    with pytest.warns(UserWarning, match=told):
        step = step_twins.train(make, 24, lambda i, model, fn, batch: fn.after(i))
    assert step.captures == (0 if every == 1 else 5) and step.replays == 0, why(step)


def test_captures_for_numbers_that_do_not_pay_name_the_number(step_twins, monkeypatch):
    """Three calls see each, the last of which is replayed."""
    monkeypatch.setattr(graphed, "_MAX_CAPTURES", 2)

    def between(i, model, fn, batch):
        fn.optimizer.param_groups[0]["momentum"] = 0.9 - i // 3 / 100

    step = step_twins.train(usual_step, 12, between)
    reason = next(each for each in step.in_python if each.startswith("it was captured 2 times"))
    assert re.search(r", since optimizer\S+'momentum'\] changes between calls; make SGD with fused=True", reason), (
        reason
    )


def test_an_optimizer_outside_of_the_step_may_have_any_numbers(step_twins):
    def make(model):
        def step(x, y):
            model.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        step.optimizer = sgd(model.parameters())
        return cycled(step)

    step = step_twins.train(make, 12, lambda i, model, fn, batch: (fn.optimizer.step(), fn.after(i)))
    assert step.captures == 1 and step.replays >= 8, why(step)


def test_a_step_that_replays_says_that_there_is_nothing_to_change(step_twins):
    lines = str(explain(step_twins.train(usual_step, 6))).splitlines()
    assert lines[1] == "All calls after the first ones replay: there is nothing to change."


def test_a_learning_rate_that_is_a_tensor_is_followed(step_twins):
    def make(model):
        rate = torch.tensor(0.01, device=step_twins.device)
        return scheduled(model, lambda p: adamw(p, lr=rate.clone()))

    step = step_twins.train(make, 14, lambda i, model, fn, batch: fn.scheduler.step())
    assert step.captures == 1 and step.replays >= 8, why(step)


def freeze(model, fn):
    next(model.parameters()).requires_grad_(False)


def add_group(model, fn):
    extra = nn.Parameter(torch.ones(3, device=next(model.parameters()).device))
    extra.grad = torch.ones_like(extra)
    fn.optimizer.add_param_group({"params": [extra], "lr": 0.01})


def move(model, fn):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def load(model, fn):
    fn.optimizer.load_state_dict(copy.deepcopy(fn.optimizer.state_dict()))
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def evaluate(model, fn):
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 4, device=next(model.parameters()).device))
    model.train()


def seed(model, fn):
    torch.manual_seed(11)


def momentum(model, fn):
    fn.optimizer.param_groups[0]["momentum"] = 0.5


@pytest.mark.parametrize("change", [freeze, add_group, move, load, evaluate, seed, momentum])
@pytest.mark.nightly_after(1)
def test_changes_midway(step_twins, change):
    step = step_twins.train(usual_step, 14, lambda i, model, fn, batch: change(model, fn) if i == 6 else None)
    assert step.replays >= 6, why(step)
    assert step.captures == (1 if change in (evaluate, seed) else 2), why(step)


def test_what_is_frozen_is_named(step_twins):
    step = step_twins.train(usual_step, 12, lambda i, model, fn, batch: freeze(model, fn) if i == 6 else None)
    (said,) = (each for each in step.in_python if each.endswith("between calls"))
    assert re.search(r"changed from (a tensor \(8, 4\) of float32) that requires grad to \1,", said), said


@pytest.mark.nightly
def test_other_batches_and_back(step_twins):
    def train(step):
        torch.manual_seed(2)
        return [step(*step_twins.batch(size)).detach() for size in (5, 5, 5, 5, 2, 5, 5, 2, 2, 2, 5, 2)]

    model = step_twins.model()
    twin = thunder.jit(copy.deepcopy(model))
    model = step_twins.compiled(model)
    step = step_twins.graphed(usual_step(model))
    same(train(step), train(usual_step(twin)))
    same_state(model, twin)
    assert step.captures == 2 and step.replays >= 6, why(step)


def test_a_batch_of_another_size_takes_nothing_from_the_usual_one(step_twins):
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(usual_step(model))
    for size in (5,) * 5 + (2,) + (5,) * 4 + (2,):  # the last one is captured
        step(*step_twins.batch(size))
    replays = step.replays
    for _ in range(6):
        step(*step_twins.batch())
    assert (step.captures, step.replays) == (2, replays + 6), why(step)


def test_the_advice_for_shapes_fits(step_twins):
    step = step_twins.graphed(lambda x: x.sum())
    for width in (4, 3):
        step(torch.ones(5, width, device=step_twins.device))
    assert "pad to a few sizes" in why(step) and "drop_last" not in why(step), why(step)


def test_values_that_the_step_reads_from_outside(step_twins):
    class Settings:
        scale = 1.0

    settings, table = Settings(), {"weight": 1.0}

    def make(model):
        settings.scale, table["weight"] = 1.0, 1.0
        return usual_step(model, loss_of=lambda z, y: cross_entropy(z, y) * settings.scale * table["weight"])

    def between(i, model, fn, batch):
        if i == 4:
            settings.scale = 2.0
        if i == 8:
            table["weight"] = 3.0

    step = step_twins.train(make, 12, between)
    assert step.captures == 3 and step.replays >= 3, why(step)
    assert "settings.scale changed from 1.0 to 2.0" in why(step)


def weigh(settings, loss):
    return loss * settings.scale


class Slots:
    __slots__ = ("scale",)


NIGHTLY = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("in a list", "with slots", "bound by partial")]


@pytest.mark.parametrize("kind", ["an object", "a namespace", "counted", *NIGHTLY])
@pytest.mark.nightly_after(1)
def test_objects_that_are_passed_on(step_twins, kind):
    """The bytecode of the step does not tell what a function reads of its argument."""

    class Settings:
        def __init__(self):
            self.inner = None

    def make(model):
        optimizer = sgd(model.parameters())
        settings = {"with slots": Slots, "a namespace": types.SimpleNamespace}.get(kind, Settings)()
        settings.scale = 1.0
        listed = [{"settings": settings}]

        def weigh_here(loss):
            return weigh(listed[0]["settings"] if kind == "in a list" else settings, loss)

        def step(weigh, x, y):
            optimizer.zero_grad()
            loss = weigh(cross_entropy(model(x), y))
            if kind == "counted":
                listed[0]["settings"].calls = getattr(listed[0]["settings"], "calls", 0) + 1
            loss.backward()
            optimizer.step()
            return loss

        def step_of_partial(settings, x, y):
            return step(partial(weigh, settings), x, y)

        made.append(settings)  # no attribute of the function, where it would be compared as well
        return partial(step_of_partial, settings) if kind == "bound by partial" else partial(step, weigh_here)

    def between(i, model, fn, batch):
        if i == 5:
            made[-1].scale = 2.0

    made: list[Any] = []
    step = step_twins.train(make, 10, between)
    if kind == "counted":
        assert step.captures == 0 and ".calls changed from 1 to 2 (see " in why(step), why(step)
    else:
        assert step.captures == 2 and step.replays >= 4 and "scale changed from 1.0 to 2.0" in why(step), why(step)


def test_a_tensor_that_is_replaced_and_one_that_is_written(step_twins):
    def make(model):
        weights = {"class": torch.ones(3, device=step_twins.device), "loss": torch.ones((), device=step_twins.device)}
        step = usual_step(model, loss_of=lambda z, y: cross_entropy(z, y, weight=weights["class"]) * weights["loss"])
        step.weights = weights
        return step

    def between(i, model, fn, batch):
        fn.weights["loss"].mul_(0.9)
        if i == 5:
            fn.weights["class"] = torch.tensor([1.0, 2.0, 3.0], device=step_twins.device)

    step = step_twins.train(make, 12, between)
    assert step.captures == 2 and step.replays >= 6, why(step)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_python_that_changes_something_is_named(step_twins):
    class Trainer:
        steps = 0

    def appends(model):
        history = []
        return usual_step(model, after=lambda: history.append(0))

    def counts(model):
        trainer = Trainer()

        def count():
            trainer.steps = 1 + trainer.steps

        return usual_step(model, after=count)

    def draws(model):
        return usual_step(model, after=lambda: random.random())

    def steps_scheduler(model):
        step = usual_step(model)
        scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 1000)

        def with_scheduler(x, y):
            loss = step(x, y)
            scheduler.step()
            return loss

        return with_scheduler

    for make, said in (
        (appends, "something else than tensors without a history to history (test_graphed_step.py:"),
        (counts, "trainer.steps changed from 1 to 2"),
        (draws, "the state of Python's random numbers changed (see test_graphed_step.py:"),
        (steps_scheduler, "scheduler.last_epoch changed"),
    ):
        step = step_twins.train(make, 6)
        assert step.captures == 0 and said in why(step), why(step)


def test_captures_that_do_not_pay(step_twins, monkeypatch):
    monkeypatch.setattr(graphed, "_MAX_CAPTURES", 1)
    step = step_twins.graphed(lambda x: x * 2)
    for size in (3, 3, 3, 4, 4, 4):
        step(torch.ones(size, device=step_twins.device))
    assert step.captures == step.replays == 1, why(step)
    assert "captured 1 times and replayed 1 times; pad batches to a few shapes" in why(step)


def with_loss(inner):
    """Makes a step that does something with its loss and its optimizer, after the backward."""

    def make(model):
        optimizer = sgd(model.parameters())

        def step(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            inner(loss, optimizer)
            return loss

        return step

    return make


def test_a_value_read_on_the_host_where_somebody_catches_errors(step_twins):
    def inner(loss, optimizer):
        try:
            is_good = loss.item() < 100
        except Exception:
            is_good = False
        if is_good:
            optimizer.step()

    step = step_twins.train(with_loss(inner), 6)
    assert step.captures == 0 and "is_good = loss.item() < 100" in why(step), why(step)
    assert step_twins.device == "cuda" or "reading a tensor's value, as item() does" in why(step)


def test_what_breaks_a_capture_is_named_if_the_step_catches_it(step_twins, monkeypatch):
    """A capture of CUDA goes on after the error, and is found to be broken at its end."""

    def inner(loss, optimizer):
        with suppress(RuntimeError):
            loss.view(7)
        optimizer.step()

    def refuse(backend):
        raise RuntimeError("the driver refused")

    kind = type(resolve(step_twins.backend))
    monkeypatch.setattr(kind, "captured_addresses", refuse)
    step = step_twins.train(with_loss(inner), 5)
    assert step.captures == 0 and re.search(r"view\(\) raised .*loss.view\(7\).*has caught it", why(step)), why(step)


def test_a_value_read_on_the_host_is_named_with_its_line(step_twins):
    def inner(loss, optimizer):
        if loss.item() > 100:
            raise ValueError
        optimizer.step()

    step = step_twins.train(with_loss(inner), 6)
    assert step.captures == 0
    assert "test_graphed_step.py:" in why(step) and "if loss.item() > 100:" in why(step), why(step)


@pytest.mark.parametrize("kind", ["parameter", "module", "optimizer", "accumulated"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.nightly_after(1)
def test_hooks_run(step_twins, kind, late):
    ran = {}

    def register(model, fn):
        seen = ran.setdefault(id(model), [])

        def note(*args):
            seen.append(1)

        if kind == "parameter":
            next(model.parameters()).register_hook(note)
        elif kind == "accumulated":
            next(model.parameters()).register_post_accumulate_grad_hook(note)
        elif kind == "module":
            fn.loss.register_forward_hook(note)
        else:
            fn.optimizer.register_step_post_hook(note)

    def make(model):
        loss_of = nn.CrossEntropyLoss()
        step = usual_step(model, loss_of=loss_of)
        step.loss = loss_of
        if not late:
            register(model, step)
        return step

    step = step_twins.train(make, 9, lambda i, model, fn, batch: register(model, fn) if late and i == 5 else None)
    plain, graphed = ran.values()
    assert plain == graphed and len(plain) == (3 if late else 9)
    assert "has a hook" in why(step)


@pytest.mark.parametrize("kind", ["a hook", "a flag"])
def test_a_refusal_ends_with_its_reason(step_twins, kind):
    model, settings = step_twins.model(), types.SimpleNamespace(log=kind == "a flag")
    inner = usual_step(model)
    hook = next(model.parameters()).register_hook(lambda gradient: None) if kind == "a hook" else None

    def step(x, y):
        loss = inner(x, y)
        if settings.log:
            loss.item()
        return loss

    step = step_twins.graphed(step)
    batch = step_twins.batch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(30):
            if i == 10 and hook is not None:
                hook.remove()
            settings.log &= i < 10
            step(*batch)
    assert len(said) == 1 and step.captures == 1 and step.replays >= 6, why(step)


def test_a_step_that_is_refused_is_seldom_looked_at(step_twins, monkeypatch):
    """An option of its optimizer changes in each call, so each look finds another state."""
    inner = usual_step(step_twins.model())
    options = inner.optimizer.param_groups[0]

    def step(x, y):
        inner(x, y).item()

    looks, tries = [], []
    step = step_twins.graphed(step)
    monkeypatch.setattr(graphed, "StepState", lambda *args, **named: looks.append(1) or StepState(*args, **named))
    monkeypatch.setattr(graphed, "StepCapture", lambda *args, **named: tries.append(1) or StepCapture(*args, **named))
    for i in range(200):
        if i % 20 == 0:
            options["maximize"] = not options["maximize"]
        step(*step_twins.batch())
    assert step.captures == 0 and 3 <= len(tries) <= 7 and len(looks) < 60, (len(tries), len(looks))


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_tensor_from_nowhere_is_refused(step_twins, frozen):
    hidden = ctypes.py_object()  # has no attributes that could be looked at

    def make(model):
        hidden.value = torch.ones((), device=step_twins.device)
        return usual_step(model, loss_of=lambda z, y: cross_entropy(z, y) * getattr(hidden, "val" + "ue"))

    def between(i, model, fn, batch):
        if i == 5:
            hidden.value = torch.tensor(2.0, device=step_twins.device)

    if frozen:  # from the garbage collector, as long trainings do
        gc.freeze()
    try:
        step = step_twins.train(make, 10, between)
    finally:
        gc.unfreeze()
        gc.freeze()  # as common.py has it
    assert step.captures == 0 and re.search(r"use a tensor \(\) of float32 in .+, and it is not known", why(step)), why(
        step
    )


def test_nested_tensors(step_twins):
    """They have no shape that could be compared. One that the step does not use is in nobody's way."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=step_twins.device)
    x = torch.ones(2, device=step_twins.device)
    reads = step_twins.graphed(lambda x: x * nested.to_padded_tensor(0.0).sum())
    takes = step_twins.graphed(lambda nested: nested.to_padded_tensor(0.0) * 2)
    ignores = step_twins.graphed(lambda x: x * 2)
    for _ in range(4):
        same(reads(x), x * 5)
        same(takes(nested), nested.to_padded_tensor(0.0) * 2)
        same(ignores(x), x * 2)
    said = r"the step uses nested \(see .+\), a nested tensor, which has no shape; pad it"
    assert re.search(said, why(reads)), why(reads)
    assert "argument 0 is a nested tensor, not a plain tensor of a batch" in why(takes)
    assert ignores.replays == 2, why(ignores)


def test_a_tensor_that_escapes_is_refused(step_twins):
    logger = ctypes.py_object()  # has no attributes that could be looked at

    def make(model):
        def call(x):
            logits = model(x)
            setattr(logger, "val" + "ue", logits.detach())
            return logits

        return usual_step(model, compiled=call)

    step = step_twins.train(make, 6)
    assert step.captures == 0 and "still held after it" in why(step), why(step)


class Tagged(torch.Tensor):
    """A tensor of another type, as a DTensor is."""


def test_a_result_of_another_type_is_refused(step_twins):
    step, x = step_twins.graphed(lambda x: (x * 2).as_subclass(Tagged)), torch.ones(2, device=step_twins.device)
    assert {type(step(x)) for _ in range(3)} == {Tagged}
    assert "a result is a Tagged, not a plain tensor; return a plain one" in why(step)


def test_a_view_that_pytorch_lets_nobody_use(step_twins):
    """One of several views of what was written in place since, such as PyTorch's FSDP keeps as attributes."""
    model, base = nn.Linear(2, 2).to(step_twins.device), nn.Parameter(torch.ones(6, device=step_twins.device)) * 1
    model.part = base.split(3)[0]
    with torch.no_grad():
        base.mul_(2)
    step, x = step_twins.graphed(lambda x: model(x).detach()), torch.ones(2, device=step_twins.device)
    for _ in range(3):
        same(step(x), model(x).detach())
    assert step.captures == 0 and "is a view and its base" in why(step), why(step)


@pytest.mark.parametrize("change", ["memory", "shape", "requires_grad"])
@pytest.mark.nightly_after(2)
def test_a_tensor_that_is_left_otherwise_is_refused(step_twins, change):
    def make(model):
        optimizer, spare = sgd(model.parameters()), torch.zeros(3, 8, device=step_twins.device)
        weight = [*model.parameters()][2]
        optimizer.step()

        def step(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if change == "memory":
                weight.data, spare.data = spare.data, weight.data
            elif change == "shape":
                spare.data = spare.data.t()
            else:
                spare.requires_grad_(not spare.requires_grad)
            return loss + spare.sum().detach()

        return step

    step = step_twins.train(make, 6)
    said = "that requires grad.*; set requires_grad back" if change == "requires_grad" else "got other memory.*; write"
    assert step.captures == 0 and re.search(f"(spare|weight) .*{said}", why(step)), why(step)


def test_parameters_that_a_step_freezes_and_unfreezes(step_twins):
    """A GAN: the discriminator is frozen while the generator is trained, and stays so until the next step."""

    def make(generator):
        torch.manual_seed(2)
        discriminator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(step_twins.device)
        optimizers = sgd(generator.parameters()), sgd(discriminator.parameters())

        def step(x, y):
            fake = generator(x)
            discriminator.requires_grad_(True)
            optimizers[1].zero_grad()
            loss = discriminator(fake.detach()).mean() - discriminator(x[:, :3]).mean()
            loss.backward()
            optimizers[1].step()
            discriminator.requires_grad_(False)
            optimizers[0].zero_grad()
            (-discriminator(fake).mean()).backward()
            optimizers[0].step()
            return loss, *(parameter.detach() for parameter in discriminator.parameters())

        return step

    step = step_twins.train(make, 8)
    assert step.replays >= 5, why(step)


@pytest.mark.parametrize("kind", ["requires grad", "written", "an object", "elsewhere"])
@pytest.mark.nightly_after(2)
def test_arguments_that_no_graph_can_have(step_twins, kind):
    model = step_twins.compiled(step_twins.model())
    optimizer = sgd(model.parameters())

    def step(x, y, *more):
        optimizer.zero_grad()
        if kind == "written":
            x.mul_(0.5)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = step_twins.graphed(step)
    for _ in range(5):
        x, y = step_twins.batch()
        before = x.clone()
        more = {"an object": [object()], "elsewhere": [torch.ones(1, device="meta")]}.get(kind, [])
        step(x.requires_grad_(kind == "requires grad"), y, *more)
        if kind == "written":
            same(x, before * 0.5)
        assert (x.grad is None) == (kind != "requires grad")
    assert step.captures == 0 and why(step)


def test_arguments_that_are_nan(step_twins):
    """No NaN is equal to another one, so each has to be compared by its bits."""
    step = step_twins.graphed(lambda x, fill: x + torch.full_like(x, fill).nan_to_num(2.0))
    x = torch.ones(2, device=step_twins.device)
    for i in range(8):
        same(step(x, float("nan") if i else 1.0), x + (2.0 if i else 1.0))
    assert step.captures == 1 and step.replays == 5, why(step)


def test_arguments_that_are_conjugated_when_they_are_read(step_twins):
    step = step_twins.graphed(lambda x, y: torch.view_as_real((x * y).resolve_conj()) + y.abs().sum())
    for _ in range(5):
        numbers = torch.randn(2, 4, dtype=torch.complex64, device=step_twins.device)
        x, y = numbers.conj()[0], numbers.conj().imag[1]  # the latter is negated
        same(step(x, y), torch.view_as_real((x * y).resolve_conj()) + y.abs().sum())
    assert step.captures == 1 and step.replays == 3, why(step)


class Rate(float):
    scale = 1.0


class Mode(Enum):
    A = SimpleNamespace(scale=1.0)


def test_arguments_of_classes_of_the_users(step_twins):
    """What they have is compared as well, and so is what their class has."""
    rate, mode = Rate(1.0), Mode.A
    step = step_twins.graphed(lambda x, rate, mode: x * rate.scale * mode.value.scale)
    x = torch.ones(2, device=step_twins.device)
    for owner in (mode.value, rate):
        for scale in (1.0, 2.0):
            owner.scale = scale
            for _ in range(4):
                same(step(x, rate, mode), x * rate.scale * mode.value.scale)
    assert step.captures == 4 and step.replays == 8, why(step)
    assert re.search(r"argument 1 changed from \('value.scale'.*1.0.* to \('value.scale'.*2.0", why(step)), why(step)


def test_arguments_that_are_nested_otherwise(step_twins):
    step = step_twins.graphed(lambda pairs, *rest: sum(pairs) - sum(rest))
    a, b = torch.ones(2, device=step_twins.device), torch.full((2,), 2.0, device=step_twins.device)
    for _ in range(4):
        same(step((a, b)), a + b)
        same(step((a,), b), a - b)
    assert step.captures == 2 and step.replays == 4, why(step)


def test_an_argument_with_a_gradient(step_twins):
    step = step_twins.graphed(lambda x: x if x.grad is None else x + x.grad)
    for i in range(6):
        x = torch.ones(2, device=step_twins.device)
        x.grad = x.clone() if i > 3 else None
        same(step(x), x * (2.0 if i > 3 else 1.0))
    assert step.replays == 2 and "a tensor that has a gradient" in why(step)


@pytest.mark.parametrize("how", ["swapped", "given away"])
def test_gradients_that_get_another_parameter(step_twins, how):
    a, b = (nn.Parameter(torch.ones(2, device=step_twins.device)) for _ in range(2))

    def fn(x):
        b.grad.mul_(0.5) if how == "swapped" else None
        a.grad, b.grad = b.grad, a.grad if how == "swapped" else x + 1.0
        return x * 2.0

    step = step_twins.graphed(fn)
    for i in range(8):
        a.grad, b.grad = torch.full_like(a, i), torch.full_like(a, i + 8.0)
        step(torch.ones_like(a))
        same(a.grad, torch.full_like(a, (i + 8.0) * (0.5 if how == "swapped" else 1.0)))
        same(b.grad, torch.full_like(a, i if how == "swapped" else 2.0))
    assert not step.captures and "the gradient of another one; have it keep a clone" in why(step)


def test_a_gradient_that_somebody_holds_is_there_after_a_capture_that_fails(step_twins):
    weight = nn.Parameter(torch.ones(2, device=step_twins.device))

    def fn(x):
        weight.grad.mul_(2.0)
        return x * float(x.sum())

    step = step_twins.graphed(fn)
    held = weight.grad = torch.ones_like(weight)
    for _ in range(5):
        step(torch.ones(2, device=step_twins.device))
        assert weight.grad is held
    assert not step.captures and torch.equal(held, torch.full_like(held, 32.0)), why(step)


@pytest.mark.parametrize("how", ["of an optimizer", "in a list"])
def test_a_gradient_of_a_tensor_that_requires_none(step_twins, how):
    weight, x = torch.ones(2, device=step_twins.device), torch.ones(2, device=step_twins.device)
    optimizer, weights = torch.optim.SGD([weight], lr=1.0), [weight]

    def fn(x):
        if how == "of an optimizer":
            optimizer.step()
        else:
            for each in weights:
                if each.grad is not None:
                    each.sub_(each.grad)
        return x + 1.0

    step = step_twins.graphed(fn)
    for i in range(8):
        weight.grad = torch.ones_like(weight) if i == 5 else None
        step(x)
        same(weight, x * (0.0 if i >= 5 else 1.0))
    assert step.replays >= 2, why(step)


def test_a_method(step_twins):
    """Each object has a step of its own, as each has a method of its own."""

    class Trainer:
        def __init__(self, by):
            self.by = by

        @step_twins.graphed
        def step(self, x):
            return x * self.by

    class Other(Trainer):
        @step_twins.graphed
        def step(self, x):
            return super().step(x) + 1.0

    x = torch.ones(2, device=step_twins.device)
    for trainer, expected in ((Trainer(2.0), 2.0), (Trainer(3.0), 3.0), (Other(2.0), 3.0)):
        for _ in range(7):  # on Python 3.12 one call more is in Python
            same(trainer.step(x), x * expected)
            same(copy.deepcopy(trainer).step(x), x * expected)
        assert trainer.step is trainer.step and trainer.step.replays >= 2, why(trainer.step)
    assert isinstance(Trainer.step, graphed.GraphedStep) and Trainer.step.calls == 0


def test_a_lazy_module(step_twins):
    """What it has to make yet is no tensor that anybody can look at; nor is that of another one."""
    another = nn.LazyLinear(2)
    model = nn.LazyLinear(3).to(step_twins.device)
    twin = copy.deepcopy(model)

    plain, step = training_step(twin), step_twins.graphed(training_step(model))
    for i in range(8):
        x = step_twins.batch()[0]
        torch.manual_seed(i)
        expected = plain(x)
        torch.manual_seed(i)
        same(step(x), expected.detach())
    same_state(model, twin)
    assert step.replays >= 4 and another.has_uninitialized_params(), why(step)


def test_a_result_that_is_a_gradient(step_twins):
    """A later step adds to the gradient, and so to the result."""
    model, results = step_twins.model(nn.Linear(4, 3)), []

    def fn(x, y):
        cross_entropy(model(x), y).backward()
        return model[0].weight.grad

    step = step_twins.graphed(fn)
    for _ in range(12):
        results.append(step(*step_twins.batch()))
    for result in results:
        same(result, model[0].weight.grad)
    assert step.captures == 0 and "the memory of a gradient" in why(step), why(step)


def test_arguments_that_are_one_tensor(step_twins):
    """A graph for two tensors is not for the same one twice: Python may ask, as attention does."""

    def run(graphed):
        attention = nn.MultiheadAttention(8, 2).to(step_twins.device)
        optimizer = sgd(attention.parameters())
        attention.load_state_dict({k: torch.full_like(v, 0.01) for k, v in attention.state_dict().items()})

        def step(x, y):
            optimizer.zero_grad()
            loss = attention(x, y, y)[0].square().mean() * (2 if x is y else 1)
            loss.backward()
            optimizer.step()
            return loss

        step = graphed(step)
        losses = []
        for i in range(14):
            x = torch.randn(5, 2, 8).to(step_twins.device)
            losses.append(step(x, x if i % 2 else x.clone()).detach())
        return [*losses, *attention.parameters()], step

    step = step_twins.both(run)
    assert step.captures == 2 and step.replays >= 8, why(step)


def test_batches_that_are_views(step_twins):
    """Those of labels begin at another alignment each time."""

    def run(graphed):
        model = step_twins.model()
        step = graphed(usual_step(model))
        x, y = step_twins.batch(64)
        losses = [step(x[i : i + 5], y[i : i + 5]).detach() for i in range(14)]
        return [*losses, *model.parameters()], step

    step = step_twins.both(run)
    assert step.captures == 2 and step.replays >= 8, why(step)


def test_a_batch_that_overlaps_itself_and_another_one(step_twins):
    def run(graphed):
        step = graphed(lambda x: x * 2)
        same, other = torch.randn(2, 1, 4).to(step_twins.device)
        return [step(each) for _ in range(6) for each in (same.expand(5, 4), other)], step

    step = step_twins.both(run)
    assert step.captures == 2, why(step)


# ------------------------------------------------------------------------------------------------------------- results


def test_results_belong_to_the_caller(step_twins):
    kept = {}

    def make(model):
        optimizer = sgd(model.parameters())
        weight = next(model.parameters())

        def step(x, y):
            optimizer.zero_grad()
            logits = model(x)
            loss = cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            return {
                "loss": loss,
                "logits": (logits, logits.argmax(1)),
                "name": "a",
                "weight": weight,
                "x": x[1:],
                "g": weight.grad,
            }

        return step

    def between(i, model, fn, batch):
        kept.setdefault(id(model), []).append(batch)

    step = step_twins.train(make, 8, between)
    assert step.replays >= 4, why(step)
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(make(model))
    results = []
    for _ in range(6):
        x, y = step_twins.batch()
        results.append((result := step(x, y), result["logits"][0].clone(), result["loss"].clone()))
        assert result["weight"].data_ptr() == next(model.parameters()).data_ptr()
        assert result["x"].data_ptr() == x[1:].data_ptr()
    assert step.replays >= 2, why(step)
    for result, logits, loss in results:
        same(result["logits"][0], logits)
        same(result["loss"], loss)
        assert not result["loss"].requires_grad and not result["weight"].requires_grad


@pytest.mark.parametrize("late", [False, True])
def test_sparse_gradients(step_twins, late):
    """One that is left after the step has no address. A graph of CUDA can have one that ends in it."""

    def make():
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=True).to(step_twins.device)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)

        def step(x):
            if not late:
                optimizer.zero_grad()
            embedding(x).square().mean().backward()
            optimizer.step()
            if late:
                optimizer.zero_grad()

        return step, embedding.weight

    (plain, expected), (step, weight) = make(), make()
    step = step_twins.graphed(step)
    for i in range(5):
        x = torch.tensor([i, 3, 3], device=step_twins.device)
        plain(x)
        step(x)
        assert torch.equal(weight, expected)
    if late and step_twins.device == "cuda":
        assert step.replays == 3
    else:
        assert step.captures == 0 and "torch.sparse_coo, which has no address" in why(step), why(step)
        assert late or re.search(r"the gradient of \S+\.weight is a .* as nn\.Embedding\(", why(step)), why(step)


def test_a_capture_that_fails_has_printed(step_twins, capsys):
    def step(x, y):
        print("here")
        return x.sum().item()

    step, printed = step_twins.graphed(step), []
    for _ in range(3):
        step(*step_twins.batch())
        printed.append(capsys.readouterr().out.count("here"))
    assert printed == [1, 2, 1] and step.captures == 0, why(step)


def test_an_exception_passes_through(step_twins):
    model = step_twins.compiled(step_twins.model())
    fail = []
    inner = usual_step(model)

    def step(x, y):
        if fail:
            raise ValueError("as asked")
        return inner(x, y)

    step = step_twins.graphed(step)
    for _ in range(5):
        step(*step_twins.batch())
    fail.append(1)
    with pytest.raises(ValueError, match="as asked"):
        step(*step_twins.batch())
    fail.clear()
    replays = step.replays
    step(*step_twins.batch())
    assert step.replays == replays + 1


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_exception_of_a_replay_has_a_note():
    step = graphed_step(lambda x, i: (x * 2)[i], backend="tape")
    for _ in range(4):
        step(torch.ones(2), torch.tensor([1]))
    assert step.replays
    with pytest.raises(IndexError) as caught:
        step(torch.ones(2), torch.tensor([2]))
    (note,) = caught.value.__notes__
    assert note.startswith("A replay of the graph of the step <lambda> raised this. One launch runs the whole step")
    assert "call <lambda> without graphed_step()" in note
    assert "; 1 capture; 1 replay raised an error" in str(explain(step)).partition("\n")[0]
    assert step.calls == step.replays + step.captures + sum(step.in_python.values()) + step.raised


@pytest.mark.parametrize("value", [0.5, "tensor"], ids=["number", "tensor"])
def test_what_a_mask_writes(step_twins, device, value):
    """A number is filled in where the mask is; a tensor's elements are placed after the mask was read on the host."""
    value = torch.tensor([0.5], device=device) if value == "tensor" else value

    def fn(x):
        x = x.clone()
        x[x > 0] = value
        x[:, x[0] < 0] = value
        return x

    step = step_twins.graphed(fn)
    for _ in range(5):
        x, _ = step_twins.batch()
        same(step(x.clone()), fn(x))
    assert step.replays == 3 * isinstance(value, float), step.in_python


# ----------------------------------------------------------------------------------------------- what people also write


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.nightly_after(1)
def test_scaler(step_twins, dtype):
    def make(model):
        optimizer = adamw(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(step_twins.device, init_scale=2.0**8, growth_interval=3)

        def step(x, y):
            optimizer.zero_grad()
            with torch.autocast(step_twins.device, dtype, enabled=dtype is not None):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss, scaler._scale.clone()

        return step

    def between(i, model, fn, batch):
        if i == 7:
            with torch.no_grad():
                next(model.parameters())[0, 0] = float("inf")
        if i == 8:
            with torch.no_grad():
                next(model.parameters())[0, 0] = 0.5

    step = step_twins.train(make, 16, between)
    assert step.captures == 1 and step.replays >= 10, why(step)


def test_a_scaler_and_micro_batches(step_twins):
    """A capture leaves tensors in the scaler's old state, which nothing but the state of its graph refers to then."""

    def run(graphed):
        torch.manual_seed(0)
        trainer = SimpleNamespace(model=step_twins.model())
        trainer.optimizer = adamw(trainer.model.parameters(), lr=0.01)
        trainer.scaler = torch.amp.GradScaler(step_twins.device, init_scale=2.0**8, growth_interval=3)

        def step(x, y, is_last):
            loss = cross_entropy(trainer.model(x), y) / 2
            trainer.scaler.scale(loss).backward()
            trainer.total += loss.detach()
            if is_last:
                trainer.scaler.unscale_(trainer.optimizer)
                nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
                trainer.scaler.step(trainer.optimizer)
                trainer.scaler.update()
                trainer.optimizer.zero_grad()
            return loss

        step, found = graphed(step), []
        for i in range(24):
            if i % 8 == 0:
                trainer.total = torch.zeros((), device=step_twins.device)
            found.append(step(*step_twins.batch(5 if i % 8 < 7 else 3), i % 2 == 1).detach())
            found.append(trainer.total.clone())
            found.append([each.detach().clone() for each in trainer.model.parameters()])
            found.append(torch.tensor(trainer.scaler.get_scale()))
        return found, step

    step = step_twins.both(run)
    assert step.captures <= 5 and step.replays >= 10, why(step)


def test_anomaly_detection(step_twins):
    """No replay looks for NaN."""
    model, (x, y) = step_twins.model(), step_twins.batch()
    step = step_twins.graphed(usual_step(model))
    for _ in range(5):
        step(x, y)
    replays = step.replays
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan"):
        step(x * float("nan"), y)
    assert step.captures == 1 and step.replays == replays > 0


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.nightly_after(1)
def test_autocast(step_twins, outside):
    def make(model):
        def call(x):
            enabled = not outside or torch.is_autocast_enabled(step_twins.device)
            with torch.autocast(step_twins.device, torch.bfloat16, enabled=enabled):
                return model(x)

        return usual_step(model, compiled=call)

    def train(model, wrap):
        torch.manual_seed(3)
        step, losses = wrap(make(model)), []
        for i in range(9):
            with torch.autocast(step_twins.device, torch.bfloat16, enabled=outside and i % 3 != 2):
                losses.append(step(*step_twins.batch()).detach())
        return losses, step

    model = step_twins.model()
    twin = thunder.jit(copy.deepcopy(model))
    model = step_twins.compiled(model)
    losses, step = train(model, step_twins.graphed)
    same(losses, train(twin, lambda fn: fn)[0])
    same_state(model, twin)
    assert step.replays >= 3, why(step)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_a_model_that_is_not_compiled(step_twins, inside):
    """Its cache has weights as they were when they were cast first, so a loop in one autocast goes on with those."""
    autocast = partial(torch.autocast, step_twins.device, torch.bfloat16)

    def run(graphed):
        model = step_twins.model()

        def call(x):
            with autocast(enabled=inside or torch.is_autocast_enabled(step_twins.device)):
                return model(x)

        step = graphed(usual_step(model, compiled=call))
        with nullcontext() if inside else autocast():
            losses = [step(*step_twins.batch()).detach() for _ in range(9)]
        return [*losses, *model.parameters()], step

    step = step_twins.both(run)
    if inside:
        assert step.replays >= 5, why(step)
    else:
        assert step.captures == 0 and "0.weight as it was cast before; enter it in the step alone" in why(step)


def test_moving_average_and_two_models(step_twins):
    def make(model):
        other = nn.Linear(4, 3).to(step_twins.device)
        for parameter, value in zip(other.parameters(), (0.1, 0.2)):
            nn.init.constant_(parameter, value)
        average = copy.deepcopy(other)
        first, second = sgd(model.parameters()), adamw(other.parameters())

        def step(x, y):
            first.zero_grad()
            loss = cross_entropy(model(x) + other(x).detach(), y)
            loss.backward()
            first.step()
            second.zero_grad()
            adversary = cross_entropy(model(x).detach() - other(x), y)
            adversary.backward()
            second.step()
            with torch.no_grad():
                for mean, value in zip(average.parameters(), other.parameters()):
                    mean.lerp_(value, 0.1)
            return loss, adversary, average(x)

        return step

    step = step_twins.train(make, 9)
    assert step.captures == 1 and step.replays >= 5, why(step)


def test_methods_and_micro_batches_inside(step_twins):
    class Trainer:
        def __init__(self, model):
            self.model, self.optimizer, self.parts, self.epoch = model, sgd(model.parameters()), 2, 0

        def loss(self, x, y):
            return cross_entropy(self.model(x), y) / self.parts

        def step(self, x, y):
            self.optimizer.zero_grad()
            losses = []
            for part in zip(x.chunk(self.parts), y.chunk(self.parts)):
                losses.append(self.loss(*part))
                losses[-1].backward()
            self.optimizer.step()
            return torch.stack(losses).sum()

    def between(i, model, fn, batch):
        fn.__self__.epoch += 1  # which the step does not read

    step = step_twins.train(lambda model: Trainer(model).step, 9, between)
    assert step.captures == 1 and step.replays >= 5, why(step)


def test_parameters_that_are_frozen_now_and_then(step_twins):
    """Where a graph was captured while they had no gradient, it drops the gradient that they have later."""

    def run(graphed):
        model = step_twins.model()
        step, found = graphed(usual_step(model)), []
        for i in range(15):
            for parameter in model[0].parameters():
                parameter.requires_grad_(5 <= i < 9)
            if i in (3, 12, 14):  # somebody else has made one
                model[0].weight.grad = torch.ones_like(model[0].weight)
            found += [step(*step_twins.batch()).detach(), model[0].weight.grad is None]
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 4, why(step)


def test_checkpoint_and_resume(step_twins):
    saved = {}

    def between(i, model, fn, batch):
        if i == 5:
            saved[id(model)] = copy.deepcopy((model.state_dict(), fn.optimizer.state_dict(), torch.get_rng_state()))
        if i == 8:
            weights, state, generator = saved[id(model)]
            model.load_state_dict(weights)
            fn.optimizer.load_state_dict(copy.deepcopy(state))
            torch.set_rng_state(generator)

    step = step_twins.train(usual_step, 14, between)
    assert step.replays >= 6, why(step)


def test_a_tensor_of_no_numbers_is_no_copy(step_twins):
    """As caches of keys and values begin."""
    step = step_twins.graphed(lambda x: torch.cat([torch.tensor([], device=x.device), x]) * 2)
    for i in range(4):
        same(step(torch.full((2,), float(i), device=step_twins.device)).tolist(), [2.0 * i] * 2)
    assert step.replays >= 2, why(step)


def test_a_zero_has_a_sign(step_twins):
    step = step_twins.graphed(lambda x, scale: x * scale)
    x = torch.ones(2, device=step_twins.device)
    for _ in range(4):
        assert [step(x, scale).signbit().tolist() for scale in (0.0, -0.0)] == [[False] * 2, [True] * 2]
    assert step.replays >= 3, why(step)


def test_a_step_that_reads_nothing_from_outside(step_twins):
    step = step_twins.graphed(lambda x, y: x * 2 + y[:, None])
    for _ in range(4):
        x, y = step_twins.batch()
        same(step(x, y), x * 2 + y[:, None])
    assert step.replays == 2, why(step)


def test_a_step_without_gradients(step_twins):
    model = step_twins.compiled(step_twins.model()).eval()

    @torch.no_grad()
    def evaluate(x, y):
        return cross_entropy(model(x), y)

    step = step_twins.graphed(evaluate)
    for _ in range(5):
        x, y = step_twins.batch()
        same(step(x, y), evaluate(x, y))
    assert step.replays >= 3, why(step)


def test_a_model_of_thunderfx(step_twins):
    """Dynamo has left fake tensors behind, and its code runs in the capture."""
    model = step_twins.model()
    twin = copy.deepcopy(model)
    step = step_twins.graphed(usual_step(model, compiled=thunderfx(model, backend=step_twins.backend)))
    plain = usual_step(thunder.jit(twin))
    results = []
    for each in (step, plain):
        torch.manual_seed(3)
        results.append([each(*step_twins.batch()).detach() for _ in range(8)])
    same(*results)
    assert step.captures == 1 and step.replays >= 4, why(step)


def test_a_model_that_is_not_compiled(step_twins):
    model = step_twins.model(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    step, plain = step_twins.graphed(usual_step(model)), usual_step(twin)
    for _ in range(6):
        batch = step_twins.batch()
        same(step(*batch), plain(*batch).detach())
    same_state(model, twin)
    assert step.replays >= 2, why(step)


def test_what_is_installed():
    for module in (torch, thunder, graphed_step):
        file = getattr(module, "__file__", None) or module.__code__.co_filename
        assert is_installed(file), file
    assert is_installed("/other/venv/lib/python3.12/site-packages/tool/main.py") and not is_installed(__file__)


def test_a_module_that_is_swapped(step_twins):
    def train(model, wrap):
        torch.manual_seed(3)
        step, losses = wrap(usual_step(model)), []
        for i in range(12):
            if i == 6:
                model[1] = nn.Sigmoid()
            losses.append(step(*step_twins.batch()).detach())
        return step, losses

    model = step_twins.model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    _, expected = train(copy.deepcopy(model), lambda step: step)
    step, found = train(model, step_twins.graphed)
    same(found, expected)
    assert step.captures == 2 and step.replays >= 6 and "changed from Tanh to Sigmoid" in why(step), why(step)


def test_options_are_checked(step_twins):
    def step():
        return None

    for options, said in (
        ({"max_recordings": 0}, "max_recordings"),
        ({"memory_budget": 1.5}, "memory_budget"),
        ({"backend": "gpu"}, "backend"),
        ({"optimizers": [1]}, "optimizers"),
        ({"optimizers": nn.Linear(1, 1)}, "optimizers"),
        ({"modules": [1]}, "modules"),
        ({"modules": None}, "modules"),
    ):
        with pytest.raises(OptionError, match=rf"graphed_step\({said}="):
            graphed_step(step, **options)
    for wrong in (3, graphed_step(step)):
        with pytest.raises(OptionError, match="a function"):
            graphed_step(wrong)


def test_recordings_are_bounded(step_twins):
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(usual_step(model), max_recordings=2)
    for size in (2, 3, 4, 5):
        for _ in range(4):
            step(*step_twins.batch(size))
    assert (len(step.recordings), step.captures) == (2, 4), why(step)


@pytest.mark.nightly
def test_what_was_not_used_for_longest_goes_first(step_twins):
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(usual_step(model), max_recordings=2)
    for size in (2, 2, 2, 3, 3, 2, 4, 4, 2, 2):
        step(*step_twins.batch(size))
    assert step.captures == 3, why(step)


@pytest.mark.nightly
def test_graphs_that_are_in_use_stay(step_twins):
    """Three sizes take turns. To capture each anew for the next one would cost more than it saves."""
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(usual_step(model), max_recordings=2)
    for i in range(24):
        step(*step_twins.batch(2 + i % 3))
    assert step.captures == 2 and step.replays >= 10, why(step)
    assert "all 2 graphs were replayed since the last call of this kind; raise max_recordings" in why(step)
    for _ in range(4):
        step(*step_twins.batch(2))
    assert step.captures == 3, why(step)


class Holder(nn.Module):
    """A module that holds the step that trains it."""

    def __init__(self, graphed):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.step = graphed(self.take)

    def take(self, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.net(x), y)
        loss.backward()
        self.optimizer.step()
        return loss


def test_a_copy_of_what_holds_a_step(step_twins, device):
    holder = Holder(step_twins.graphed).to(device)
    batch = step_twins.batch()
    for _ in range(4):
        holder.step(*batch)
    copied = copy.deepcopy(holder)
    for _ in range(4):
        holder.step(*batch)
    assert copied.step.calls == 0 and not torch.equal(copied.net.weight, holder.net.weight)
    for _ in range(4):
        copied.step(*batch)
    assert torch.equal(copied.net.weight, holder.net.weight)
    assert copied.step.replays >= 2 and copied.step is not holder.step, why(copied.step)


def test_inference_mode(step_twins, device):
    weight, twin = torch.ones(3, device=device), torch.ones(3, device=device)

    def of(weight, x):
        with torch.inference_mode():
            weight.add_(x.sum())
            return weight * 2

    step = step_twins.graphed(lambda x: of(weight, x))
    for i in range(5):
        x = torch.full((3,), float(i), device=device)
        assert torch.equal(step(x), of(twin, x)) and torch.equal(weight, twin)
    assert step.replays == 3, why(step)
    with torch.inference_mode():
        weight = torch.ones(3, device=device)
    step(x), step(x)
    assert any("made in inference mode" in reason for reason in step.in_python)


@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode_around_the_step(step_twins, made_inside):
    """It may write to its own tensors, and to no argument."""

    def run(graphed):
        model, total = step_twins.model(), torch.zeros((), device=step_twins.device)

        def evaluate(x, y):
            loss = cross_entropy(model(x), y)
            total.add_(loss)
            return loss

        def spoil(x):
            return x.add_(1)

        step, broken, results = graphed(evaluate), graphed(spoil), []
        for _ in range(6):
            batch = step_twins.batch()
            with torch.inference_mode():
                x, y = (each.clone() for each in batch) if made_inside else batch
                results += [step(x, y), broken(x).clone(), x.clone()]
        return [*results, total], (step, broken)

    step, broken = step_twins.both(run)
    assert step.replays == 4, why(step)
    assert not broken.replays and "the step writes to an argument" in why(broken), why(broken)


@pytest.mark.parametrize("is_read", [False, True], ids=["captured", "refused"])
def test_what_a_step_has_used_goes_with_it(step_twins, is_read):
    """Reference counting frees it, and no garbage collection has to come before."""

    def run():
        model = step_twins.model()
        optimizer = sgd(model.parameters())

        def train(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item() if is_read else loss

        step = step_twins.graphed(train)
        for _ in range(6):
            step(*step_twins.batch())
        assert step.captures == (not is_read), why(step)
        return [*map(weakref.ref, (model, optimizer, *model.parameters()))]

    with without_garbage_collection():
        assert not [each() for each in run() if each() is not None]


def test_a_step_does_not_keep_the_graphs_of_its_modules(step_twins):
    """The step holds the whole iteration, so the regions of its module have no arenas."""
    model = step_twins.compiled(step_twins.model())
    step = step_twins.graphed(usual_step(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(6):
            step(*step_twins.batch())
    assert step.replays == 3
    assert [region["captures"] for region in regions(model)] == [0, 0]
