"""What is said about a step that runs in Python is true, and to follow it helps."""

from __future__ import annotations

import random
import re
import types
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils._pytree import register_pytree_node, tree_leaves
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain
from thunder_cg.compat.settings import Settings, names_of_settings
from thunder_cg.step import fixes
from thunder_cg.step.facts import Difference, Same

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")


@pytest.fixture
def run(step_twins):
    """Calls a step of a linear layer ten times; returns the step and its warnings."""

    def run(make, optimizer=torch.optim.SGD, between=lambda step, i: None, calls=10, **options):
        model = nn.Linear(4, 4, bias=False).to(step_twins.device)
        optimizer = optimizer(model.parameters(), **{"lr": 0.01, **options})
        inner = make(model, optimizer)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            inner(loss)
            return loss

        step.optimizer = optimizer
        graphed = step_twins.graphed(step)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for i in range(calls):
                graphed(torch.ones(3, 4, device=step_twins.device))
                between(step, i)
        return graphed, [str(each.message) for each in said if "graphed_step" in str(each.message)]

    return run


def plain(model, optimizer):
    def inner(loss):
        loss.backward()
        optimizer.step()

    return inner


RATE, RATES = "a tensor", "two tensors"
READS = "the optimizer reads its state on the host; "
OTHER = "take another optimizer than {}, such as AdamW with fused=True"
ON_CPU = {
    "SGD": ({"lr": RATE}, "make SGD with fused=True", {"lr": RATE, "fused": True}),
    "Adagrad": ({"lr": RATE}, "make Adagrad with fused=True", {"lr": RATE, "fused": True}),
    "Adam": ({}, "make Adam with fused=True", {"fused": True}),
    "AdamW": ({"foreach": True}, "make AdamW with fused=True", {"fused": True}),
    "RMSprop": ({"lr": RATE}, "keep the learning rate of RMSprop a number", {}),
    "Adadelta": ({"lr": RATE}, "keep the learning rate of Adadelta a number", {}),
    "Adamax": ({"lr": RATE}, OTHER.format("Adamax"), None),
    "NAdam": ({}, OTHER.format("NAdam"), None),
    "AdamW, betas": ({"fused": True, "betas": RATES}, "keep the betas of AdamW numbers", {"fused": True}),
    "SGD, momentum": ({"momentum": RATE, "fused": True}, "keep the momentum of SGD a number", {"momentum": 0.9}),
}


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.nightly_after(2)
def test_optimizers_that_read_on_the_host(run, backend, name):
    if backend == "cuda":
        pytest.skip("on a GPU others read on the host")
    options, fix, followed = ON_CPU[name]
    kind = getattr(torch.optim, name.partition(",")[0])

    def with_rate(options):
        options = options | {name: torch.tensor(0.01) for name, value in options.items() if value is RATE}
        return options | ({"betas": (torch.tensor(0.9), torch.tensor(0.99))} if options.get("betas") is RATES else {})

    step, said = run(plain, kind, **with_rate(options))
    assert step.replays == 0 and len(said) == 1 and said[0].endswith(f"{READS}{fix}"), said
    if followed is not None:
        step, said = run(plain, kind, **with_rate(followed))
        assert step.replays >= 6 and not said, said


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("SGD", "make SGD with fused=True"),
        ("AdamW", "make AdamW with fused=True, capturable=True"),
        ("RMSprop", "make RMSprop with capturable=True"),
        ("Adagrad", "take another optimizer than Adagrad, such as AdamW with fused=True, capturable=True"),
        ("SparseAdam", f"{OTHER.format('SparseAdam')}, capturable=True; {fixes.DENSE}"),
    ],
)
def test_optimizers_on_a_gpu(monkeypatch, name, fix):
    monkeypatch.setattr(fixes, "_is_on_gpu", lambda optimizer: True)
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(1))])
    facts = {"optimizer": Same(optimizer)}
    change = Difference("optimizer.state[0]['step'] (version)", 1, 2)
    assert fixes.fix_of_change(change, facts, {}, in_step=True) == f"{READS}{fix}"
    rate, momentum = (Difference(f"optimizer.param_groups[0]['{key}']", 1, 2) for key in ("lr", "momentum"))
    said = [fixes.fix_of_change(each, facts, {}, in_step=False) for each in (rate, momentum)]
    if name in ("SGD", "AdamW"):
        assert said == [f"{fix}, whose kernels take numbers that change"] * 2
    else:
        assert said == [f"{fixes._RATE}, and {fix}", fixes._CONSTANT]


def scaled(model, optimizer, after=lambda scaler: None):
    device = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(device, init_scale=2.0)

    def inner(loss):
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after(scaler)

    return inner


def clipped(model, optimizer, **options):
    def inner(loss):
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, **options)
        optimizer.step()

    return inner


def watched(model, optimizer, *, check_nan):
    def inner(loss):
        with torch.autograd.set_detect_anomaly(True, check_nan=check_nan):
            loss.backward()
        optimizer.step()

    return inner


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_reads_gradients(run, backend):
    step, (said,) = run(partial(watched, check_nan=True))
    assert step.replays == 0 and (backend == "cuda" or "set_detect_anomaly does, unless check_nan=False" in said), said
    step, said = run(partial(watched, check_nan=False))
    assert step.replays and not said


def test_clipping_that_looks_whether_the_norm_is_finite(run, backend):
    step, (said,) = run(partial(clipped, error_if_nonfinite=True))
    assert step.replays == 0 and (backend == "cuda" or "pass error_if_nonfinite=False" in said), said
    step, said = run(clipped)
    assert step.replays >= 6 and not said, said


def test_a_scaler_needs_a_fused_optimizer(run, device):
    step, (said,) = run(scaled)
    assert step.replays == 0 and said.endswith("unless the optimizer is fused; make SGD with fused=True"), said
    step, said = run(scaled, fused=True)
    assert step.replays >= 6 and not said, said
    _, (said,) = run(scaled, torch.optim.RMSprop, **({"capturable": True} if device == "cuda" else {}))
    assert "take another optimizer than RMSprop, such as AdamW with fused=True" in said, said


def test_a_scale_that_the_step_reads(run):
    step, (said,) = run(partial(scaled, after=torch.amp.GradScaler.get_scale), fused=True)
    assert step.replays == 0 and "call get_scale() outside of the step" in said, said


def test_a_scaler_that_is_updated_outside_of_the_step(run, device):
    """Between `step` and `update`, it notes in Python what it has done."""
    scaler = torch.amp.GradScaler(device, init_scale=2.0)

    def unfinished(model, optimizer):
        def inner(loss):
            scaler.scale(loss).backward()
            scaler.step(optimizer)

        return inner

    step, (said,) = run(unfinished, between=lambda step, i: scaler.update(), fused=True)
    assert step.replays == 0 and "(see test_fixes.py:" in said and said.endswith("call update() in the same step"), said


def test_a_learning_rate_that_is_another_tensor_each_time(run, device):
    def replace(step, i):
        step.optimizer.param_groups[0]["lr"] = torch.tensor(0.1 / (i + 1), device=device)

    def fill(step, i):
        step.optimizer.param_groups[0]["lr"].fill_(0.1 / (i + 1))

    options = {"lr": torch.tensor(0.1, device=device), "fused": True}
    step, (said,) = run(plain, between=replace, **options)
    assert step.replays == 0 and said.endswith("write it into the tensor that is there, as in group['lr'].fill_(rate)")
    step, said = run(plain, between=fill, **options)
    assert step.replays >= 6 and not said, said


def test_an_optimizer_that_steps_outside(step_twins):
    """Its closure is a graph, if the closure does not name it."""

    def of(clears):
        def run(graphed):
            model = nn.Linear(4, 4).to(step_twins.device)
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
            owner = {"model": model, "optimizer": optimizer}[clears]

            def closure(x):
                owner.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            step, losses = graphed(closure), []
            for _ in range(8):
                x = step_twins.batch()[0]
                losses.append(optimizer.step(lambda x=x: step(x)))
            return [*losses, *model.parameters()], step

        return step_twins.both(run)

    assert "clear gradients in the step by model.zero_grad()" in str(of("optimizer").in_python)
    assert of("model").replays >= 12


@pytest.mark.parametrize("kind", ["FakeQuantize", "FusedMovingAvgObsFakeQuantize"])
def test_fake_quantization(run, backend, kind):
    quantization = torch.ao.quantization

    def quantized(model, optimizer):
        quantize = getattr(quantization, kind)(quantization.MovingAverageMinMaxObserver, 0, 255).to(model.weight.device)

        def inner(loss):
            quantize(loss).backward()
            optimizer.step()

        return inner

    step, said = run(quantized)
    is_fused = kind.startswith("Fused")
    assert (step.replays >= 6) == is_fused and said[1:] == [] and is_fused != bool(said), said
    assert is_fused or "take FusedMovingAvgObsFakeQuantize" in said[0], said


def on(device, what):
    """A step that does something with its loss before the backward; ``ones`` were made before it."""

    def make(model, optimizer):
        ones = torch.ones(2, device=device)

        def inner(loss):
            loss = loss + what(loss.detach() * ones, ones)
            loss.backward()
            optimizer.step()

        return inner

    return make


@pytest.mark.parametrize(
    ("what", "fix", "instead"),
    [
        (
            lambda y, ones: torch.as_tensor([1.0, 2.0], device=y.device).sum(),
            "a tensor is made of Python's numbers there; make it before the step",
            lambda y, ones: ones.sum(),
        ),
        (
            lambda y, ones: y[y > 0].mean(),
            "the number of elements depends on values; torch.where(mask, x, 0.0), with mask.unsqueeze(-1) for rows, in "
            "the place of x[mask]: it keeps the shape of x, with zeros where x[mask] has nothing; a bias makes them "
            "other numbers, so mask once more before a sum, and a mean divides it by mask.sum()",
            lambda y, ones: torch.where(y > 0, y, 0).sum() / (y > 0).sum(),
        ),
        (
            lambda y, ones: float(y.sum()),
            "the host reads a value there; return the 0-dim tensor, and read it after the call",
            lambda y, ones: y.sum(),
        ),
        (
            lambda y, ones: sum(y.tolist()),
            "return the tensor, and read it outside of the step",
            lambda y, ones: y.sum(),
        ),
        (
            lambda y, ones: float(y.cpu().numpy().sum()),
            "return the tensor, and read it outside of the step",
            lambda y, ones: y.sum(),
        ),
        (
            lambda y, ones: torch.cond(y.sum() > 0, lambda y: y.sum(), lambda y: 2 * y.sum(), (y,)),
            "take torch.where(condition, a, b), which computes both",
            lambda y, ones: torch.where(y.sum() > 0, y.sum(), 2 * y.sum()),
        ),
    ],
    ids=["numbers", "a mask", "a value", "a list", "an array", "torch.cond"],
)
@pytest.mark.nightly_after(2)
def test_what_no_graph_can_hold(run, backend, device, what, fix, instead):
    step, (said,) = run(on(device, what))
    assert step.replays == 0 and "at test_fixes.py:" in said, said
    assert backend == "cuda" or said.endswith(fix), said
    step, said = run(on(device, instead))
    assert step.replays >= 6 and not said, said


CLASSES = torch.tensor([1, 0, 2])


def classes_of(y):
    return CLASSES.to(y.device) if y.device.type == "cpu" else torch.arange(3, device=y.device)


def checks(y, ones):
    assert torch.isfinite(y).all()
    return y.sum()


def raises(y, ones):
    if torch.isnan(y).any():
        raise ValueError("not a number")
    return y.sum()


def writes_where(y, ones):
    y = y.clone()
    y[y > 9] = y.mean()
    return y.sum()


def packs(y, ones):
    x = y.expand(2, 2)[:, :, None]
    packed = nn.utils.rnn.pack_padded_sequence(x, [2, 1], batch_first=True)
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0].sum()


def says(y, ones):
    said = f"{y.sum():.3f}"
    return y.sum() * bool(said)


def loses(y, ones):
    targets, lengths = torch.ones(4, dtype=torch.int32, device=y.device), (3, 2)
    lengths = [torch.full((2,), each, device=y.device) for each in lengths]
    return nn.functional.ctc_loss(y.sum().expand(3, 2, 4).log_softmax(-1), targets, *lengths)


@pytest.mark.parametrize(
    ("what", "fix", "instead"),
    [
        (
            lambda y, ones: nn.functional.one_hot(classes_of(y)).sum() * y.sum(),
            fixes._ONE_HOT,
            lambda y, ones: (classes_of(y)[:, None] == torch.arange(3, device=y.device)).long().sum() * y.sum(),
        ),
        (loses, fixes._CTC, lambda y, ones: y.sum()),
        (packs, fixes.PADDED, lambda y, ones: (y * ones).sum()),
        (lambda y, ones: torch.histc(y, 4).sum(), fixes._HISTC, lambda y, ones: torch.histc(y, 4, -9, 9).sum()),
        (
            lambda y, ones: torch.unique(classes_of(y)).sum() * y.sum(),
            "compute with a fixed size and a mask, or call it outside of the step",
            lambda y, ones: y.sum(),
        ),
        (
            lambda y, ones: torch.bincount(classes_of(y)).sum() * y.sum(),
            "(x[:, None] == torch.arange(n)).sum(0) in the place of bincount",
            lambda y, ones: (classes_of(y)[:, None] == torch.arange(3, device=y.device)).sum() * y.sum(),
        ),
        (writes_where, fixes._PUT, lambda y, ones: torch.where(y > 9, y.mean(), y).sum()),
        (
            lambda y, ones: y[(y > 0).nonzero().flatten()].sum(),
            "and a mean divides it by mask.sum()",
            lambda y, ones: y[(y > 0).nonzero_static(size=2).flatten()].sum(),
        ),
        (checks, "return the condition as a 0-dim tensor, and check it after the call", lambda y, ones: y.sum()),
        (raises, "return the condition as a 0-dim tensor, and check it after the call", lambda y, ones: y.sum()),
        (says, "and log or keep what it holds after the call", lambda y, ones: y.sum()),
        (
            lambda y, ones: y[: classes_of(y).max()].sum(),
            "compute with all elements, and mask the rest, before layers that mix positions, too",
            lambda y, ones: torch.where(torch.arange(2, device=y.device) < classes_of(y).max(), y, 0).sum(),
        ),
    ],
    ids=[
        "one_hot",
        "ctc_loss",
        "packed",
        "histc",
        "unique",
        "bincount",
        "put",
        "nonzero",
        "assert",
        "raise",
        "text",
        "slice",
    ],
)
@pytest.mark.nightly_after(4)
def test_functions_that_read_on_the_host(run, backend, device, what, fix, instead):
    if what is packs and backend == "cuda":
        pytest.skip("the lengths are constant, and it reads nothing else")
    step, (said,) = run(on(device, what))
    assert step.replays == 0 and "at test_fixes.py:" in said, said
    assert backend == "cuda" or said.endswith(fix), said
    step, said = run(on(device, instead))
    assert step.replays >= 6 and not said, said


def count(kept, loss):
    kept.count += 1


_KEEP = "do that outside of the step, or keep it in a tensor on the device that the step writes in place"


def append(kept, loss):
    if len(kept.losses) < 100:
        kept.losses.append(loss.detach())


@pytest.mark.parametrize(
    ("keep", "change", "fix", "instead"),
    [  # of a tensor, += writes in place
        (count, "kept.count", f"{_KEEP}; {fixes._COUNTED}", count),
        (append, "len(kept.losses)", "return what it adds, and add that outside of the step", lambda kept, loss: None),
    ],
)
def test_what_python_keeps(run, device, keep, change, fix, instead):
    def keeping(keep, number):
        def make(model, optimizer):
            kept = types.SimpleNamespace(count=number, losses=[])

            def inner(loss):
                loss.backward()
                optimizer.step()
                keep(kept, loss)

            return inner

        return make

    step, (said,) = run(keeping(keep, 0))
    assert step.replays == 0 and f"{change} changed from" in said and said.endswith(f", in each step; {fix}"), said
    assert " (see test_fixes.py:" in said
    step, said = run(keeping(instead, torch.zeros((), device=device)))
    assert step.replays >= 6 and not said, said


_seen = 0


def test_what_the_step_only_adds_to_goes_on_counting(step_twins):
    def adds(x):
        global _seen
        _seen = x.size(0) + _seen
        return x * 2

    def adds_to_it(x):
        global _seen
        _seen += x.size(0)
        return x * 2

    x = torch.ones(3, device=step_twins.device)
    broken, mended = map(step_twins.graphed, (adds, adds_to_it))
    with pytest.warns(UserWarning, match=r"only adds to, as self\.n \+= x\.size\(0\)$"):
        [broken(x) for _ in range(10)]
    before = _seen
    [mended(x) for _ in range(8)]
    assert broken.replays == 0 and mended.replays >= 6 and _seen == before + 24
    (said,) = explain(broken).in_python
    assert " in each step; " in said, "once, although the first calls had it that it is in the step"


def test_all_that_a_trainer_keeps_is_said(step_twins):
    class Trainer:
        steps, rate, last = 0, 0.9, 0.0

        def step(self, x):
            self.rate = self.rate * 0.9
            self.last = float(self.steps)
            self.steps = self.steps + 1
            return x * self.rate

    graphed = step_twins.graphed(Trainer().step)
    with pytest.warns(UserWarning, match="in each step") as found:
        [graphed(torch.ones(3, device=step_twins.device)) for _ in range(8)]
    said = str(found[-1].message)
    assert all(f"self.{name} " in said for name in ("steps", "rate", "last")) and said.endswith(" changed, too"), said


def test_later_reads_on_the_host_are_said_at_once(step_twins):
    def reads(x):
        first = x.sum().item()
        second = float(x.max())
        item = x.min().tolist()
        return x * first * second * item

    step = step_twins.graphed(reads)
    [step(torch.ones(3, device=step_twins.device)) for _ in range(4)]
    line = reads.__code__.co_firstlineno + 1
    (said,) = (each for each in step.in_python if f"test_fixes.py:{line} " in each)
    assert said.endswith(f"; so do test_fixes.py:{line + 1} and test_fixes.py:{line + 2}, if it is of a tensor"), said


def test_what_the_loop_decides(step_twins):
    """A counter of the loop's that the step reads."""
    trainer = types.SimpleNamespace(steps=0)
    decides = step_twins.graphed(lambda x, scales: x * 2 if trainer.steps % 3 == 0 else x)
    is_told = step_twins.graphed(lambda x, scales: x * 2 if scales else x)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for trainer.steps in range(20):
            decides(torch.ones(2, device=step_twins.device), False)
            is_told(torch.ones(2, device=step_twins.device), trainer.steps % 3 == 0)
    (said,) = [str(each.message) for each in found if "graphed_step" in str(each.message)]
    assert "let the loop decide by it, and pass what it decides as an argument, such as True" in said, said
    assert decides.replays == 0 and is_told.replays >= 14, is_told.in_python


@pytest.mark.parametrize(
    ("how", "fix"),
    [
        (lambda m: m.weight.register_hook(lambda g: g), "; remove it, and do in the step what it does"),
        (
            lambda m: _of_all.append(nn.modules.module.register_module_forward_hook(lambda *_: None)),
            ", which runs Python in each step; remove it, and do in the step what it does",
        ),
        (lambda m: prune.identity(m, "weight"), "take torch.nn.utils.parametrize with a module that multiplies by"),
    ],
)
def test_what_to_do_about_hooks(run, device, how, fix):
    def make(model, optimizer):
        layer = nn.Linear(4, 4, device=device)
        how(layer)

        def inner(loss):
            (loss * layer(model.weight).sum()).backward()
            optimizer.step()

        return inner

    step, (said, *_) = run(make)
    while _of_all:
        _of_all.pop().remove()
    assert step.replays == 0 and fix in said, said


_of_all = []  # hooks of all modules


def test_tensors_that_no_graph_can_have(step_twins):
    sparse = torch.eye(3, device=step_twins.device).to_sparse()
    dense = sparse.to_dense()
    step, followed = step_twins.graphed(lambda x: sparse @ x), step_twins.graphed(lambda x: dense @ x)
    for _ in range(4):
        x = torch.randn(3, 2, device=step_twins.device)
        assert torch.equal(step(x), followed(x))
    (said,) = (each for each in step.in_python if "sparse" in each)
    assert re.match(r"the step uses sparse \(see test_fixes.py:\d+\), a tensor with the layout", said), said
    assert said.endswith("make it dense before the step, as in x.to_dense()") and followed.replays >= 2, said


def test_generators_of_the_users(run, device):
    generator = torch.Generator()

    def make(draw):
        def make(model, optimizer):
            def inner(loss):
                (loss * draw()).backward()
                optimizer.step()

            return inner

        return make

    step, (said,) = run(make(lambda: torch.rand((), generator=generator).to(device)))
    assert step.replays == 0 and said.endswith("leave generator= out: the graph advances PyTorch's own generator alone")
    step, said = run(make(lambda: torch.rand((), device=device)))
    assert step.replays >= 6 and not said, said


def test_a_parameter_that_the_step_unfreezes(run):
    """A call that finds it frozen leaves something else behind, and hinders no other call."""

    def make(model, optimizer):
        def inner(loss):
            model.requires_grad_(True)
            (loss + model.weight.sum()).backward()
            optimizer.step()

        return inner

    def freeze(step, i, calls=(0, 1, 2)):
        if i in calls:
            step.optimizer.param_groups[0]["params"][0].requires_grad_(False)

    step, _ = run(make, between=freeze, calls=14)
    assert step.replays >= 7, step.in_python
    step, (said,) = run(make, between=partial(freeze, calls=range(14)), calls=14)
    assert step.replays == 0 and said.endswith("set requires_grad back in the same step, or set it outside of the step")


def test_a_search_along_a_line_is_not_captured(run):
    def search(model, optimizer):
        def inner(loss):
            loss.backward()
            optimizer.step(lambda: loss.detach())

        return inner

    step, (said,) = run(search, torch.optim.LBFGS)
    assert step.replays == 0 and f"{READS}{OTHER.format('LBFGS')}" in said, said


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_hooks_are_named_though_they_change_something(run, device, kind):
    """They replace the weight in each step, and to detach it would be wrong."""

    def make(of):
        def make(model, optimizer):
            layer = of(nn.Linear(4, 4, device=device))

            def inner(loss):
                (loss * layer(model.weight).sum()).backward()
                optimizer.step()

            return inner

        return make

    step, (said, *_) = run(make(getattr(nn.utils, kind)))
    fix = f"; take torch.nn.utils.parametrizations.{kind} instead"
    said = re.sub(r" \(see test_fixes\.py:\d+\)", "", said)
    assert step.replays == 0 and said.endswith(f"layer has a hook, which runs Python in each step{fix}"), said
    step, said = run(make(getattr(nn.utils.parametrizations, kind)))
    assert step.replays >= 6 and not said, said


def test_averages_over_all_batches(run, device):
    """They read the number of batches on the host, and others do not."""

    def norm(momentum):
        def make(model, optimizer):
            norm = nn.BatchNorm1d(4, momentum=momentum, device=device)

            def inner(loss):
                (loss * norm(model.weight).sum()).backward()
                optimizer.step()

            return inner

        return make

    step, (said,) = run(norm(None))
    assert step.replays == 0 and "at test_fixes.py:" in said and said.endswith("; make it with momentum=0.1"), said
    step, said = run(norm(0.1))
    assert step.replays >= 6 and not said, said


def test_weights_that_get_other_memory(run):
    """Of which some stays elsewhere: a replay could not leave it so."""

    def swap(in_place):
        def make(model, optimizer):
            average = torch.zeros_like(model.weight)

            def inner(loss):
                (loss + model.weight.sum()).backward()
                optimizer.step()
                if in_place:
                    average.copy_(model.weight.data)
                    model.weight.data.mul_(0.5)
                else:
                    average.data, model.weight.data = model.weight.data, average.data

            return inner

        return make

    step, (said,) = run(swap(in_place=False))
    fix = "in place, such as by .data.copy_(), or set it outside of the step"
    assert step.replays == 0 and said.endswith(fix) and "(see test_fixes.py:" in said, said
    step, said = run(swap(in_place=True))
    assert step.replays >= 6 and not said, said


def test_checkpoints(run, backend, device):
    def of(**options):
        def what(y, ones):
            x = ones.clone().requires_grad_()
            return checkpoint(torch.sin, x, use_reentrant=False, **options).sum() * y.sum()

        return on(device, what)

    step, (said,) = run(of())
    fix = "checkpoint with preserve_rng_state=False what draws nothing, or in a function that is compiled"
    assert step.replays == 0 and (backend == "cuda" or said.endswith(fix)), said
    step, said = run(of(preserve_rng_state=False))
    assert step.replays >= 6 and not said, said


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(random.random, "Python"), (numpy.random.rand, "NumPy"), (lambda: float(torch.rand(())), "PyTorch")],
)
def test_random_numbers_of_python(run, device, draw, whose):
    if (whose, device) == ("PyTorch", "cpu"):
        pytest.skip("the graph's own generator")

    def make(model, optimizer):
        def inner(loss):
            (loss * draw()).backward()
            optimizer.step()

        return inner

    step, (said,) = run(make)
    change = f"the state of {whose}'s random numbers{' on the CPU' * (whose == 'PyTorch')} changed"
    line = "" if whose == "PyTorch" else r" \(see test_fixes.py:\d+\)"
    assert step.replays == 0 and re.search(f"{change}{line}, in each step; draw with torch on the device$", said), said
    assert max(step.in_python.values()) >= 7, step.in_python


def test_schedulers(run, device):
    """Each warning is followed, until the step replays."""

    def scheduled(make, optimizer, **options):
        schedulers = []

        def make_scheduled(model, optimizer):
            schedulers.append(make(optimizer))
            return plain(model, optimizer)

        def step_scheduler(step, i):
            schedulers[0].step()

        return run(make_scheduled, optimizer, step_scheduler, **options)

    decays = partial(LambdaLR, lr_lambda=lambda epoch: 0.9**epoch)
    cycles = partial(OneCycleLR, max_lr=0.1, total_steps=50)
    fused = {"fused": True, "capturable": device == "cuda"}
    takes = "whose kernels take numbers that change"
    for make, kind, options, fix in (
        (decays, torch.optim.SGD, {}, f"make SGD with fused=True, {takes}"),
        (decays, torch.optim.SGD, {"fused": True}, None),
        (decays, torch.optim.SGD, {"fused": True, "lr": RATE}, None),
        (cycles, torch.optim.AdamW, {"capturable": device == "cuda"}, f"make AdamW with fused=True, {takes}"),
        (cycles, torch.optim.AdamW, fused, None),
    ):
        if options.get("lr") is RATE:
            options = options | {"lr": torch.tensor(0.01, device=device)}
        step, said = scheduled(make, kind, **options)
        assert (step.replays >= 6 and not said) if fix is None else said[0].endswith(f", between calls; {fix}"), said


class Encoding(UserDict):
    """As the tokenizers of transformers return."""


@dataclass
class Pair:
    x: torch.Tensor


@pytest.mark.parametrize(
    ("given", "instead", "said"),
    [
        (
            lambda x, i: Encoding(x=x),
            lambda x, i: {"x": x},
            "argument 0 is a Encoding; pass its tensors, such as dict(batch)",
        ),
        (lambda x, i: Pair(x), lambda x, i: vars(Pair(x)), "a Pair; pass its tensors, such as a dict of them"),
        (lambda x, i: x.cpu().numpy(), lambda x, i: x, "a ndarray; pass it as a tensor on the device"),
        (lambda x, i: x.to("meta"), lambda x, i: x, "; move the batch to the device before the call"),
        (
            lambda x, i: [x, i],
            lambda x, i: [x, i % 100 == 99],
            "; or, if the step branches by it, pass what that decides, such as i % 4 == 0",
        ),
        (
            lambda x, i: [x, 0.5**i],
            lambda x, i: [x, torch.tensor(0.5**i, device=x.device)],
            "argument 0[1] changed from 0.0078125 to 0.00390625, in each step; pass it as a tensor on the device",
        ),
        (
            lambda x, i: {"x": x, "name": f"name {i}"},
            lambda x, i: [x],
            "argument 0['name'] changed from 'name 7' to 'name 8', in each step; leave it out",
        ),
    ],
    ids=["a mapping", "a dataclass", "an array", "elsewhere", "an index", "a number", "a name"],
)
@pytest.mark.nightly_after(2)
def test_arguments(step_twins, given, instead, said):
    x = torch.ones(3, device=step_twins.device)
    for make in (given, instead):
        step = step_twins.graphed(lambda batch: torch.ones(2, device=step_twins.device) * 2)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for i in range(12):
                step(make(x, i))
        found = [str(each.message) for each in found]
        if make is given:
            assert step.replays == 0 and len(found) == 1 and found[0].endswith(said), found
            assert any(reason.endswith(said) and times >= 3 for reason, times in step.in_python.items()), step.in_python
        else:
            assert step.replays >= 10 and not found, found


def test_a_batch_of_another_shape_each_time(step_twins):
    for sizes, replays, warned in ((range(1, 12), 0, 1), ([1, 2, 3] * 4, 6, 0)):
        step = step_twins.graphed(lambda batch: batch["x"] * 2)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for size in sizes:
                step({"x": torch.ones(size, device=step_twins.device)})
        assert step.replays == replays and len(found) == warned
        assert "the shape of argument 0['x'] changed from (1,) to (2,); pad to a few sizes" in [*step.in_python][1]


class Padded(NamedTuple("Padded", [("data", torch.Tensor), ("lengths", torch.Tensor)])):
    """As `PackedSequence`, it takes nothing but tensors."""

    def __new__(cls, data, lengths):
        assert data.device == lengths.device
        return super().__new__(cls, data, lengths)


class Bag:
    """A node of PyTorch's trees that has no names for what it holds, and takes nothing but tensors."""

    def __init__(self, *tensors):
        self.tensors = [each.flatten() for each in tensors]


register_pytree_node(Bag, lambda bag: (bag.tensors, None), lambda tensors, _: Bag(*tensors))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: Padded(x, x[1:]), ".data"),
        (lambda x: Bag(x[1:], x), "[0]"),
        (lambda x: [x[:1], defaultdict(list, x=(x,))], "[1]['x'][0]"),
        (lambda x: OrderedDict(a=deque([x[:1], x])), "['a'][1]"),
    ],
    ids=["a named tuple that checks", "a node", "a default", "an order"],
)
def test_a_container_of_another_shape(step_twins, make, name):
    """Its place is named, and no container is made of anything but what it may hold."""
    step = step_twins.graphed(lambda batch: tree_leaves(batch)[0] * 2)
    for size in range(2, 12):
        step(make(torch.ones(size, device=step_twins.device)))
    assert any(f"the shape of argument 0{name} changed from" in reason for reason in step.in_python), step.in_python


def pops(batch):
    return batch.pop("x") * 2


def adds(batch):
    batch["y"] = batch["x"] * 2
    return batch["y"]


def appends(batch):
    batch["losses"].append(batch["x"])
    return batch["x"] * 2


def differentiates(batch):
    x = batch["x"].requires_grad_()
    return torch.autograd.grad(x.square().sum(), x)[0]


def gives_memory(batch):
    batch["x"].data = batch["x"] * 2
    return batch["x"] * 1


def tags(batch):
    batch["x"].seen = True
    return batch["x"] * 2


_COPY, _TAKE = "copy it first, as in batch = dict(batch)", "as in x = x.detach().requires_grad_()"


@pytest.mark.parametrize(
    ("fn", "fix", "instead"),
    [
        (pops, _COPY, lambda batch: pops(dict(batch))),
        (adds, _COPY, lambda batch: adds(dict(batch))),
        (appends, _COPY, lambda batch: appends({"x": batch["x"], "losses": []})),
        (differentiates, _TAKE, lambda batch: differentiates({"x": batch["x"].detach()})),
        (gives_memory, _TAKE, lambda batch: gives_memory({"x": batch["x"].detach()})),
        (tags, _TAKE, lambda batch: tags({"x": batch["x"].detach()})),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.nightly_after(2)
def test_steps_that_change_what_they_are_given(step_twins, fn, fix, instead):
    """The caller sees the change, with and without graphs."""

    def calls(step):
        for i in range(6):
            batch = {"x": torch.full((3,), float(i), device=step_twins.device), "losses": []}
            given = batch["x"]
            result = step(batch)
            losses = [*batch.get("losses", ())]
            yield result.tolist(), [*batch], len(losses), given.tolist(), given.requires_grad, [*vars(given)]

    step, followed = step_twins.graphed(fn), step_twins.graphed(instead)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert [*calls(step)] == [*calls(fn)] and [*calls(followed)] == [*calls(instead)]
    (said,) = [str(each.message) for each in found if "graphed_step" in str(each.message)]
    assert step.replays == 0 and said.endswith(fix) and followed.replays >= 3, said
    assert fix != _TAKE or "the step changes argument " in said


def test_an_argument_with_an_attribute(step_twins):
    """What a graph has of it would be that of the call that was captured."""
    step = step_twins.graphed(lambda x: x * x.scale)
    for scale in (1.0, 2.0, 3.0, 4.0):
        x = torch.ones(2, device=step_twins.device)
        x.scale = scale
        assert step(x).tolist() == [scale, scale]
    assert step.captures == 0 and "the attribute scale" in str([*step.in_python]), step.in_python


def test_a_warning_is_for_the_line_that_calls_the_step(step_twins):
    step = step_twins.graphed(lambda x: x)
    with pytest.warns(UserWarning, match="have the step read it from outside") as found:
        step(object())
    assert found[0].filename == __file__


class ReadsItsSum(nn.Module):
    def forward(self, x):
        total = x.sum().item()
        return x * total


@pytest.mark.parametrize("made_before", [False, True])
def test_lists_that_the_first_step_makes(step_twins, made_before):
    metrics = defaultdict(list, {"sum": []} if made_before else {})

    def fn(x):
        metrics["sum"].append(x.sum())
        return x

    step = step_twins.graphed(fn)
    for _ in range(5):
        step(torch.ones(3, device=step_twins.device))
    said = " ".join(str(explain(step)).split())
    assert len(metrics["sum"]) == 5 and step.captures == 1 and step.replays == 2 + made_before
    assert (fixes._KEYS in said) != made_before and ("nothing to change" in said) == made_before, said


@pytest.mark.parametrize("value", [lambda x: x * 2, lambda x: {"x": x * 2}], ids=["a tensor", "something else"])
@pytest.mark.parametrize("set_back", [False, True])
def test_what_a_step_makes_in_the_place_of_none(step_twins, value, set_back):
    """There is nothing to change, unless the loop has each step make it."""
    keeper = types.SimpleNamespace(last=None)

    def fn(x):
        keeper.last = value(x)
        return x

    step = step_twins.graphed(fn)
    for _ in range(10):
        step(torch.ones(3, device=step_twins.device))
        keeper.last = None if set_back else keeper.last
    said = " ".join(str(explain(step)).split())
    assert "keeper.last changed" in said and f"see test_fixes.py:{fn.__code__.co_firstlineno + 1}" in said, said
    assert (fixes._BETWEEN in said) == set_back != ("nothing to change" in said), said
    assert bool(step.replays) != set_back


def test_a_line_of_a_compiled_module(step_twins, backend):
    """It is the operator's, and not that of the call."""
    compiled = step_twins.compiled(ReadsItsSum())
    step = step_twins.graphed(lambda x: compiled(x))
    for _ in range(4):
        step(torch.ones(3, 4, device=step_twins.device))
    (line,) = [said for said in step.in_python if "(total = x.sum().item())" in said]
    assert f"at {Path(__file__).name}:" in line and step.replays == 0


def test_what_else_changes_is_named(run):
    """Of a name only what comes first; not the state that an optimizer makes in its first step."""
    history = {"step": 0, "losses": []}

    def make(model, optimizer):
        schedule = LambdaLR(optimizer, lambda i: 1 / (1 + i))

        def inner(loss):
            loss.backward()
            optimizer.step()
            history["step"] = 1 + history["step"]
            history["losses"].append(loss.item())
            schedule.step()

        return inner

    step, said = run(make)
    (said,) = (each for each in said if "in each step" in each)
    first, others = (
        said.partition(": ")[2].partition(" changed")[0],
        said.rpartition("; ")[2].removesuffix(" changed, too"),
    )
    others, lines = re.subn(r" \(see test_fixes.py:\d+\)", "", others)
    roots = {re.split(r"[.\[(]", each.removeprefix("len("))[0] for each in (first, *others.split(", "))}
    assert step.replays == 0 and roots == {"schedule", "history", "optimizer"} and lines == 1, said
    assert "capturable" not in said


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["number", "tensor"])
def test_a_scheduler_goes_after_the_step(run, rate, device):
    """What it counts is PyTorch's, and no tensor."""
    rate = rate.to(device) if isinstance(rate, torch.Tensor) else rate

    def make(model, optimizer, *, inside=True):
        schedule = LambdaLR(optimizer, lambda i: 1 / (1 + i))
        optimizer.schedule = schedule

        def inner(loss):
            loss.backward()
            optimizer.step()
            if inside:
                schedule.step()

        return inner

    step, (*_, said) = run(make, lr=rate, fused=True)
    fix = "call schedule.step() after the step"
    assert step.replays == 0 and said.count(fix) == 1 and "writes in place" not in said, said

    def between(step, i):
        step.optimizer.schedule.step()

    step, _ = run(partial(make, inside=False), between=between, lr=rate, fused=True)
    assert step.replays >= 6, step.in_python


def test_lines_that_write_are_shown(step_twins):
    """And of a container all, as any may write it."""
    losses, best, kept = [], {"loss": 0.0}, types.SimpleNamespace(count=0)

    def append(x):
        losses.append(0)
        best.get("loss", losses[-1])
        return x

    def store(x):
        best.get("loss")
        best["loss"] = best["loss"] + 1
        return x

    def store_late(x):
        number = len(best)
        best["loss"] = number
        del best["loss"]
        best[number] = 0
        return x

    def count(x):
        number = kept.count
        kept.count = number + 1
        return x

    first = {fn: fn.__code__.co_firstlineno for fn in (append, store, store_late, count)}
    for fn, line, rest in (
        (append, 1, rf", and test_fixes.py:{first[append] + 2}, which reads it"),
        (store, 1, rf" and test_fixes.py:{first[store] + 2}\)"),
        (store_late, 2, r"\)"),
        (count, 2, r"\)"),
    ):
        step = step_twins.graphed(fn)
        for _ in range(3):
            step(torch.ones(2, device=step_twins.device))
        said = "; ".join(step.in_python)
        assert re.search(rf"changed .*\(see test_fixes.py:{first[fn] + line}{rest}", said), said


def test_a_branch_that_only_prints(run, backend):
    def make(model, optimizer):
        def inner(loss):
            loss.backward()
            optimizer.step()
            if loss > 1e6:
                print("large")

        return inner

    step, (said,) = run(make)
    assert step.replays == 0 and "(if loss > 1e6:)" in said and "_local_scalar_dense" not in said, said
    assert backend == "cuda" or ("bool() for a branch" in said and said.endswith("keep what it holds after the call"))


def test_one_thing_that_changes_is_said_once(run):
    kept = types.SimpleNamespace(count=0)

    def make(model, optimizer):
        def inner(loss):
            loss.backward()
            optimizer.step()
            kept.count = kept.count * 2 + 1

        return inner

    step, _ = run(make, torch.optim.AdamW, fused=True)
    (said,) = (each for each in explain(step).in_python if "kept.count" in each)
    assert explain(step).in_python[said] == 10 and " and later to others (see test_fixes.py:" in said, said
    assert said.endswith(f", in each step; {_KEEP}; {fixes._COUNTED}")


def test_a_number_in_a_dictionary_that_the_step_names_twice(run, device):
    def make(model, optimizer, together=True):
        meter = {"loss": torch.zeros((), device=device), "count": 0}
        counts = meter if together else {"count": 0}

        def inner(loss):
            loss.backward()
            optimizer.step()
            meter["loss"] = 0.5 * meter["loss"] + loss.detach()
            counts["count"] += 1

        return inner

    step, (said,) = run(make)
    assert step.replays == 0 and said.endswith(", if the step names the dictionary in no other way"), said
    step, said = run(partial(make, together=False))
    assert step.replays >= 6 and not said, said


class Counting(torch.optim.Optimizer):
    """Counts its steps in a number of Python, or in a tensor."""

    def __init__(self, parameters, lr, first=0):
        super().__init__(parameters, {"lr": lr})
        self.first = first

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", self.first) + 1
            p.sub_(p.grad * self.param_groups[0]["lr"] / state["step"])


def test_an_optimizer_of_the_users(run, device):
    step, (said,) = run(plain, Counting)
    assert step.replays == 0 and f"; {fixes._OPTIMIZER}; {fixes._OWN_OPTIMIZER}" in said, said
    step, said = run(plain, Counting, first=torch.zeros((), device=device))
    assert step.replays >= 5 and not said, said


def test_a_setting_that_pytorch_sets_itself():
    changes = [Difference(name, 1, 2) for name in names_of_settings(Settings.ALL)]
    (said,) = filter(None, map(fixes.of_first_step, changes))
    assert said == ", as PyTorch does at the first attention: nothing to change"
    without_fix = [each for each in changes if not fixes.fix_of_change(each, {}, {}, in_step=True)]
    assert len(without_fix) == 1 and "attention.sdpa_kernel" in without_fix[0].label
