"""What the user's Python does and Thunder loses is said, by the log and by the report."""

from __future__ import annotations

import datetime
import logging
import random
import sys
import time
from contextlib import nullcontext

import numpy as np
import pytest
import thunder
import torch
from torch import nn

from thunder_cg import cudagraph_transform, explain, thunderfx

LOGGER = logging.getLogger("test_lost")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen, self.calls = nn.Linear(4, 4), None, 0
        self.register_buffer("mean", torch.zeros(4))


class Branches(Model):
    def forward(self, x):
        y = self.linear(x)
        if y.sum().item() > 0:
            y = y * 2
        return y.sin().cos()


class Chooses(Model):
    def forward(self, x):
        y = self.linear(x)
        return torch.where(y.sum() > 0, y * 2, y).sin().cos()


class Assigns(Model):
    def forward(self, x):
        self.seen = self.linear(x)
        self.calls += 1
        return self.seen.sin().cos()


class Reassigns(Model):
    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0)
        return self.linear(x).sin().cos()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Reassigns()

    def forward(self, x):
        self.inner.seen = x * 2
        return self.inner(x)


class Buffers(Model):
    def forward(self, x):
        self.mean.copy_(self.mean * 0.9 + x.mean(0))
        return self.linear(x).sin().cos()


def run(compiled, calls=4):
    x = torch.ones(2, 4)
    for _ in range(calls):
        result = compiled(x)
    return result


@pytest.mark.parametrize(
    ("kind", "line", "said"),
    [
        (Branches, 2, ["a branch at test_lost.py:{} depends on what a tensor holds, a number that Thunder does not"]),
        (Assigns, 1, ["self.seen at test_lost.py:{} is assigned while Thunder traces", "self.calls at test_lost.py:"]),
        (Reassigns, 1, ["self.mean at test_lost.py:{} is assigned while Thunder traces"]),
    ],
)
def test_what_is_lost(kind, line, said, caplog):
    model = kind().requires_grad_(False)
    nn.init.constant_(model.linear.bias, 9.0)  # the sum is positive
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    with caplog.at_level(logging.WARNING, "thunder_cg"):
        result = run(jmodel)
    assert kind is not Branches or not torch.equal(result, model(torch.ones(2, 4)))  # uncaptured Thunder is as wrong
    line += kind.forward.__code__.co_firstlineno
    report = explain(jmodel)
    assert len(report.differs) == len(said)
    for found, expected in zip(report.differs, said, strict=True):
        assert found.startswith(expected.format(line)) and caplog.text.count(found) == 1
        assert f"Other than in PyTorch, with and without graphs: {found}." in str(report)
    assert "nothing to change" not in str(report)


class Caches(Model):
    """As ConViT of timm caches relative positions, by the size of its input."""

    def forward(self, x):
        if self.mean.shape[0] != 2:
            self.mean = torch.arange(2.0)[:, None]
        return self.linear(x).sin() + self.mean


class Keeps(Model):
    def forward(self, x):
        self.mean = self.mean
        return self.linear(x).sin() + self.mean


class Drops(Model):
    def forward(self, x):
        self.mean = None
        return self.linear(x).sin()


@pytest.mark.parametrize(
    ("kind", "trains", "raises"),
    [
        (Reassigns, False, False),
        (Reassigns, True, True),
        (Caches, False, True),
        (Keeps, True, False),
        (Drops, False, True),
    ],
)
def test_buffers_that_a_next_call_does_not_take(kind, trains, raises):
    """With and without graphs, Thunder traces with the buffer that the model had before."""
    model = nn.Sequential(kind())
    jgraphed = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    for jmodel in (thunder.jit(model), jgraphed):
        with torch.set_grad_enabled(trains), pytest.raises(AssertionError) if raises else nullcontext():
            run(jmodel)
    line = kind.forward.__code__.co_firstlineno + (2 if kind is Caches else 1)
    said = [f"self.mean at test_lost.py:{line} is assigned"]
    assert [each.partition(" a tensor of another shape")[0] for each in explain(jgraphed).differs] == said * raises
    with torch.set_grad_enabled(trains):
        assert torch.equal(run(thunderfx(model, backend="tape")), model(torch.ones(2, 4)))


def test_an_autocast_that_thunder_never_ends():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    with torch.autocast("cpu", torch.bfloat16):
        jmodel(torch.ones(2, 4))
    assert explain(jmodel).differs == ()
    assert jmodel(torch.ones(3, 4)).dtype is torch.bfloat16  # as uncaptured Thunder
    (said,) = explain(jmodel).differs
    assert said.startswith("a cast to bfloat16 at linear.py:") and "though autocast is off now" in said
    fix = thunderfx(model, backend="tape")
    with torch.autocast("cpu", torch.bfloat16):
        fix(torch.ones(2, 4))
    assert fix(torch.ones(3, 4)).dtype is torch.float32 and explain(fix).differs == ()


@pytest.mark.parametrize("kind", [Chooses, Buffers])
def test_what_the_advice_says_is_not_lost(kind):
    model, twin = kind().requires_grad_(False), kind().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    assert torch.equal(run(jmodel), run(twin)) and torch.equal(jmodel.get_buffer("mean"), twin.mean)
    report = explain(jmodel)
    assert report.differs == () and "there is nothing to change" in str(report)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("random.random", lambda x: x.sin() * random.random() + x.cos()),
        ("random.random", lambda x: x.sin() * random.uniform(0, 1) + x.cos()),
        ("numpy.random.rand", lambda x: x.sin() * float(np.random.rand()) + x.cos()),
        ("time.perf_counter", lambda x: x.sin() * time.perf_counter() + x.cos()),
        ("datetime.now", lambda x: x.sin() * datetime.datetime.now().hour + x.cos()),
        ("print", lambda x: (x.sin() + x.cos(), print("called"))[0]),
        ("logging.Logger.warning", lambda x: (x.sin() + x.cos(), LOGGER.warning("called"))[0]),
    ],
    ids=["random", "uniform", "numpy", "clock", "date", "print", "log"],
)
def test_what_python_calls_once(name, function):
    if name.startswith("numpy") and sys.version_info < (3, 11):
        pytest.skip("Thunder raises")
    jfn = thunder.jit(function, transforms=[cudagraph_transform(backend="tape")])
    run(jfn)
    (said,) = explain(jfn).differs
    line = f"test_lost.py:{function.__code__.co_firstlineno}"
    assert said.startswith(f"{name}() at {line} is called while Thunder traces, and in no call; ")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_gradients_are_not_called():
    """With and without graphs, or Thunder raises. ``thunderfx`` calls them."""
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), []
    model[0].register_full_backward_hook(lambda *args: calls.append(0))
    jgraphed = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    for jmodel in (thunder.jit(model), jgraphed):
        run(jmodel).sum().backward()
    assert calls == []
    said = explain(jgraphed).differs
    assert [each.partition(",")[0] for each in said] == ["self.0 has hooks on gradients"]
    thunderfx(model, backend="tape")(torch.ones(2, 4)).sum().backward()
    assert calls == [0]
    broken = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    with pytest.raises(AttributeError):
        broken(torch.ones(2, 4, requires_grad=True))
    assert "for hooks on gradients of a module, use thunder_cg.thunderfx" in str(explain(broken))


def _marked() -> torch.Tensor:
    x = torch.ones(4, 2).t()
    x.mark = 3
    return x


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        (lambda x: hasattr(x, "mark"), "hasattr(tensor, 'mark')"),
        (lambda x: getattr(x, "mark", 1), "getattr(tensor, 'mark')"),
        (lambda x: hasattr(x, "grad_fn"), "hasattr(tensor, 'grad_fn')"),
        (lambda x: x.is_contiguous(), "Tensor.is_contiguous"),
        (lambda x: x.data_ptr() == (x * 2).data_ptr(), "Tensor.data_ptr"),
        (lambda x: hasattr(x, "other") + hasattr(x, "sin") + getattr(x, "other", 2), None),
    ],
)
def test_what_a_tensor_is_asked(asks, said):
    """Where Thunder has mended one, it needs no name any more."""

    def fn(x):
        return x.sin() + (2 if asks(x) == 1 else 3 if asks(x) else 4)

    x = _marked()
    jfn = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    assert torch.equal(jfn(x), fn(x)) == (said is None)
    line = f"test_lost.py:{asks.__code__.co_firstlineno} "
    assert {each.partition("asks")[0] for each in explain(jfn).differs} == ({f"{said} at {line}"} if said else set())


def test_what_is_compiled_twice_loses_nothing():
    """Thunder's own clock, and attributes of the compiled module, are none of the user's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).requires_grad_(False)
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    for outer in (jmodel, lambda x: jmodel(x) * 2):
        jouter = thunder.jit(outer, transforms=[cudagraph_transform(backend="tape")])
        assert torch.equal(run(jouter), run(outer)) and explain(jouter).differs == ()


def test_a_log_whose_level_is_off_is_not_lost():
    jfn = thunder.jit(lambda x: (x.sin() + x.cos(), LOGGER.debug("off"))[0], transforms=[cudagraph_transform()])
    run(jfn)
    assert explain(jfn).differs == ()


def test_tensors_of_one_call_in_the_results_of_all():
    def joins(a, b, d):
        return a + b, {"d": [d]}, {**d}, a[0].sin().cos()

    def takes(a, b, d):
        return [*a, *b], {"d": [{k: t for k, t in d.items()}]}, {"a": [t for t in a]}, a[0].sin().cos()  # noqa: C416

    paths = "[0][0]", "[0][1]", "[1]['d'][0]['k']"
    for function, constants in ((joins, paths), (takes, ())):
        jfn = thunder.jit(function, transforms=[cudagraph_transform(backend="tape")])
        for value in 1.0, 2.0:
            result = jfn([torch.tensor(value)], [torch.tensor(value)], {"k": torch.tensor(value)})
        assert (result[0][0].item() == 1.0) == bool(constants)  # as in uncaptured Thunder
        assert function is takes or result[2]["k"].item() == 2.0  # unlike in uncaptured Thunder
        found = explain(jfn).differs
        assert [each.split(" is the tensor that was there")[0] for each in found] == [
            f"the result{p}" for p in constants
        ]


def test_what_thunder_assigns_to_modules_inside_is_not_lost():
    model = Inner().requires_grad_(False)
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    run(jmodel)
    assert explain(jmodel).differs == ()
    assert torch.equal(model.inner.seen, torch.full((2, 4), 2.0)) and jmodel.get_buffer("inner.mean").min() > 1.0


@pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0), reason="torch.compile misses there that attributes change between calls"
)
def test_thunderfx_loses_neither():
    model = Assigns().requires_grad_(False)
    run(thunderfx(model, backend="tape"))
    assert model.calls == 4 and model.seen is not None
    branches = Branches().requires_grad_(False)
    jmodel = thunderfx(branches, backend="tape")
    assert torch.equal(run(jmodel), branches(torch.ones(2, 4))) and explain(jmodel).differs == ()
