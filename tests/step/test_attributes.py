"""Of objects that are passed on, only the attributes that a run looks up or writes are compared before a replay."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import threading
from dataclasses import asdict, dataclass, field

import pytest
import torch
from support import same, usual_step
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from thunder_cg import explain
from thunder_cg.compat.guards import attribute_writes_are_reported
from thunder_cg.step.attributes import Attributes


@dataclass
class Plain:
    a: int = 1
    b: int = 2

    def method(self):
        return self.a

    @property
    def twice(self):
        return self.b * 2

    @functools.cached_property
    def once(self):
        return self.b

    def __len__(self):
        return self.b


class Slots:
    __slots__ = ("__b", "a")

    def __init__(self):
        self.a = self.__b = 1

    def method(self):
        return self.__b


class Meta(type):
    def __setattr__(cls, name, value):
        raise AttributeError(name)


class OfMeta(metaclass=Meta):
    def __init__(self):
        self.a = 1


class Forwards:
    def __init__(self):
        self.inner = {"x": 1}

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self.inner[name]


class OwnLookup:
    def __getattribute__(self, name):
        return 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.unused, self.linear = 2.0, [], nn.Linear(1, 1)

    def forward(self, x):
        return self.linear(x) * self.k


def on_a_thread(value):
    thread = threading.Thread(target=lambda: value.a)
    thread.start()
    thread.join()


def set_behind(value):
    object.__setattr__(value, "c", 3)


LOOKUPS = {
    "a method": (Plain, Plain.method, {"a"}),
    "a property": (Plain, lambda value: value.twice, {"twice", "b"}),
    "a cached property": (Plain, lambda value: value.once, {"once", "b"}),
    "a special method": (Plain, len, {"b"}),
    "what is not there": (Plain, lambda value: getattr(value, "c", 0), {"c"}),
    "C code": (Plain, operator.attrgetter("a"), {"a"}),
    "comparison": (Plain, lambda value: value == Plain(), {"a", "b"}),
    "fields": (Plain, asdict, {"a", "b"}),
    "a write": (Plain, lambda value: setattr(value, "c", 1), {"c"}),
    "a write that goes around": (Plain, set_behind, {"c"}),
    "a thread": (Plain, on_a_thread, {"a"}),
    "its dictionary": (Plain, vars, None),
    "its names": (Plain, dir, None),
    "a copy": (Plain, copy.copy, None),
    "a pickle": (Plain, pickle.dumps, None),
    "slots": (Slots, Slots.method, {"_Slots__b"}),
    "a metaclass": (OfMeta, lambda value: value.a, {"a"}),
    "a lookup that is forwarded": (Forwards, lambda value: value.x, {"x", "inner"}),
    "a lookup of its own": (OwnLookup, lambda value: value.a, None),
    "a module": (Layer, lambda value: value(torch.ones(1)), {"k", "linear"}),
}


def content(kind):
    return [(name, id(member)) for name, member in vars(kind).items() if name != "__slotnames__"]


@pytest.mark.parametrize("kind", LOOKUPS)
def test_lookups_and_writes(kind):
    of, use, names = LOOKUPS[kind]
    value, attributes, before = of(), Attributes(), content(of)
    attributes.observe([of], [])
    with attributes.watched([value]):
        use(value)
    assert content(of) == before
    found = attributes.by_class().get(of)
    assert found is None if names is None else names <= {*found} and "unused" not in found


def test_classes_are_restored():
    """After watches that overlap, in any order, and after an error."""
    first, second, before = Attributes(), Attributes(), content(Plain)
    first.observe([Plain], [])
    second.observe([Plain], [])
    outer, inner = first.watched(), second.watched()
    outer.__enter__()
    inner.__enter__()
    Plain().method()
    outer.__exit__(None, None, None)
    Plain().twice  # noqa: B018
    inner.__exit__(None, None, None)
    assert content(Plain) == before and "twice" not in first.by_class()[Plain] and "twice" in second.by_class()[Plain]
    with pytest.raises(KeyError), first.watched():
        raise KeyError
    assert content(Plain) == before


@dataclass
class Config:
    smoothing: float = 0.0
    epoch: int = 0
    files: list = field(default_factory=lambda: ["file"] * 20_000)  # too many to compare


class Trainer:
    """Counts and keeps things as those of users do. Helpers get all of it."""

    def __init__(self, model):
        self.model, self.optimizer, self.config = model, SGD(model.parameters(), 0.1), Config()
        self.global_step, self.history, self.loader = 0, [], iter(range(99))

    def step(self, x, y):
        self.optimizer.zero_grad()
        loss = loss_of(self, self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def after(self, loss):
        self.global_step += 1
        self.config.epoch = self.global_step // 2
        self.history.append((loss.item(), next(self.loader)))


def loss_of(trainer, output, y):
    scale = getattr(trainer, "scale", 1.0)
    return cross_entropy(output, y, label_smoothing=trainer.config.smoothing) * scale


class Counting(Trainer):
    def step(self, x, y):
        loss = super().step(x, y)
        note(self)
        return loss


def note(trainer):
    trainer.global_step += 1


class Noting(Counting):
    """Writes what it never reads."""

    def step(self, x, y):
        loss = Trainer.step(self, x, y)
        note_size(self, x)
        return loss


def note_size(trainer, x):
    trainer.sizes = [*getattr(trainer, "sizes", ()), len(x)]


def train(step_twins, kind, calls=11):
    def make(model):
        return kind(model).step

    def between(i, model, fn, batch):
        trainer = fn.__self__
        trainer.after(trainer.model(batch[0]).sum().detach())
        if i == 4:
            trainer.config.smoothing = 0.1
        if i == 7:
            trainer.scale = 2.0  # it was not there before

    return step_twins.train(make, calls, between)


@pytest.mark.nightly
def test_a_trainer_that_counts_and_keeps_things(step_twins):
    step = train(step_twins, Trainer)
    assert step.captures == 3 and step.replays >= 3, explain(step)
    assert "config.smoothing changed from 0.0 to 0.1" in str([*step.in_python])


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_what_a_step_writes_is_a_fact(step_twins):
    step = step_twins.graphed(Noting(step_twins.model()).step)
    for _ in range(5):
        step(*step_twins.batch())
    assert step.captures == 0 and "len(self.sizes) changed from" in str([*step.in_python]), explain(step)


class Reading(Counting):
    """Reads what it counts, where no bytecode tells."""

    def step(self, x, y):
        loss = super().step(x, y)
        return loss * getattr(self, "global_" + "step")


class Setting(Counting):
    def step(self, x, y):
        global SETS
        SETS += 1
        loss = super().step(x, y)
        set_epoch(self)
        return loss


class InACircle(Counting):
    """No replay would do what happens when somebody sets the number."""

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value % 4 if type(value) is int else value)


SETS = 0


def set_epoch(trainer):
    global SETS
    SETS += 1
    trainer.epoch = 3


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
@pytest.mark.parametrize(("kind", "replays"), [(Counting, 5), (Reading, 0), (Setting, 0), (InACircle, 0)])
def test_an_object_that_is_passed_on_counts(step_twins, kind, replays):
    """It counts on, also from what the user sets."""
    trainers, results = [kind(step_twins.model()) for _ in range(2)], []
    for trainer, step in zip(trainers, (trainers[0].step, step_twins.graphed(trainers[1].step))):
        torch.manual_seed(1)
        trainer.epoch, found = 3, []
        for i in range(10):
            found.append([step(*step_twins.batch()).detach(), trainer.global_step, trainer.epoch])
            if i == 7:
                trainer.global_step = -4
            trainer.epoch = i if i > 5 else 3
        results.append(found)
    same(*results)
    assert step.replays >= replays and (replays or step.captures <= 2), explain(step)


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_what_is_in_the_way_is_what_the_step_looks_up(step_twins):
    """The first call changes something. No step reads its loader, so that is no reason."""
    step = step_twins.graphed(Counting(step_twins.model()).step)
    for _ in range(5):
        step(*step_twins.batch())
    assert not any(each in reason for reason in step.in_python for each in ("loader", "files")), step.in_python


def test_a_scheduler_that_only_the_loop_steps(step_twins):
    """The step's code names it, and does not look at it, as where a flag says who steps it."""

    def make(model, in_step=False):
        optimizer = SGD(model.parameters(), lr=torch.tensor(0.1, device=step_twins.device), momentum=0.9, fused=True)
        make.scheduler = scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if in_step:
                scheduler.step()
            return loss

        return step

    step = step_twins.train(make, 9, lambda *_: make.scheduler.step())
    assert step.captures == 1 and step.replays >= 5, explain(step)


def test_writes_to_other_attributes_collect_nothing(step_twins, monkeypatch):
    trainer = Trainer(step_twins.model())
    step = step_twins.graphed(trainer.step)
    for _ in range(5):
        step(*step_twins.batch())
    state = step.recordings[0].state
    assert state.holds()
    if not attribute_writes_are_reported():
        pytest.skip("Python 3.13.0 reports no writes to attributes")
    monkeypatch.setattr(state, "_collect_roots", lambda: 1 / 0)
    trainer.global_step += 1
    assert state.holds()


def test_what_dynamo_compiles_looks_attributes_up_unseen(step_twins):
    class Options:
        smoothing = 0.5

    options = Options()
    compiled = torch.compile(lambda y, options: y * (1 + options.smoothing), backend="eager")
    step = step_twins.graphed(lambda x, y: compiled(x, options))
    for _ in range(5):
        step(*step_twins.batch())
    state = step.recordings[0].state
    assert step._attributes.by_class() == {} and state.holds()
    options.unseen = 1
    assert not state.holds()


class Scale(nn.Module):
    def forward(self, x):
        return 2 * x


def test_what_the_package_looks_up_itself_is_not_the_steps(step_twins):
    """To undo a capture that fails, it looks at each object with a method that runs."""

    def make(model):
        modules = [Scale(), Scale()]
        return usual_step(model, compiled=lambda x: functools.reduce(lambda x, module: module(x), modules, model(x)))

    step = step_twins.train(make, 5)
    assert not any("attribute" in reason for reason in step.in_python), step.in_python


class CountsReads:
    def __init__(self):
        self.found, self.reads = [], 0

    @property
    def losses(self):
        self.reads += 1
        return self.found


def append_to(owner, loss):
    owner.losses.append(loss)


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_a_property_runs_as_often_as_the_step_reads_it(step_twins):
    owner = CountsReads()

    def fn(x, y):
        append_to(owner, x.sum())
        return x.sum()

    step = step_twins.graphed(fn)
    for i in range(8):
        step(*step_twins.batch())
        assert (len(owner.found), owner.reads) == (i + 1, i + 1)
