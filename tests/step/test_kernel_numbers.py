"""Numbers of fused optimizers that change between steps: one graph for all, where nothing but kernels reads them."""

from __future__ import annotations

import functools
import operator
import threading
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType, SimpleNamespace

import numpy
import pytest
import torch
from support import usual_step
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, CyclicLR, OneCycleLR, ReduceLROnPlateau

from thunder_cg import explain
from thunder_cg.step.numbers import GroupNumbers, KernelNumbers, NumbersRead, StandIns

CALLS = 10


def why(step):
    return f"{step.captures} captures, {step.replays} replays\n{explain(step)}"


def fused(kind, device, **options):
    return partial(kind, fused=True, **({} if kind is SGD else {"capturable": device == "cuda"}), **options)


def scheduled(make_scheduler, make_optimizer, step_of=usual_step):
    """Makes a step, and has a scheduler follow each call."""

    def make(model):
        step = step_of(model, make_optimizer)
        step.scheduler = make_scheduler(step.optimizer)
        return step

    def between(i, model, fn, batch):
        fn.scheduler.step(*([1.0] if isinstance(fn.scheduler, ReduceLROnPlateau) else []))

    return make, CALLS, between


SCHEDULES = {
    "one cycle": (AdamW, {}, partial(OneCycleLR, max_lr=0.1, total_steps=40)),
    "one cycle, Adam": (Adam, {"weight_decay": 0.1, "amsgrad": True}, partial(OneCycleLR, max_lr=0.1, total_steps=40)),
    "one cycle, momentum": (SGD, {"momentum": 0.9, "lr": 0.1}, partial(OneCycleLR, max_lr=0.1, total_steps=40)),
    "cyclic": (SGD, {"momentum": 0.9, "lr": 0.1, "nesterov": True}, partial(CyclicLR, base_lr=0.01, max_lr=0.1)),
    "cosine": (SGD, {"lr": 0.1, "weight_decay": 0.01}, partial(CosineAnnealingLR, T_max=20)),
    "plateau": (AdamW, {"maximize": True}, partial(ReduceLROnPlateau, patience=0)),
    "one cycle, rate in a tensor": (AdamW, {"lr": None}, partial(OneCycleLR, max_lr=0.1, total_steps=40)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers(step_twins, name):
    kind, options, scheduler = SCHEDULES[name]
    if "lr" in options and options["lr"] is None:
        options = options | {"lr": torch.tensor(0.01, device=step_twins.device)}
        make_optimizer = lambda p: fused(kind, step_twins.device, lr=options["lr"].clone())(p)  # noqa: E731
    else:
        make_optimizer = fused(kind, step_twins.device, **options)
    step = step_twins.train(*scheduled(scheduler, make_optimizer))
    assert step.captures == 1 and step.replays >= CALLS - 3, why(step)
    is_number = "lr" not in options or not isinstance(options["lr"], torch.Tensor)
    assert ("; replays set lr, " if is_number else "; replays set ") in str(explain(step))


def test_an_optimizer_of_which_the_step_names_only_what_a_scheduler_has_replaced(step_twins):
    """`step` is a function then, which is bound to nothing."""

    def step_of(model, make_optimizer):
        optimizer = make_optimizer(model.parameters())

        def step(x, y):
            model.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step.optimizer = optimizer
        return step

    make = scheduled(partial(CosineAnnealingLR, T_max=20), fused(AdamW, step_twins.device), step_of)
    step = step_twins.train(*make)
    assert step.captures == 1 and step.replays >= CALLS - 3, why(step)


def sets(**changes):
    """Sets numbers of the first group of the optimizer after each call."""

    def between(i, model, fn, batch):
        for key, value in changes.items():
            fn.optimizer.param_groups[0][key] = value(i)

    return between


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (AdamW, {"weight_decay": lambda i: numpy.float64(0.1 * i), "eps": lambda i: 1e-8 * (i + 1)}),
        (AdamW, {"betas": lambda i: (0.9 - i / 100, 0.99), "lr": lambda i: i % 2}),
        (SGD, {"dampening": lambda i: 0.1 * (i + 1), "lr": lambda i: 0.1 / (i + 1)}),
    ],
)
def test_other_numbers(step_twins, kind, changes):
    """Decay and epsilon may change as well, to a number of NumPy or a whole one."""
    options = {"momentum": 0.5} if kind is SGD else {}
    make = partial(usual_step, make=fused(kind, step_twins.device, **options))
    step = step_twins.train(make, CALLS, sets(**changes))
    assert step.captures == 1 and step.replays >= CALLS - 4, why(step)


def test_groups_have_their_own(step_twins):
    def groups(parameters):
        first, *others = parameters
        numbers = [{"params": [first], "lr": 0.1, "betas": (0.5, 0.9)}, {"params": others, "weight_decay": 0.0}]
        return fused(AdamW, step_twins.device)(numbers)

    def between(i, model, fn, batch):
        first, second = fn.optimizer.param_groups
        first["lr"], second["lr"], second["betas"] = 0.1 / (i + 2), 0.01 * i, (0.9, 0.9 + i / 200)

    step = step_twins.train(partial(usual_step, make=groups), CALLS, between)
    assert step.captures == 1 and step.replays >= CALLS - 3, why(step)


def test_a_group_without_gradients_keeps_the_graph(step_twins):
    """No kernel gets its numbers."""

    def groups(parameters):
        first, *others = parameters
        first.requires_grad_(False)
        return fused(AdamW, step_twins.device)([{"params": [first], "lr": 0.1}, {"params": others}])

    def between(i, model, fn, batch):
        for group in fn.optimizer.param_groups:
            group["lr"] *= 0.9

    step = step_twins.train(partial(usual_step, make=groups), CALLS, between)
    assert step.captures == 1 and step.replays >= CALLS - 3, why(step)


def test_two_optimizers(step_twins):
    def make(model):
        first, *others = model.parameters()
        one, other = (fused(kind, step_twins.device, lr=0.1)(p) for kind, p in ((SGD, [first]), (AdamW, others)))

        def step(x, y):
            loss = cross_entropy(model(x), y)
            loss.backward()
            for each in (one, other):
                each.step()
                each.zero_grad()
            return loss

        step.optimizers = one, other
        return step

    def between(i, model, fn, batch):
        for each in fn.optimizers:
            each.param_groups[0]["lr"] = 0.1 / (i + 1)

    step = step_twins.train(make, CALLS, between)
    assert step.captures == 1 and step.replays >= CALLS - 3, why(step)


def test_numbers_of_a_checkpoint(step_twins):
    """It has new dictionaries, with other numbers in them."""

    def between(i, model, fn, batch):
        state = fn.optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.1 / (i + 1)
        if i % 4 == 3:
            fn.optimizer.load_state_dict(state)
        else:
            fn.optimizer.param_groups[0]["betas"] = 0.8 + i / 100, 0.99

    step = step_twins.train(partial(usual_step, make=fused(AdamW, step_twins.device)), 16, between)
    assert step.replays >= 6, why(step)


def test_accumulation(step_twins):
    """The graph of a micro-batch has no kernel that takes numbers."""

    def make(model):
        optimizer = fused(AdamW, step_twins.device)(model.parameters())

        def step(x, y):
            (cross_entropy(model(x), y) / 2).backward()
            if len(x) == 5:
                optimizer.step()
                optimizer.zero_grad()

        step.optimizer = optimizer
        return step

    def run(graphed):
        model = step_twins.model()
        fn = make(step_twins.compiled(model))
        step = graphed(fn)
        for i in range(20):
            step(*step_twins.batch(5 if i % 2 else 3))
            fn.optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
        return [*model.parameters()], step

    step = step_twins.both(run)
    assert step.captures == 2 and step.replays >= 12, why(step)
    assert str(explain(step)).count("; replays set lr, betas, weight_decay, eps") == 1


def test_optimizers_in_another_order(step_twins):
    """The attributes of a module have an order, in which nothing else differs."""

    def make(model):
        box = torch.nn.Identity()
        first, *others = model.parameters()
        box.one = fused(AdamW, step_twins.device, lr=0.1)([first])
        box.other = fused(SGD, step_twins.device, lr=0.2, momentum=0.9)(others)

        def update(box):
            for each in (getattr(box, name) for name in ("one", "other")):
                each.step()
                each.zero_grad()

        def step(x, y):
            loss = cross_entropy(model(x), y)
            loss.backward()
            update(box)
            return loss

        step.box = box
        return step

    def between(i, model, fn, batch):
        if i == 5:
            first = fn.box.one
            del fn.box.one
            fn.box.one = first
        fn.box.one.param_groups[0]["lr"] = 0.1 / (i + 1)

    assert step_twins.train(make, CALLS, between).replays >= 4


@pytest.mark.parametrize(("key", "value"), [("betas", (0.9,)), ("betas", (0.9, 0.9, 0.9)), ("lr", (0.1,))])
def test_what_no_kernel_takes_raises_as_in_python(step_twins, key, value):
    model = step_twins.compiled(step_twins.model())
    fn = usual_step(model, fused(AdamW, step_twins.device))
    step = step_twins.graphed(fn)
    for _ in range(4):
        step(*step_twins.batch())
    assert step.replays >= 1, why(step)
    fn.optimizer.param_groups[0][key] = value
    with pytest.raises((TypeError, ValueError)):
        step(*step_twins.batch())


# ------------------------------------------------------------------------------------ what reads the numbers itself


def names_groups(optimizer, box):
    return lambda loss: loss * 2.0 ** optimizer.param_groups[0]["lr"]


def has_a_group(optimizer, box):
    group = optimizer.param_groups[0]
    return lambda loss: loss * 2.0 ** group["lr"]


def has_the_groups(optimizer, box):
    groups = optimizer.param_groups
    return lambda loss: loss * 2.0 ** [*groups[0].values()][1]


def gets_a_group(optimizer, box):
    def scale(loss, group=optimizer.param_groups[0]):
        return loss * 2.0 ** group["lr"]

    return scale


def has_it_bound(optimizer, box):
    return partial(lambda group, loss: loss * 2.0 ** group["lr"], optimizer.param_groups[0])


def finds_it_in_an_object(optimizer, box):
    box.found = SimpleNamespace(inner=SimpleNamespace(numbers=optimizer.param_groups[0]))
    return lambda loss: scaled(box, loss)


def scaled(box, loss):
    for name in ("inner", "numbers"):
        box = getattr(getattr(box, "found", box), name)
    return loss * 2.0 ** box["lr"]


def asks_for_its_state(optimizer, box):
    return lambda loss: loss * 2.0 ** optimizer.state_dict()["param_groups"][0]["lr"]


def asks_by_name(optimizer, box):
    return lambda loss: (
        loss * 2.0 ** getattr(optimizer, "param_" + "groups" if box is None else "param_groups")[0]["lr"]
    )


def asks_vars(optimizer, box):
    return lambda loss: loss * 2.0 ** vars(optimizer)["param_groups"][0]["lr"]


def in_a_helper(optimizer, box):
    @functools.wraps(scaled)
    def helper(loss):
        return names_groups(optimizer, box)(loss)

    return {"helper": helper}["helper"]


NAME = "param_groups"


def asks_by_a_name_that_a_variable_has(optimizer, box):
    return lambda loss: loss * 2.0 ** getattr(optimizer, NAME)[0]["lr"]


def has_a_getter(optimizer, box):
    get = operator.attrgetter(NAME)
    return lambda loss: loss * 2.0 ** get(optimizer)[0]["lr"]


def has_the_name_bound(optimizer, box):
    get = partial(getattr, optimizer, NAME)
    return lambda loss: loss * 2.0 ** get()[0]["lr"]


def looks_at_all_it_has(optimizer, box):
    return lambda loss: loss * 2.0 ** next(v for v in vars(optimizer).values() if isinstance(v, list))[0]["lr"]


def passes_the_class_by(optimizer, box):
    return lambda loss: loss * 2.0 ** object.__getattribute__(optimizer, NAME)[0]["lr"]


def has_a_view_of_it(optimizer, box):
    numbers = optimizer.param_groups[0].values()
    return lambda loss: loss * 2.0 ** [*numbers][1]


def has_a_proxy_of_it(optimizer, box):
    group = MappingProxyType(optimizer.param_groups[0])
    return lambda loss: loss * 2.0 ** group["lr"]


def refuses_other_numbers(optimizer, box):
    allowed = [0.1 / (1 + i) for i in range(4)]
    return lambda loss: loss * allowed.index(optimizer.state_dict()["param_groups"][0]["lr"])


def is_in_the_optimizer(optimizer, box):
    """A function that somebody has put into PyTorch's."""
    init = optimizer._init_group

    def init_group(group, *args):
        for each in group["params"]:
            each.data.mul_(1 - group["lr"])
        return init(group, *args)

    optimizer._init_group = init_group
    return lambda loss: loss


READERS = [
    names_groups,
    has_a_group,
    has_the_groups,
    gets_a_group,
    has_it_bound,
    finds_it_in_an_object,
    asks_for_its_state,
    asks_by_name,
    asks_vars,
    in_a_helper,
    asks_by_a_name_that_a_variable_has,
    has_a_getter,
    has_the_name_bound,
    looks_at_all_it_has,
    passes_the_class_by,
    has_a_view_of_it,
    has_a_proxy_of_it,
    refuses_other_numbers,
    is_in_the_optimizer,
]


@pytest.mark.nightly_after(9)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("changes", [True, False])
def test_what_reads_a_number_gets_it(step_twins, reader, changes):
    """The graph is for one learning rate then."""

    def make(model):
        optimizer = fused(AdamW, step_twins.device, lr=0.1)(model.parameters())
        scale = reader(optimizer, SimpleNamespace())

        def step(x, y):
            optimizer.zero_grad()
            loss = scale(cross_entropy(model(x), y))
            loss.backward()
            optimizer.step()
            return loss

        step.optimizer = optimizer
        return step

    between = sets(lr=lambda i: 0.1 / (1 + i // 4)) if changes else None
    step = step_twins.train(make, 16, between)
    assert step.captures >= (2 if changes else 1) and step.replays >= 3, why(step)


def clips_each_group(optimizer):
    def clip():
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], 0.1)

    return clip


def clips_all_groups(optimizer):
    return lambda: clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def clips_the_first_group(optimizer):
    box = SimpleNamespace(optimizer=optimizer)
    return lambda: clip_grad_norm_(box.optimizer.param_groups[0]["params"], 0.1)


def clips_what_a_helper_finds(optimizer):
    def parameters_of(found):
        return [p for group in found.param_groups for p in group["params"] if p.grad is not None]

    return lambda: clip_grad_norm_(parameters_of(optimizer), 0.1)


def clips_and_reads_in_one_loop(optimizer):
    def clip():
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], group["lr"])

    return clip


def clips_and_reads_elsewhere(optimizer):
    def clip():
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], 0.1)
        for found in reversed(optimizer.param_groups):
            clip_grad_norm_(group["params"], found["lr"])

    return clip


def clips_and_reads_the_variable(optimizer):
    def clip():
        for group in optimizer.param_groups:
            clip_grad_norm_(group["params"], locals()["group"]["lr"])

    return clip


def clips_and_reads_in_a_comprehension(optimizer):
    return lambda: [clip_grad_norm_(g["params"], rate) for g in optimizer.param_groups for rate in [g["lr"]]]


CLIPS = {
    clips_each_group: 1,
    clips_all_groups: 1,
    clips_the_first_group: 1,
    clips_what_a_helper_finds: 1,
    clips_and_reads_in_one_loop: 4,
    clips_and_reads_elsewhere: 4,
    clips_and_reads_the_variable: 4,
    clips_and_reads_in_a_comprehension: 4,
}


@pytest.mark.nightly_after(6)
@pytest.mark.parametrize("clips", CLIPS)
def test_what_takes_only_the_parameters_of_groups(step_twins, clips):
    """The numbers are set by replays all the same, unless the code has a number as well."""

    def make(model):
        optimizer = fused(AdamW, step_twins.device, lr=0.1)(model.parameters())
        clip = clips(optimizer)

        def step(x, y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            clip()
            optimizer.step()
            return loss

        step.optimizer = optimizer
        return step

    step = step_twins.train(make, 16, sets(lr=lambda i: 0.1 / (1 + i // 4)))
    assert step.captures == CLIPS[clips] and step.replays >= 6, why(step)


def test_a_step_that_logs_a_number_logs_the_true_one(step_twins, capsys):
    """Also while it is captured."""
    optimizer = fused(AdamW, step_twins.device, lr=0.1)((model := step_twins.model()).parameters())

    def step(x, y):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        print(optimizer.state_dict()["param_groups"][0]["lr"])

    graphed = step_twins.graphed(step)
    for _ in range(6):
        graphed(*step_twins.batch())
    assert {*capsys.readouterr().out.split()} == {"0.1"} and graphed.replays >= 1, why(graphed)


def test_another_thread_reads_true_numbers():
    """It may save a checkpoint."""
    optimizer = SGD([torch.zeros(1)], lr=0.1, fused=True)
    found = []

    def collect():
        thread = threading.Thread(target=lambda: found.append(optimizer.state_dict()["param_groups"][0]["lr"]))
        thread.start()
        thread.join()
        return {}

    with pytest.raises(NumbersRead, match="looks up param_groups"):
        StandIns(KernelNumbers(GroupNumbers.all_of(optimizer))).check_facts(collect)
    assert found == [0.1, 0.1] and "__getattribute__" not in vars(SGD)


def test_a_step_that_sets_its_rate(step_twins):
    def make(model):
        def decay():
            for group in step.optimizer.param_groups:
                group["lr"] *= 0.9

        step = usual_step(model, fused(SGD, step_twins.device, lr=0.1), decay)
        return step

    with pytest.warns(UserWarning, match=r"'lr'\] changed from .* in each step"):
        step = step_twins.train(make, 12)
    assert step.replays == 0, why(step)
    assert any("'lr'] changed" in each and "; set it outside of the step;" in each for each in step.in_python), why(
        step
    )

    def between(i, model, fn, batch):
        for group in fn.optimizer.param_groups:
            group["lr"] *= 0.9

    step = step_twins.train(partial(usual_step, make=fused(SGD, step_twins.device, lr=0.1)), 12, between)
    assert step.replays >= 8, why(step)


def test_a_momentum_below_zero_raises_as_in_python(step_twins):
    """The kernel of CUDA would take it, and the operator does not."""
    fn = usual_step(step_twins.model(), fused(SGD, step_twins.device, momentum=0.9))
    step = step_twins.graphed(fn)
    for _ in range(4):
        step(*step_twins.batch())
    replays, fn.optimizer.param_groups[0]["momentum"] = step.replays, -0.5
    assert replays >= 1, why(step)
    with pytest.raises(RuntimeError) if step_twins.device == "cuda" else nullcontext():
        step(*step_twins.batch())
    assert step.replays == replays, why(step)


@pytest.mark.parametrize(("key", "other"), [("momentum", 0), ("lr", None)])
def test_another_kind_of_number_is_another_state(step_twins, key, other):
    """Without momentum there is no buffer, and a tensor is no number."""

    def between(i, model, fn, batch):
        value = torch.tensor(0.05, device=step_twins.device) if other is None else other
        fn.optimizer.param_groups[0][key] = value if i % 8 >= 4 else 0.1 / (i + 1)

    step = step_twins.train(partial(usual_step, make=fused(SGD, step_twins.device, momentum=0.9)), 24, between)
    assert step.replays >= 4, why(step)
