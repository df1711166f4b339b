"""What installed packages read while a step runs: each change is seen before a replay, or the step is not captured."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from support import usual_step
from test_step_reads import make_step, state_of

from thunder_cg import explain
from thunder_cg.runtime.backends import resolve
from thunder_cg.step import calls, packages
from thunder_cg.step.packages import is_constant
from thunder_cg.step.reads import settings_in

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")

SOURCE = """
import torch

SCALE = 1.0
OTHER = 1.0
SCALES = {"loss": 1.0}
LOSSES = {"loss": lambda y: y}
HISTORY = []

def by_global(y):
    return y * SCALE

def by_registry(y):
    return LOSSES["loss"](y) * SCALES["loss"]

def counted(y):
    HISTORY.append(None)
    return y * len(HISTORY)

class Inner:
    def __init__(self):
        self.scale = 1.0

class Loss:
    scale = 1.0
    scales = {"loss": 1.0}
    calls = 0

    def __init__(self):
        self.inner, self.own = Inner(), {"loss": 1.0}

    def __call__(self, y):
        return y * self.scale * self.inner.scale * self.own["loss"] * self.scales["loss"]

def weigh(loss, y):
    return y * loss.inner.scale

class Finder:
    asked = []

    def find_spec(self, name, *args):
        self.asked.append(name)

def read(y):
    return y * float(y.detach().mean())

class Lookahead(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["looks"] = group.get("looks", 0) + 1

class Metric(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.count, self.total = 0, torch.zeros((), device=device)
        self.update = self.counted(self.add)

    def __setattr__(self, name, value):
        if name == "higher_is_better":
            raise RuntimeError(name)
        super().__setattr__(name, value)

    def counted(self, update):
        def wrapped(y):
            self.count += 1
            update(y)
        return wrapped

    def add(self, y):
        self.total = self.total + y
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "package_of_losses.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(folder)
    yield import_module("package_of_losses")
    del sys.modules["package_of_losses"]


CHANGES = {
    "a global": lambda package, loss: setattr(package, "SCALE", 2.0),
    "a global that is looked up": lambda package, loss: setattr(package, "OTHER", 2.0),
    "a registry of functions": lambda package, loss: package.LOSSES.update(loss=torch.sin),
    "a registry of numbers": lambda package, loss: package.SCALES.update(loss=2.0),
    "an attribute of a class": lambda package, loss: setattr(package.Loss, "scale", 2.0),
    "a table of a class": lambda package, loss: package.Loss.scales.update(loss=2.0),
    "a new attribute": lambda package, loss: setattr(loss, "scale", 2.0),
    "a table of an object": lambda package, loss: loss.own.update(loss=2.0),
    "an object of an object": lambda package, loss: setattr(loss.inner, "scale", 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.nightly_after(2)
def test_data_of_packages(package, change):
    trainer = SimpleNamespace(loss=package.Loss())

    def step(y):
        y = package.by_registry(package.by_global(trainer.loss(y)))
        return package.weigh(trainer.loss, y) * getattr(package, "OTH" + "ER")

    state = state_of(step)
    assert state.holds() and state.again().facts == state.facts and not state.objection
    CHANGES[change](package, trainer.loss)
    assert not state.holds()


def test_code_of_packages_is_constant(package):
    assert not is_constant(package.__file__) and is_constant(torch.__file__) and is_constant(pytest.__file__) is False
    state = state_of(lambda y: package.by_global(y))
    assert all("by_global" not in label or label == "package.by_global" for label in state.facts), state.facts


def test_packages_in_a_folder_of_their_own(tmp_path, monkeypatch):
    """As ``pip install --target`` makes it, and ``PYTHONPATH`` has it."""
    (tmp_path / "some.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    folders = [f"{folder}{os.sep}" for folder in packages._folders_of_packages()]
    assert f"{tmp_path}{os.sep}" in folders
    monkeypatch.setattr(packages, "_PACKAGES", (*packages._PACKAGES, *folders))
    for file, expected in ((tmp_path / "optree" / "ops.py", True), (tmp_path / "some.py", False)):
        assert packages.is_installed(str(file)) and is_constant(str(file)) is expected


def test_the_line_of_a_package_is_named(step_twins, package, backend):
    step = step_twins.train(make_step(package.read))
    said = str([*step.in_python])
    assert step.captures == 0 and "at test_step_reads.py:" in said
    line = (
        "in package_of_losses.py:45 (return y * float(y.detach().mean())); the host reads a value there; make that call"
    )
    assert backend == "cuda" or line in said, said


def test_what_imports_a_module_is_not_the_steps(package, tmp_path, monkeypatch):
    """As pytest rewrites modules, and type checkers instrument them. It is done once, with and without graphs."""
    (tmp_path / "site-packages" / "module_of_nothing.py").write_text("")
    monkeypatch.setattr(sys, "meta_path", [package.Finder(), *sys.meta_path])

    def step(y):
        import module_of_nothing

        return y if module_of_nothing else None

    state = state_of(step)
    assert "module_of_nothing" in package.Finder.asked
    assert not [label for label in state.facts if "Finder" in label]


def test_a_package_that_counts(step_twins, package):
    """It is not known to before a capture, which has counted, and so is the call's run."""

    def make(model):
        package.HISTORY.clear()
        return make_step(package.counted)(model)

    step = step_twins.train(make)
    assert step.captures == 0 and len(package.HISTORY) == 8
    assert "without a history to package_of_losses.HISTORY" in str([*step.in_python])


def test_an_optimizer_of_a_package_that_counts(step_twins, package):
    """Whatever its options are, the number is in Python."""

    step = step_twins.train(partial(usual_step, make=partial(package.Lookahead, lr=0.1)), 12)
    assert step.replays == 0
    last = [*step.in_python][-1]
    assert "'looks'] changed" in last and "; take another optimizer than Lookahead, such as AdamW" in last, last


def test_a_metric_of_a_package(step_twins, package, device):
    """As those of torchmetrics: only a capture shows what its `update` calls, which has added by then."""
    metrics = []

    def make(model):
        metrics.append(metric := package.Metric(device))

        def of(y):
            metric.update(y.detach().mean())
            return y

        return make_step(of)(model)

    step = step_twins.train(make, 12)
    assert step.captures == 1 and step.replays >= 6, explain(step)
    plain, graphed = metrics
    assert plain.count == graphed.count == 12 and torch.equal(plain.total, graphed.total)


def test_settings_of_pytorch_in_python(step_twins):
    def of(y):
        return y * (1.0 if torch.backends.mha.get_fastpath_enabled() else 2.0)

    def between(i, *_):
        torch.backends.mha.set_fastpath_enabled(i != 3)

    assert step_twins.train(make_step(of), 10, between).captures == 2
    function = torch.backends.mha.get_fastpath_enabled
    ((get, value),) = settings_in({function.__code__: function.__globals__})
    assert get() is value is True


def test_whether_there_is_a_profiler_is_no_setting():
    """What Inductor compiles asks that, too."""
    names = {"torch": torch, "__name__": "torch.somewhere"}
    exec(
        "def ask(): return torch.autograd.profiler._is_profiler_enabled, torch.backends.mha._is_fastpath_enabled", names
    )
    ((_, value),) = settings_in({names["ask"].__code__: names})
    assert value is True


def test_a_flag_that_alternates(step_twins):
    """Each of its values gets a graph, as for gradients that are accumulated over two calls."""
    flags = {"sync": False}

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if flags["sync"]:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        flags["sync"] = False
        return step

    step = step_twins.train(make, 10, lambda i, *_: flags.update(sync=i % 2 == 0))
    assert step.captures == 2 and step.replays >= 4, explain(step)


def test_nvidias_bindings_are_constant(step_twins):
    """A capture on a GPU calls them itself, so each step would need one more call before its graph."""
    driver = pytest.importorskip("cuda.bindings.driver")
    model = step_twins.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        driver.CUgraphNodeType(1)
        optimizer.step()
        return loss

    step = step_twins.graphed(fn)
    for _ in range(4):
        step(*step_twins.batch())
    assert step.replays == 2, explain(step)


def test_what_the_garbage_collector_calls_is_not_the_steps(step_twins):
    collected = []
    callback = lambda phase, info: collected.append(phase)  # noqa: E731
    threshold = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(50)
    try:
        step = step_twins.train(make_step(torch.tanh), 5)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)
    assert collected and step.replays == 3, explain(step)


@pytest.mark.parametrize("ask", ["by its name", "otherwise"])
def test_a_step_that_asks_whether_it_is_captured(step_twins, backend, monkeypatch, ask):
    """A graph does what the step does in Python. Transformers asks."""
    if backend == "tape":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: resolve(backend).busy())
        monkeypatch.setattr(calls, "_ASKS", torch.cuda.is_current_stream_capturing)
    asks = torch.cuda.is_current_stream_capturing if ask == "otherwise" else None

    def of(y):
        is_captured = torch.cuda.is_current_stream_capturing() if asks is None else asks()
        return y * (2.0 if is_captured else 1.0)

    step = step_twins.train(make_step(of))
    if asks is None:
        assert step.captures == 1 and step.replays >= 5, explain(step)
    else:
        assert step.captures == 0 and "asks whether it is captured, at test_packages.py" in str([*step.in_python])
