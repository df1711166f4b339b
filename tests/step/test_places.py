"""A step may put tensors that it makes where it has found others: they are there after a replay, too."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import same, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
LAST, STEPS = None, 0


@dataclass(slots=True)
class Slots:
    loss: Any = None
    calls: int = 0


class Keeper:
    epochs = 7

    def __init__(self, model):
        self.model, self.loss, self.before = model, torch.zeros((), device=model[0].weight.device), None
        self.before = self.loss


def attribute(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.loss = loss.detach()

    return keep, lambda: keeper.loss


def mean(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.loss = 0.9 * keeper.loss + 0.1 * loss.detach()

    keep.keeper = keeper
    return keep, lambda: keeper.loss


def the_last_two(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.before, keeper.loss = keeper.loss, loss.detach()

    return keep, lambda: [keeper.before, keeper.loss]


def variable(model):
    last = None

    def keep(loss, logits):
        nonlocal last
        last = loss.detach()

    return keep, lambda: last


def of_module(model):
    def keep(loss, logits):
        global LAST
        LAST = loss.detach()

    return keep, lambda: LAST


def items(model):
    metrics = {"a": {}}

    def keep(loss, logits):
        metrics["loss"] = loss.detach()
        metrics["a"]["logits"], metrics["row"] = logits.detach(), logits[1].detach()

    return keep, lambda: metrics


def items_of_lists(model):
    zeros = torch.zeros(5, 3, device=model[0].weight.device)
    hidden = [zeros, [zeros, (zeros, 7)], 3]

    def keep(loss, logits):
        hidden[0] = 0.5 * hidden[0] + logits.detach()
        hidden[1][0], hidden[-2][0] = hidden[0], logits.detach() + hidden[1][0]

    return keep, lambda: [hidden[0], hidden[1][0]]


def namespace(model):
    metrics = SimpleNamespace(loss=None)

    def keep(loss, logits):
        metrics.loss = loss.detach()

    return keep, lambda: metrics.loss


def slot(model):
    metrics = Slots()

    def keep(loss, logits):
        metrics.loss = loss.detach()

    return keep, lambda: metrics.loss


def another_dictionary(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.before = {"loss": loss.detach(), "both": (logits.detach(), [loss.detach()])}

    return keep, lambda: keeper.before


def replaced_by_what_its_method_gives(model):
    keeper = Keeper(model)
    keeper.before = {"loss": keeper.loss}

    def keep(loss, logits):
        keeper.before = {name: each * 0.5 + loss.detach() for name, each in keeper.before.items()}

    return keep, lambda: keeper.before


def buffer(model):
    model.register_buffer("center", torch.zeros(3, device=model[0].weight.device))

    def keep(loss, logits):
        model.center = 0.9 * model.center + 0.1 * logits.detach().mean(0)

    return keep, lambda: model.state_dict()


def one_tensor_in_two_places(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.loss = loss.detach() * (2 if keeper.loss is keeper.before else 1)
        keeper.before = keeper.loss

    return keep, lambda: [keeper.loss, keeper.before]


def state_of_an_optimizer(model):
    class Momentum(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["mean"] = 0.5 * state.get("mean", 0.0) + parameter.grad
                parameter.sub_(0.01 * state["mean"])

    optimizer = Momentum(model.parameters(), {})
    return lambda loss, logits: optimizer.step(), lambda: [*optimizer.state.values()]


KINDS = (
    attribute, mean, the_last_two, variable, of_module, items, items_of_lists, namespace, slot, another_dictionary,
    replaced_by_what_its_method_gives, buffer, state_of_an_optimizer, one_tensor_in_two_places,
)  # fmt: skip


def train(step_twins, make, graphed, between=lambda i, model: None, calls=9):
    """What is kept after each call, as it is at the end."""
    torch.manual_seed(0)
    model = step_twins.model(nn.Linear(4, 3))
    keep, kept = make(model)
    optimizer = sgd(model.parameters())

    def fn(x, y):
        optimizer.zero_grad()
        logits = model(x)
        loss = cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        keep(loss, logits)
        return loss

    torch.manual_seed(1)
    step, found = graphed(fn), []
    for i in range(calls):
        loss = step(*step_twins.batch())
        found.append(tree_map_only(torch.Tensor, torch.Tensor.detach, [loss, kept(), [*model.parameters()]]))
        between(i, model)
    return found, step


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.nightly_after(2)
def test_tensors_that_a_step_keeps(step_twins, make):
    step = step_twins.both(partial(train, step_twins, make))
    assert step.replays >= 4, step.in_python


def is_captured_anew_once(step_twins, run):
    step = step_twins.both(run)
    assert step.replays >= 7 and step.captures == 2, step.in_python


def test_the_user_may_change_what_is_carried(step_twins):
    """By a write, by another tensor, by one with another shape, by something else."""

    def run(graphed):
        keeper = None

        def make(model):
            nonlocal keeper
            keep, kept = mean(model)
            keeper = keep.keeper
            return keep, kept

        def between(i, model):
            if i == 4:
                keeper.loss.mul_(2)
            elif i in (6, 8, 10):
                keeper.loss = {6: torch.ones(()), 8: torch.ones(1), 10: 3.0}[i]
                keeper.loss = keeper.loss if i == 10 else keeper.loss.to(step_twins.device)

        return train(step_twins, make, graphed, between, calls=16)

    is_captured_anew_once(step_twins, run)


def adding_to_an_attribute(kept):
    def step(x):
        kept.sums.mean = 0.5 * kept.sums.mean + x.mean()
        return kept.sums.mean * 2

    return step


def adding_to_an_item(kept):
    def step(x):
        kept.sums["mean"] = 0.5 * kept.sums["mean"] + x.mean()
        return kept.sums["mean"] * 2

    return step


def adding_in_a_list(kept):
    def step(x):
        kept.sums[0] = 0.5 * kept.sums[0] + x.mean()
        return kept.sums[0] * 2

    return step


@pytest.mark.parametrize(
    ("add", "make"),
    [
        (adding_to_an_attribute, lambda mean: SimpleNamespace(mean=mean)),
        (adding_to_an_item, lambda mean: {"mean": mean}),
        (adding_in_a_list, lambda mean: [mean]),
    ],
)
def test_what_has_what_is_carried_may_be_replaced(step_twins, add, make):
    """By something that looks the same, while the step goes on writing what was there before."""

    def run(graphed):
        kept = SimpleNamespace(sums=make(torch.zeros((), device=step_twins.device)))
        step, results = graphed(add(kept)), []
        for i in range(12):
            if i == 6:
                kept.sums = make(torch.ones((), device=step_twins.device))
            results.append(step(step_twins.batch()[0]))
        return results, step

    step = step_twins.both(run)
    assert step.replays >= 5 and step.captures == 2, step.in_python


def test_an_object_may_get_another_dictionary(step_twins):
    def run(graphed):
        keepers = [Keeper(step_twins.model())]
        keepers[0].mean = torch.zeros((), device=step_twins.device)

        def keep(keeper, x):
            keeper.mean = 0.5 * keeper.mean + x.mean()
            return keeper.mean * 2

        step, results = graphed(lambda x: keep(keepers[0], x)), []
        for i in range(12):
            if i == 6:
                keepers[0].__dict__ = {**vars(keepers[0]), "mean": torch.ones((), device=step_twins.device)}
            results.append(step(step_twins.batch()[0]))
        return results, step

    step = step_twins.both(run)
    assert step.replays >= 5 and step.captures == 2, step.in_python


def test_what_is_carried_in_a_list_may_be_changed(step_twins):
    def make(model):
        zeros = torch.zeros((), device=model[0].weight.device)
        losses = [zeros, zeros.clone()]

        def keep(loss, logits):
            losses[0] = 0.5 * losses[0] + loss.detach() + losses[-1]

        return keep, lambda: [*losses], losses

    def between(i, losses):
        if i == 4:
            losses[1] = losses[1] + 1  # not carried
        elif i == 8:
            losses[0] = losses[0] * 2
        elif i == 10:
            losses.insert(0, losses[0] - 1)

    step = step_twins.both(partial(train_with, step_twins, make, between, 15))
    assert step.replays >= 7 and step.captures == 3, step.in_python


def test_a_list_to_which_the_step_appends_and_from_which_it_takes(step_twins):
    """The step reads what is in the list, too, which is as long afterwards."""

    def make(model):
        last = [torch.zeros((), device=model[0].weight.device), torch.ones((), device=model[0].weight.device)]

        def keep(loss, logits):
            last.append(loss.detach() + last.pop(0))
            return sum(last)

        return keep, lambda: [*last], last

    step = step_twins.both(partial(train_with, step_twins, make, lambda i, last: None, 9))
    assert step.captures == 1 and step.replays >= 4, step.in_python


def train_with(step_twins, make, between, calls, graphed):
    """`train` with what ``make`` returns behind its first two results, which ``between`` gets."""
    kept = []

    def make_and_keep(model):
        keep, found, *kept[:] = make(model)
        return keep, found

    return train(step_twins, make_and_keep, graphed, lambda i, model: between(i, *kept), calls=calls)


def appended(model):
    losses, keeper = [], Keeper(model)
    keeper.before = [torch.zeros((), device=keeper.loss.device)]

    def keep(loss, logits):
        losses.append(loss.detach())
        keeper.before.append((loss.detach(), {"logits": logits.detach()}))
        keeper.before.extend(row for row in logits.detach())

    return keep, lambda: (losses.copy(), keeper.before.copy()), losses, keeper


def test_lists_that_grow(step_twins):
    """The user may empty a list, and put another one in its place."""

    def between(i, losses, keeper):
        if i == 4:
            losses.clear()
        elif i in (6, 8):
            keeper.before = [] if i == 6 else losses

    is_captured_anew_once(step_twins, partial(train_with, step_twins, appended, between, 12))


class Counted(nn.Module):
    """Counts its calls and what it has seen, and keeps means, also in a list."""

    def __init__(self, of=None):
        super().__init__()
        self.steps, self.seen, self.means, self.of = 0, 0, [], of
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        self.batches += 1
        self.seen += x.shape[0] if x.dim() else 1
        self.means.append(x.detach().mean())
        return x / (1 + getattr(self, "steps")) if self.of == "getattr" else x  # noqa: B009


def count_for(passed_on):
    passed_on.calls += 1


def numbers(model):
    keeper, metrics, inner, calls = Keeper(model), Slots(0), Counted().to(model[0].weight.device), 0
    rows = columns = lengths = 0
    keeper.before = SimpleNamespace(seen=3)
    keeper.epochs = 1
    keeper.stats, keeper.left = {"steps": 0, "left": 9}, 5
    model.append(inner)

    def keep(loss, logits):
        nonlocal calls, rows, columns, lengths
        global STEPS
        size = logits.shape[0]
        calls += 1
        rows += logits.size(0)
        columns = columns + logits.shape[1]
        lengths -= len(logits)
        keeper.epochs += 1
        STEPS += size
        metrics.loss += 2 if size > 1 else 1
        keeper.before.seen += len(logits)
        keeper.stats["steps"] += len(logits)
        keeper.stats["left"] = keeper.stats["left"] - 1
        keeper.left = keeper.left + size
        count_for(metrics)

    def found():
        counts = STEPS, calls, metrics.loss, keeper.before.seen, keeper.epochs, inner.steps, inner.seen
        counts += (*keeper.stats.values(), keeper.left, metrics.calls, rows, columns, lengths)
        return torch.tensor([*counts, *inner.means])

    return keep, found, keeper, inner


def test_numbers_that_grow_and_are_read(step_twins):
    """The sum itself may be read: nothing is looked up twice then."""
    keeper, numbers, calls = SimpleNamespace(n=0), {"n": 0}, 0

    def of_an_attribute(x):
        keeper.n = i = keeper.n + 1
        return x + i

    def of_an_item(x):
        numbers["n"] = i = numbers["n"] + 1
        return x + i

    def of_a_variable(x):
        nonlocal calls
        return x + (calls := calls + 1)

    x = torch.zeros(2, device=step_twins.device)
    for fn in (of_an_attribute, of_an_item, of_a_variable):
        step = step_twins.graphed(fn)
        assert [step(x)[0].item() for _ in range(6)] == [1, 2, 3, 4, 5, 6], step.in_python


def test_numbers_that_grow(step_twins):
    """The user may set one, and put another object in the place of one that has it."""

    def between(i, keeper, inner):
        global STEPS
        if i == 4:
            STEPS, inner.steps, inner.means = 100, -5, []
        elif i == 6:
            keeper.before = SimpleNamespace(seen=2**40)
        elif i == 8:
            del keeper.epochs  # that of the class counts now
            keeper.stats = {"steps": 2**40, "left": 0}

    def run(graphed):
        global STEPS
        STEPS = 0
        return train_with(step_twins, numbers, between, 12, graphed)

    step = step_twins.both(run)
    assert step.replays >= 6, step.in_python


@pytest.mark.parametrize("reads", [False, True])
def test_a_dictionary_of_what_the_step_only_adds_to(step_twins, reads):
    """Tensors and numbers, which the loop sets back."""

    def run(graphed):
        meter = {}

        def adds(x):
            largest = x.max()
            meter["loss"] += x.sum()
            meter["n"] += len(x)
            meter["largest"] = meter["largest"] + largest
            return x * 2

        def adds_and_reads(x):
            return adds(x) * meter["n"]

        step, found = graphed(adds_and_reads if reads else adds), []
        for i in range(24):
            if i % 6 == 0:
                zeros = [torch.zeros((), device=step_twins.device) for _ in range(2)]
                meter.update(zip(("loss", "largest"), zeros), n=0)
            found.append(step(step_twins.batch()[0]))
            found += [meter["loss"].clone(), meter["largest"].clone(), torch.tensor(meter["n"])]
        return found, step

    step = step_twins.both(run)
    assert step.replays == 0 if reads else step.captures <= 2 and step.replays >= 19, step.in_python


class Smoothed:
    """Counts how often its mean is set."""

    def __init__(self, mean):
        self._mean, self.times = mean, 0

    @property
    def mean(self):
        return self._mean

    @mean.setter
    def mean(self, value):
        self._mean = value
        self.times += 1


def set_later(smoothed, value):
    smoothed._mean = value
    smoothed.times += 10


class SmoothedLater(Smoothed):
    mean = property(lambda self: self._mean, set_later)


@pytest.mark.parametrize("kind", [Smoothed, SmoothedLater])
def test_what_a_property_does_when_it_is_set(step_twins, kind):
    """No name leads to that function, which Python calls by itself."""

    def run(graphed):
        smoothed, found = kind(torch.zeros(2, device=step_twins.device)), []

        def fn(x):
            smoothed.mean = 0.9 * smoothed.mean + x
            return x

        step = graphed(fn)
        for _ in range(8):
            step(torch.rand(2, device=step_twins.device))
            found.append([smoothed.mean.clone(), smoothed.times])
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 3, step.in_python


def histories(model):
    device = model[0].weight.device
    keeper = Keeper(model)
    keeper.before = {"a.b": [], 1: {}}
    recent, latest, logs = deque(maxlen=3), deque([torch.zeros((), device=device)], maxlen=1), defaultdict(list)

    def keep(loss, logits):
        keeper.before["a.b"].append(loss.detach())
        recent.append(loss.detach())
        recent.extend([logits.detach(), loss.detach() * 2])
        latest.append((loss.detach(), logits.detach()))
        logs["loss"].append(loss.detach())
        logs.setdefault("double", []).append(loss.detach() * 2)

    def found():
        return [*keeper.before["a.b"], *recent, *latest, *logs["loss"], *logs["double"]]

    return keep, found, keeper, recent, logs


def test_histories_that_grow(step_twins):
    """In dictionaries, and in deques that drop what they had."""

    def between(i, keeper, recent, logs):
        if i == 4:
            recent.clear()
            logs.clear()
        elif i == 6:
            recent.append(torch.ones((), device=step_twins.device))
            keeper.before["a.b"] = []
        elif i == 8:
            keeper.before["a.b"] = logs["loss"]

    is_captured_anew_once(step_twins, partial(train_with, step_twins, histories, between, 14))


class Counting(dict):
    calls = 0

    def setdefault(self, key, default):
        self.calls += 1
        return super().setdefault(key, default)


def appends_to_a_mapping_of_its_own(model):
    history = Counting()

    def keep(loss, logits):
        history.setdefault("loss", []).append(loss.detach())

    return keep, lambda: [*history["loss"], torch.tensor(history.calls)]


def appends_a_history(model):
    losses = []
    return lambda loss, logits: losses.append(loss), lambda: [loss.detach() for loss in losses]


def appends_a_number(model):
    losses = []
    return lambda loss, logits: losses.append(1.0), lambda: losses.copy()


def appends_and_reads(model):
    losses = []

    def keep(loss, logits):
        losses.append(loss.detach())
        losses.append(loss.detach() * len(losses))

    return keep, lambda: losses.copy()


def appends_and_reads_an_item(model):
    history = {"loss": []}

    def keep(loss, logits):
        history["loss"].append(loss.detach())
        history["loss"].append(loss.detach() * len(history["loss"]))

    return keep, lambda: history["loss"].copy()


def drops_numbers(model):
    recent = deque([1.0, 2.0], maxlen=2)
    return lambda loss, logits: recent.append(loss.detach()) if loss.ndim else None, lambda: [*recent]


def appends_and_reads_elsewhere(model):
    keeper = Keeper(model)
    keeper.before = losses = []

    def keep(loss, logits):
        losses.append(loss.detach())
        keeper.loss = loss.detach() * sum(1 for _ in keeper.before)

    return keep, lambda: [*losses, keeper.loss]


def reads_a_history(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.before = keeper.loss.detach() + 1
        keeper.loss = loss

    return keep, lambda: keeper.before


def keeps_a_history(model):
    metrics = {"loss": None}

    def keep(loss, logits):
        metrics["loss"] = loss

    return keep, lambda: metrics


def writes_in_place(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.loss.mul_(0.5)
        keeper.loss = keeper.loss + loss.detach()

    return keep, lambda: keeper.loss


def changes_a_deque(model):
    losses = deque([torch.zeros((), device=model[0].weight.device)])
    same_list = losses

    def keep(loss, logits):
        losses[0] = loss.detach()

    return keep, lambda: same_list


def counts_and_reads(model):
    keeper, same_keeper = Keeper(model), []
    keeper.before = 0
    same_keeper.append(keeper)

    def keep(loss, logits):
        keeper.before += 1
        model[0].bias.data.mul_(1 / (1 + same_keeper[0].before))

    return keep, lambda: torch.tensor(keeper.before)


def counts_and_reads_by_name(model):
    keeper = Keeper(model)
    keeper.before = 0

    def keep(loss, logits):
        keeper.before += 1
        model[0].bias.data.mul_(1 / (1 + getattr(keeper, "before")))  # noqa: B009

    return keep, lambda: torch.tensor(keeper.before)


def counts_in_a_module_and_reads_by_name(model):
    model.append(Counted("getattr").to(model[0].weight.device))
    return lambda loss, logits: None, lambda: torch.tensor(model[-1].steps)


def adds_a_number_to_itself(model):
    keeper = Keeper(model)
    keeper.before = 1

    def keep(loss, logits):
        keeper.before += keeper.before

    return keep, lambda: torch.tensor(keeper.before)


def adds_a_fraction(model):
    keeper = Keeper(model)
    keeper.before = 1

    def keep(loss, logits):
        keeper.before += 0.1

    return keep, lambda: torch.tensor(keeper.before)


def counts(keeper):
    keeper.before = 0

    def keep(loss, logits):
        keeper.before += 1

    return keep, lambda: torch.tensor(keeper.before)


class Circle(Keeper):
    def __setattr__(self, name, value):
        object.__setattr__(self, name, value % 4 if type(value) is int else value)


def counts_in_a_circle(model):
    return counts(Circle(model))


def counts_in_a_circle_of_a_global(model):
    global CIRCLE
    CIRCLE = Circle(model)
    CIRCLE.before = 0

    def keep(loss, logits):
        CIRCLE.before += 1

    return keep, lambda: torch.tensor(CIRCLE.before)


def counts_in_a_circle_of_a_descriptor(model):
    class Circle:
        def __get__(self, keeper, kind=None):
            return self if keeper is None else vars(keeper)["before"]

        def __set__(self, keeper, value):
            vars(keeper)["before"] = value % 4 if type(value) is int else value

    return counts(type("Keeper", (Keeper,), {"before": Circle()})(model))


def keeps_one_list_twice(model):
    keeper, lists = Keeper(model), []

    def keep(loss, logits):
        keeper.before = [loss.detach()]
        lists.append(keeper.before)

    return keep, lambda: torch.tensor([each is keeper.before for each in lists])


def keeps_a_dictionary_of_before(model):
    keeper = Keeper(model)
    keeper.loss, keeper.before = {"loss": keeper.loss}, {"loss": keeper.loss}
    held = []

    def keep(loss, logits):
        keeper.before, keeper.loss = keeper.loss, {"loss": loss.detach()}

    def kept():
        held.append(keeper.loss)
        return torch.tensor([each is keeper.before for each in held])

    return keep, kept


def gives_an_attribute(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.loss = loss.detach()
        keeper.loss.tag = "loss"

    return keep, lambda: len(getattr(keeper.loss, "tag", ""))


def keeps_a_parameter(model):
    keeper = Keeper(model)

    def keep(loss, logits):
        keeper.before = model[0].weight.detach()

    return keep, lambda: keeper.before


def keeps_a_gradient(model):
    keeper = Keeper(model)
    keeper.loss = torch.zeros_like(model[0].bias)

    def keep(loss, logits):
        keeper.loss = model[0].bias.grad

    return keep, lambda: keeper.loss.clone()


def appends_a_gradient(model):
    gradients = []
    return lambda loss, logits: gradients.append(model[0].bias.grad.view(-1)), lambda: gradients.copy()


REFUSED = {
    keeps_a_gradient: "a tensor that the step keeps shares memory with another one that it uses; have it keep a clone",
    appends_a_gradient: "the step returns or keeps the memory of a gradient, which others may write; clone it",
    reads_a_history: "detach it at the end of the step: a graph keeps no history",
    keeps_a_history: "detach it at the end of the step: a graph keeps no history",
    writes_in_place: "the step writes to the tensor that it finds in keeper.loss (see test_places.py:",
    changes_a_deque: "losses[0] changed",
    appends_a_history: "without a history to losses (test_places.py:{line}); detach them, or return them",
    appends_a_number: "something else than tensors without a history to losses (test_places.py:{line})",
    appends_and_reads: "len(losses) changed",
    appends_to_a_mapping_of_its_own: "self.calls changed from",
    appends_and_reads_an_item: "len(history['loss']) changed",
    drops_numbers: "recent (test_places.py:{line}) has something else than tensors without a history; empty it before",
    appends_and_reads_elsewhere: "len(keeper.before) changed",
    counts_and_reads: "same_keeper[0].before changed from",
    counts_and_reads_by_name: "keeper.before changed from",
    counts_in_a_module_and_reads_by_name: "model.1.steps changed from",
    adds_a_number_to_itself: "keeper.before changed from",
    adds_a_fraction: "keeper.before changed from",
    counts_in_a_circle: "keeper.before changed from",
    counts_in_a_circle_of_a_global: "CIRCLE.before changed from",
    counts_in_a_circle_of_a_descriptor: "keeper.before changed from",
    gives_an_attribute: "keeper.loss changed",
    keeps_a_dictionary_of_before: "keep a copy, such as dict(metrics)",
    keeps_one_list_twice: "the step keeps a list in two places",
    keeps_a_parameter: "keeper.before changed",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_is_not_carried(step_twins, make):
    step = step_twins.both(partial(train, step_twins, make, calls=11))
    said = REFUSED[make].format(line=make.__code__.co_firstlineno + 2)
    if make is appends_a_history and step_twins.backend == "cuda":  # where the backward joins the streams of the others
        said = "a tensor with a history from before the step is still held"
    assert step.captures == 0 and said in str([*step.in_python]), step.in_python
    assert "set requires_grad back" not in str([*step.in_python])


def test_one_tensor_stays_one(step_twins):
    """A result, an argument that is returned, what is kept, and what is appended, also of the step before."""

    def run(graphed):
        torch.manual_seed(0)
        model, losses, last = step_twins.model(nn.Linear(4, 3)), [], deque(maxlen=2)
        keeper, optimizer = Keeper(model), sgd(model.parameters())
        shifts = [torch.zeros((), device=step_twins.device) for _ in range(2)]

        def step(x, y):
            nonlocal shifts
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            keeper.loss = kept = loss.detach()
            shifts = [kept, shifts[0]]
            losses.extend((kept, kept))
            last.append(kept)
            return kept, kept, x, kept.view(1), loss, loss

        step = graphed(step)
        found = []
        for _ in range(9):
            (x, y), before = step_twins.batch(), shifts
            results = step(x, y)
            same_as_first = [results[1], keeper.loss, *losses[-2:], last[-1], shifts[0], shifts[1]]
            found.append(torch.tensor([each is results[0] for each in same_as_first]))
            found.append(torch.tensor([results[2] is x, shifts[1] is before[0], results[4] is results[5]]))
            results[0].add_(1)
            found += [each.detach().clone() for each in (*results, *shifts, *losses)]
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 5, step.in_python


def test_a_dictionary_that_the_step_keeps_and_returns(step_twins):
    """It gives what the step has put there, not what was there before."""
    metrics = {"sum": torch.zeros((), device=step_twins.device)}

    def fn(x, y):
        metrics["sum"] = x.sum()
        return metrics

    step = step_twins.graphed(fn)
    for _ in range(6):
        x, y = step_twins.batch()
        same([step(x, y)["sum"], metrics["sum"]], [x.sum(), x.sum()])
    assert step.replays >= 2, step.in_python


def test_an_argument_that_is_carried(step_twins):
    def run(graphed):
        torch.manual_seed(0)
        layer, keeper = nn.Linear(4, 4).to(step_twins.device), SimpleNamespace(last=None)
        optimizer = sgd(layer.parameters())

        def step(x):
            optimizer.zero_grad()
            y = layer(x)
            (y.square().mean() * (2 if x is keeper.last else 1)).backward()
            optimizer.step()
            keeper.last = y.detach()
            return keeper.last

        step = graphed(step)
        keeper.last = step_twins.batch()[0]
        found = [step(keeper.last if i % 4 == 3 else step_twins.batch()[0]).clone() for i in range(12)]
        return [*found, *layer.parameters()], step

    step = step_twins.both(run)
    assert step.replays >= 5 and "an argument shares memory with" in str([*step.in_python]), step.in_python


def set_back(kept, seen, i, zeros):
    """The loop holds what it has set."""
    kept.total, kept.items["count"] = zeros(()), zeros((), dtype=torch.long)
    seen += [kept.total, kept.items["count"]]


def set_back_to_rows(kept, seen, i, zeros):
    seen += [] if seen else [zeros(20, 4)]
    kept.total = seen[0][i]


def set_back_to_one(kept, seen, i, zeros):
    """Now both are one tensor, now two, as the step sees in both."""
    kept.total = kept.other = zeros(3)
    kept.other = kept.other if i % 2 else zeros(3)


def set_back_to_shared_memory(kept, seen, i, zeros):
    kept.total = zeros(3)
    kept.other = kept.total.detach() if i > 1 else zeros(3)


def set_back_to_a_parameter(kept, seen, i, zeros):
    kept.total = kept.layer.bias.data if i > 1 else zeros(3)


def set_back_to_a_number(kept, seen, i, zeros):
    kept.total = 0.0


def set_back_to_what_has_gaps(kept, seen, i, zeros):
    kept.total = zeros(8)[::2]


def set_back_to_what_was_there(kept, seen, i, zeros):
    seen += [] if seen else [zeros(()), zeros(())]
    kept.total = seen[i % 2]


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize(
    ("sets", "captures", "replays"),
    [
        (set_back, 2, 15),
        (set_back_to_rows, 2, 15),
        (set_back_to_one, 3, 14),
        (set_back_to_shared_memory, 2, 3),
        (set_back_to_a_parameter, 2, 3),
        (set_back_to_a_number, 2, 11),
        (set_back_to_what_has_gaps, 5, 9),
        (set_back_to_what_was_there, 2, 15),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.nightly_after(4)
def test_totals_that_the_loop_sets_back(step_twins, sets, captures, replays, by_data):
    """As each epoch begins. They are what the step adds to, wherever they are, and stay the tensors that they were."""

    def run(graphed):
        torch.manual_seed(0)
        zeros, seen = partial(torch.zeros, device=step_twins.device), []
        kept = SimpleNamespace(other=zeros(3), items={"count": zeros((), dtype=torch.long)})
        kept.layer = nn.Linear(4, 3).to(step_twins.device)
        optimizer = sgd(kept.layer.parameters())

        def step(x):
            optimizer.zero_grad()
            loss = kept.layer(x).square().mean()
            loss.backward()
            optimizer.step()
            if type(kept.total) is float:
                kept.total = kept.total + loss.detach()
            elif by_data:
                kept.total.data.add_(loss.detach())
            else:
                kept.total += loss.detach()
            kept.other += 2 * loss.detach()
            kept.items["count"] += len(x)
            return loss

        step, found = graphed(step), []
        for i in range(20):
            if i % 4 == 0:
                sets(kept, seen, i // 4, zeros)
            total = kept.total
            loss = step(step_twins.batch()[0])
            stays = torch.tensor(total is kept.total)
            all_of_it = [loss, kept.total, kept.other, kept.items, seen, [*kept.layer.parameters()], stays]
            found.append(tree_map_only(torch.Tensor, lambda t: t.detach().clone(), all_of_it))
        return found, step

    step = step_twins.both(run)
    assert step.captures <= captures and step.replays >= replays, step.in_python


def test_a_total_that_a_history_has_had(step_twins):
    """What is written back advances the version, as a write does, and nothing else has it."""

    def run(graphed):
        kept, w = SimpleNamespace(total=torch.zeros(3, device=step_twins.device)), torch.ones(3, requires_grad=True)
        w = w.to(step_twins.device)

        def step(x):
            kept.total += x.sum()
            return x * 2

        step, found = graphed(step), []
        for i in range(12):
            kept.total = torch.ones(3, device=step_twins.device)
            product = (w * kept.total).sum()
            step(step_twins.batch()[0])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
            found += [kept.total.clone(), torch.tensor(kept.total._version)] if i > 2 else []
        return found, step

    step = step_twins.both(run)
    assert step.captures == 1 and step.replays >= 9, step.in_python


def gets_other_memory(kept, loss):
    kept.total.data = kept.total.data + loss


def is_left_a_gradient(kept, loss):
    kept.total.requires_grad_()
    (kept.total * loss).sum().backward()
    kept.total.requires_grad_(False)


def is_asked_for_its_address(kept, loss):
    kept.total += loss * (2 if kept.total.data_ptr() == kept.pointer else 3)


def is_asked_for_its_identity(kept, loss):
    kept.total += loss * (2 if id(kept.total) == kept.identity else 3)


def is_asked_for_its_identity_by_a_variable(kept, loss):
    total = kept.total
    total += loss * (2 if id(total) == kept.identity else 3)


@pytest.mark.parametrize(
    "does",
    [
        gets_other_memory,
        is_left_a_gradient,
        is_asked_for_its_address,
        is_asked_for_its_identity,
        is_asked_for_its_identity_by_a_variable,
    ],
    ids=lambda value: value.__name__,
)
def test_a_total_that(step_twins, does):
    """What a copy does not show runs in Python."""

    def run(graphed):
        kept = SimpleNamespace()

        def step(x):
            does(kept, x.sum())

        step, found = graphed(step), []
        for i in range(16):
            if i % 4 == 0:
                kept.total = torch.zeros(3, device=step_twins.device) if i < 8 else kept.total
                kept.pointer, kept.identity = kept.total.data_ptr(), id(kept.total)
            step(step_twins.batch()[0])
            found += [kept.total.clone(), torch.zeros(3) if kept.total.grad is None else kept.total.grad.clone()]
        return found, step

    step = step_twins.both(run)
    assert step.replays <= 4, step.in_python


@pytest.mark.parametrize("is_of", ["total", "state", "batch"])
def test_storages_that_overlap(step_twins, is_of):
    """They begin elsewhere, as those of slices of one NumPy array do."""

    def run(graphed):
        def part(whole, start):
            return torch.from_dlpack(whole[start : start + 4])

        kept, zeros = SimpleNamespace(), partial(torch.zeros, device=step_twins.device)
        kept.total, kept.other, fixed, wholes = zeros(4), zeros(4), zeros(8), []
        end = part(fixed, 4)

        def step(x):
            kept.total += 1
            kept.other += kept.total.sum()
            fixed.add_(kept.other.sum())
            end.add_(x.sum())
            return x * kept.total

        step, found = graphed(step), []
        for i in range(20):
            if i % 4 == 0:
                kept.total, kept.other, wholes = zeros(4), zeros(4), [*wholes, zeros(8)]
                if i > 4:
                    kept.total = part(wholes[-1], 0)
                    kept.other = part(wholes[-1], 2) if is_of == "total" else kept.other
                    kept.total = part(fixed, 2) if is_of == "state" else kept.total
            x = part(wholes[-1], 2) if is_of == "batch" else zeros(4) + i
            found += [each.clone() for each in (step(x), kept.total, kept.other, fixed, *wholes)]
        return found, step

    step = step_twins.both(run)
    assert step.replays and "shares memory" in str([*step.in_python]), step.in_python


def test_a_total_that_is_carried_no_more(step_twins):
    """One with a history is compared, as if nothing had ever been carried there."""

    def run(graphed):
        kept = SimpleNamespace()

        def scaled(kept, x):
            return (kept.total * x.sum()).detach()

        def step(x):
            return scaled(kept, x)

        step, found = graphed(step), []
        for i in range(32):
            if i % 4 == 0:
                ones = torch.ones(3, device=step_twins.device, requires_grad=i % 8 == 4)
                kept.total = ones * (i + 1)
            found.append(step(step_twins.batch()[0]))
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 16, step.in_python


def test_a_nested_tensor_that_the_loop_replaces(step_twins):
    """Which has no shape."""

    def run(graphed):
        kept = SimpleNamespace()

        def step(x):
            return kept.total.to_padded_tensor(0.0) * x.sum()

        step, found = graphed(step), []
        for i in range(8):
            parts = [torch.ones(n, device=step_twins.device) * i for n in (2, 3)]
            kept.total = torch.nested.nested_tensor(parts)
            found.append(step(step_twins.batch()[0]))
        return found, step

    step = step_twins.both(run)
    assert not step.replays, step.in_python


@pytest.mark.parametrize("is_argument", [False, True])
def test_writes_that_no_version_counts(step_twins, is_argument):
    """To an argument, or to a tensor with gaps that an earlier call has put there. The one of the capture is done."""

    def run(graphed):
        kept = SimpleNamespace()

        def step(x, is_first=False):
            if is_argument:
                x.data.add_(1)
            elif is_first:
                kept.total = torch.empty_strided((3,), (2,), device=x.device).fill_(0.0)
            else:
                kept.total.data.add_(x.sum())
            return x * 2

        step, found = graphed(step), []
        kept.total = torch.zeros(6, device=step_twins.device)[::2]
        for i in range(16):
            x = step_twins.batch()[0]
            found += [step(x, is_first=i % 8 < 3), x, kept.total.clone()]
        return found, step

    step = step_twins.both(run)
    assert ", such as through .data; clone it first" in str([*step.in_python]), step.in_python


def test_a_view_of_a_total_that_the_step_returns(step_twins):
    """A write to the view is one to the total, as autograd sees."""

    def run(graphed):
        kept, w = SimpleNamespace(), torch.ones(3, device=step_twins.device, requires_grad=True)

        def step(x):
            kept.total += x.sum()
            return kept.total[1:]

        step, found = graphed(step), []
        for _ in range(12):
            kept.total = torch.ones(3, device=step_twins.device)
            view = step(step_twins.batch()[0])
            product = (w * kept.total).sum()
            view.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
            found += [view.clone(), kept.total.clone()]
        return found, step

    step = step_twins.both(run)
    assert step.captures == 1 and step.replays >= 9, step.in_python


def test_totals_whose_labels_are_the_same(step_twins):
    """The key of one is the position of the other one's key, which has no text."""

    def run(graphed):
        zeros = partial(torch.zeros, 3, device=step_twins.device)
        totals, which = {(1, 2): zeros(), 0: zeros()}, [(1, 2), 0]

        def add(totals, x):
            for i, key in enumerate(which):
                totals[key] += x.sum() * (i + 1)

        def step(x):
            add(totals, x)

        step, found = graphed(step), []
        for i in range(24):
            if i % 4 == 0:
                totals[which[i // 4 % 2]] = zeros()
            step(step_twins.batch()[0])
            found += [each.clone() for each in totals.values()]
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 9, step.in_python


def test_identities_of_others_than_the_total(step_twins):
    """The step may ask for those of its parameters."""

    def run(graphed):
        kept, layer = SimpleNamespace(), step_twins.model(nn.Linear(4, 3))

        def step(x):
            kept.total += x.sum() * len({id(each) for each in layer.parameters()})

        step, found = graphed(step), []
        for i in range(16):
            if i % 4 == 0:
                kept.total = torch.zeros(3, device=step_twins.device)
            step(step_twins.batch()[0])
            found.append(kept.total.clone())
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 12, step.in_python


TOTAL, THIS = None, sys.modules[__name__]


def add_to_total(value, by):
    global TOTAL
    if by == "global":
        TOTAL += value
    elif by == "both":
        THIS.TOTAL = TOTAL + value
    else:
        THIS.TOTAL += value


@pytest.mark.parametrize("by", ["global", "both", "module"])
def test_a_total_that_is_a_global_and_an_attribute_of_its_module(step_twins, by):
    """Two places are one then."""

    def run(graphed):
        def step(x):
            before = TOTAL * 2 + THIS.TOTAL
            add_to_total(x.sum(), by)
            return before, TOTAL

        step, found = graphed(step), []
        for i in range(16):
            if i % 4 == 0:
                THIS.TOTAL = torch.zeros(3, device=step_twins.device)
            found += [each.clone() for each in (*step(step_twins.batch()[0]), TOTAL)]
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 10, step.in_python


@pytest.mark.parametrize("adds", ["attribute", "item"])
def test_a_total_in_an_attribute_and_in_an_item_of_one_name(step_twins, adds):
    def run(graphed):
        totals, zeros = OrderedDict(), partial(torch.zeros, 3, device=step_twins.device)
        totals["sum"] = totals.sum = zeros()

        def step(x):
            if adds == "attribute":
                totals.sum += x.sum()
            else:
                totals["sum"] += x.sum()
            result = totals.sum * 2
            totals.sum += 1
            return result

        step, found = graphed(step), []
        for i in range(24):
            if i % 6 == 3:
                totals["sum"] = totals.sum = zeros()
            elif i % 6 == 0:
                totals.sum = zeros()
            found += [each.clone() for each in (step(step_twins.batch()[0]), totals["sum"], totals.sum)]
        return found, step

    step = step_twins.both(run)
    assert step.replays >= 8, step.in_python
