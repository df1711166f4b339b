"""A step may give tensors other memory, as in ``p.data = new``: see Note [Replaced storages]."""

from __future__ import annotations

import copy

import pytest
import torch
from support import same, sgd
from torch import nn
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")


class SharpnessAware(torch.optim.Optimizer):
    """It moves the parameters to where the loss is larger, and back for the update."""

    def __init__(self, parameters, base):
        super().__init__(parameters, {"rho": 0.05})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def up(self):
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"]]
        scale = 0.05 / (torch.stack(norms).norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def down(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base.step()
        self.zero_grad()


def sharpness_aware(model):
    optimizer = SharpnessAware(model.parameters(), sgd)

    def step(x, y):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.up()
        cross_entropy(model(x), y).backward()
        optimizer.down()
        return loss

    step.optimizer, step.tensors = optimizer, [*model.parameters()]
    step.kept = lambda: [optimizer.state[p]["before"] for p in model.parameters()]
    return step


def moving_average(model):
    optimizer = sgd(model.parameters())
    target = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(
        next(model.parameters()).device
    )

    def step(x, y):
        optimizer.zero_grad()
        with torch.no_grad():
            aim = target(x)
        loss = cross_entropy(model(x) + aim, y)
        loss.backward()
        optimizer.step()
        for now, average in zip(model.parameters(), target.parameters()):
            average.data = 0.9 * average.data + 0.1 * now.data
        return loss

    step.optimizer, step.tensors, step.kept = optimizer, [*target.parameters()], list
    return step


def by_hand(model):
    def step(x, y):
        loss = cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad
            p.grad = None
        return loss

    step.optimizer, step.tensors, step.kept = None, [*model.parameters()], list
    return step


STEPS = [sharpness_aware, moving_average, by_hand]


def why(step) -> str:
    return "\n".join(step.in_python)


@pytest.mark.parametrize("make", STEPS)
@pytest.mark.nightly_after(2)
def test_a_step_gives_tensors_other_memory(step_twins, make):
    seen, steps = [], []

    def between(i, model, fn, batch):
        seen.append(copy.deepcopy([[p.detach() for p in fn.tensors], fn.kept()]))

    step = step_twins.train(lambda model: steps.append(make(model)) or steps[-1], 10, between)
    same(seen[:10], seen[10:])
    assert step.replays >= 7, why(step)
    with torch.no_grad():
        steps[1].tensors[0].fill_(2.0)
    assert not steps[1].kept() or (steps[1].kept()[0] == 2).all()  # which has the memory of the parameter


def test_who_holds_memory_is_counted_while_dynamo_watches_frames(step_twins):
    """A call has more references to its arguments then. An error of Dynamo's may leave it so."""
    step = torch._dynamo.run(step_twins.train)(by_hand, 8)
    assert step.replays >= 5, why(step)


@pytest.mark.parametrize("make", STEPS)
@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("hold", ["a view", "a storage", "what the step keeps", "a row", "an array", "for a while"])
def test_who_holds_the_memory_before_has_what_was_there(step_twins, device, make, hold):
    if hold == "an array" and device == "cuda":
        pytest.skip("NumPy has no memory on a GPU")
    held = []

    def between(i, model, fn, batch):
        kept = fn.kept() or [p.data for p in fn.tensors]
        values = {
            "a view": [p.data for p in fn.tensors],
            "a storage": [p.untyped_storage() for p in fn.tensors],
            "what the step keeps": kept,
            "a row": [p.detach()[0] for p in fn.tensors],
            "an array": [p.detach().numpy() for p in fn.tensors] if device == "cpu" else [],
            "for a while": [p.data for p in fn.tensors],
        }
        if hold == "for a while" and i == 6:
            held.pop()
        if i == 4:
            held.append(values[hold])

    step = step_twins.train(make, 12, between)
    if hold != "for a while":
        one, other = held
        for a, b in zip(one, other):
            same(*(each.tolist() if hold == "a storage" else torch.as_tensor(each) for each in (a, b)))
    assert "somebody holds a tensor or the storage of the memory before" in why(step)
    assert step.replays >= 5, why(step)


@pytest.mark.parametrize("make", STEPS)
@pytest.mark.parametrize("max_recordings", [1, 4])
@pytest.mark.nightly_after(1)
def test_calls_in_python_and_of_other_shapes_in_between(step_twins, make, max_recordings):
    seen = []

    def between(i, model, fn, batch):
        if i % 4 == 3:
            fn(*(each[:3] for each in batch))
        seen.append(copy.deepcopy([p.detach() for p in fn.tensors]))

    step = step_twins.train(make, 16, between, max_recordings=max_recordings)
    same(seen[:16], seen[16:])
    assert step.replays >= 11 and step.captures == 1, why(step)


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("make", STEPS)
def test_two_layouts_of_the_batch(step_twins, make):
    results = []
    for is_graphed in (False, True):
        model = step_twins.model()
        torch.manual_seed(1)
        fn = make(model)
        step = step_twins.graphed(fn) if is_graphed else fn
        for i in range(18):
            step(*step_twins.batch(5 if i % 3 else 3))
        results.append([p.detach().clone() for p in (*model.parameters(), *fn.tensors)])
    same(*results)
    assert step.captures == 2 and step.replays >= 12, why(step)


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("make", STEPS)
def test_from_a_checkpoint_on(step_twins, make):
    saved = []

    def between(i, model, fn, batch):
        if i in (1, 5):
            optimizer = fn.optimizer and fn.optimizer.state_dict()
            saved[:] = copy.deepcopy([[p.detach() for p in fn.tensors], model.state_dict(), optimizer])
        if i in (3, 8):
            model.load_state_dict(saved[1])
            for p, then in zip(fn.tensors, saved[0]):
                p.data.copy_(then)
            if fn.optimizer is not None:
                fn.optimizer.load_state_dict(copy.deepcopy(saved[2]))

    step = step_twins.train(make, 16, between)
    assert step.replays >= 8, why(step)


def test_who_holds_the_memory_at_the_capture(step_twins):
    held = []

    def between(i, model, fn, batch):
        held.append([p.data for p in fn.tensors])
        if i % 20 > 2:
            del held[-1]

    step = step_twins.train(by_hand, 12, between)
    same(held[:3], held[3:])
    assert step.replays >= 6 and "somebody holds" in why(step), why(step)


def test_somebody_always_holds_the_memory_before(step_twins):
    seen, last = [], []

    def between(i, model, fn, batch):
        seen.append([p.detach() - then for p, then in zip(fn.tensors, last)])
        last[:] = [p.data for p in fn.tensors]

    step = step_twins.train(by_hand, 30, between)
    same(seen[1:30], seen[31:])
    assert step.captures <= 16 and "somebody holds a tensor" in why(step), why(step)


@pytest.mark.parametrize(
    "way", ["memory before", "memory after", "a part", "one for two", "of another one", "twice", "set_"]
)
def test_what_else_has_the_memory(step_twins, way):
    def make(model):
        weight, bias = torch.zeros(2, 4, device=step_twins.device)
        other = torch.ones(4, device=step_twins.device)

        def step(x, y):
            before, new = weight.data, weight + x.mean(0)
            if way == "set_":
                weight.set_(new)
            else:
                weight.data = new
            if way == "one for two":
                bias.data = new
            elif way == "of another one":
                bias.data = other.data
            elif way == "twice":
                weight.data = weight.data * 2
                weight.mul_(0.5)
            kept = {"memory before": before, "memory after": new, "a part": new[1:]}
            return kept.get(way, weight.sum()), weight * 1, bias * 1

        return step

    step = step_twins.train(make, 8)
    said = {
        "memory before": "keeps or returns the memory that weight had",
        "a part": "a part of the memory that weight",
    }
    said["one for two"] = "weight got other memory"
    assert said.get(way, "") in why(step)
    assert (step.replays >= 4) == (way not in said), why(step)


def test_what_a_capture_that_fails_has_moved_is_put_back(step_twins):
    def make(model):
        weight = torch.zeros(4, device=step_twins.device)

        def step(x, y):
            weight.data = weight + x.mean(0)
            return weight * (2.0 if weight.sum() > 0 else 1.0)

        return step

    step = step_twins.train(make, 8)
    assert step.captures == 0 and "the host reads a value" in why(step), why(step)


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("make", STEPS)
def test_the_model_is_called_between_steps(step_twins, make):
    """Its own graphs have the addresses of the parameters."""
    found = []

    def between(i, model, fn, batch):
        with torch.no_grad():
            found.append(model(batch[0]))
        if i % 3 == 2:
            model(batch[0]).sum().backward()
            model.zero_grad()

    step = step_twins.train(make, 14, between)
    same(found[:14], found[14:])
    assert step.replays >= 11, why(step)


def test_what_is_kept_shows_what_is_written_to_the_tensor(step_twins):
    def make(model):
        weight = torch.zeros(4, device=step_twins.device)
        kept = {"new": weight}

        def step(x, y):
            weight.add_(x.mean(0))
            seen = kept["new"] * 1
            kept["new"] = seen + 1
            weight.data = kept["new"]
            return seen

        return step

    assert (step := step_twins.train(make, 10)).replays >= 6, why(step)


@pytest.mark.parametrize("way", ["offset", "resize"])
@pytest.mark.nightly_after(1)
def test_a_tensor_moves_within_its_memory(step_twins, way):
    """Nobody else has the memory, so only the address shows it."""
    weights = []

    def make(model):
        weight = nn.Parameter(torch.zeros(4, device=step_twins.device))
        weights.append(weight)

        def step(x, y):
            weight.data = weight.data + x.mean(0)
            return weight * 1

        return step

    def between(i, model, fn, batch):
        if i == 0:  # before the capture
            weights[-1].data = torch.arange(8.0, device=step_twins.device)[4:]
        if i == 8:
            memory = weights[-1].data.untyped_storage()
            if way == "resize":
                others = [torch.zeros(4, device=step_twins.device) for _ in range(99)]  # which take what it gives back
                memory.resize_(2**16)
                del others
            start = 4 if way == "resize" and memory.nbytes() > 16 else 0
            weights[-1].data = torch.empty(0, device=step_twins.device).set_(memory, start, (4,), (1,)).fill_(i)

    step = step_twins.train(make, 12, between)
    assert step.replays >= 6, why(step)
