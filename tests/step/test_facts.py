"""What is said of a fact that differs has both values."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import Enum, IntEnum
from math import copysign

import pytest
import torch
from torch import nn

from thunder_cg.compat.guards import attribute_writes_are_reported
from thunder_cg.step.collector import facts_of
from thunder_cg.step.facts import Same, difference, fact_of


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (fact_of(1), fact_of(2), "x changed from 1 to 2"),
        (fact_of(1.5), fact_of(float("nan")), "x changed from 1.5 to nan"),
        (fact_of(0.0), fact_of(-0.0), "x changed from 0.0 to -0.0"),
        (fact_of("a"), fact_of(None), "x changed from 'a' to None"),
        ((True, torch.half), (False, torch.half), "x changed from (True, torch.float16) to (False, torch.float16)"),
        (fact_of([]), Same(torch.zeros(2)), "x changed from a list to a tensor (2,) of float32"),
        (fact_of(1), fact_of(1), None),
    ],
)
def test_what_is_shown_of_a_fact(before, after, said):
    change = difference({"x": before}, {"x": after})
    assert (None if change is None else str(change)) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"len(x)": 0}, {"type(x['loss'])": list}, "what x holds changed"),
        ({"x": fact_of(None)}, {"len(x)": 1, "x['n']": fact_of(1)}, "x changed from None to something else"),
        ({"x['n']": fact_of(1)}, {"xs": fact_of(1)}, "x['n'] was 1 and is gone"),
    ],
    ids=["an item of it only grows", "a dictionary", "gone"],
)
def test_what_is_said_of_a_fact_that_there_is_no_more(before, after, said):
    assert str(difference(before, after)) == said


def test_facts_of_an_enumeration_are_collected_when_something_changes():
    """As an argument it is looked at in each call, which takes longer than a replay."""
    if not attribute_writes_are_reported():
        pytest.skip("Python 3.13.0, where all is compared")
    mode = Enum("Mode", "ONE TWO", module=__name__).ONE
    mode.scale = 1.0
    facts = facts_of(mode)
    assert facts_of(mode) is facts
    mode.scale = 2.0
    changed = facts_of(mode)
    assert changed != facts and facts_of(mode) is changed
    type(mode).LIMIT = 3
    assert facts_of(mode) != changed


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_what_is_shown_of_autocast(step_twins):
    model = nn.Linear(3, 3).to(step_twins.device)
    kind = step_twins.device

    def turns(x):
        torch.set_autocast_enabled(kind, not torch.is_autocast_enabled(kind))
        return model(x)

    x = torch.ones(2, 3, device=kind)
    with torch.autocast(kind, torch.bfloat16):
        step = step_twins.graphed(turns)
        step(x)
    on, off = "on with torch.bfloat16", "off with torch.bfloat16"
    assert f"autocast for {kind} changed from {on} to {off}, in the step" in str([*step.in_python])
    step = step_twins.graphed(lambda x: model(x))
    step(x)
    with torch.autocast(kind, torch.bfloat16):
        step(x)
    assert f"noted, since autocast for {kind} changed from " in str([*step.in_python])
    assert f" to {on}" in str([*step.in_python])


class Loose(str):
    """Equal to all that differs in case alone."""

    def __eq__(self, other):
        return str.lower(self) == str.lower(str(other))

    def __hash__(self):
        return hash(str.lower(self))


class Rounded(float):
    def __repr__(self):
        return f"{float(self):.1f}"


Point, Pair = namedtuple("Point", "a b"), namedtuple("Pair", "a b")
One, Uno = IntEnum("One", {"A": 1}), IntEnum("Uno", {"A": 1})
NAN = float("nan")
# Values of one line are equal, or look alike.
KEYS = [
    [1, True, 1.0, One.A, Uno.A, Decimal(1), Decimal("1.0")],
    [0.0, -0.0, 0, False, Rounded(0.0), Rounded(-0.0), Rounded(0.04)],
    ["a", Loose("a"), Loose("A")],
    [(1, 2), (True, 2), Point(1, 2), Point(True, 2), Pair(1, 2)],
    [range(1), range(0, 1, 3)],
]
PLAIN = [
    [1, True, 1.0, One.A, Uno.A, 1 + 0j],
    KEYS[1],
    KEYS[2],
    KEYS[4],
    [NAN, -NAN, None],
    [0j, -0j, complex(0, -0.0)],
]
CONTAINERS = [
    [(1, 2), [1, 2], Point(1, 2), Pair(1, 2), deque([1, 2]), deque([1, 2], 3), torch.Size([1, 2])],
    [{1, 2}, frozenset({1, 2}), {True, 2}],
    [{"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)],
    [defaultdict(int, a=1), defaultdict(float, a=1), {"a": 1}],
]


def seen(value):
    """All that a step may see of a value."""
    if isinstance(value, dict):
        pairs = [(seen(key), seen(item)) for key, item in value.items()]
        return [type(value).__name__, getattr(value, "default_factory", None), *pairs]
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        return [type(value).__name__, getattr(value, "maxlen", None), *map(seen, value)]
    if isinstance(value, (float, complex)):
        parts = (value.real, value.imag)
        return [type(value).__name__, *((float.__repr__(part), copysign(1, part)) for part in parts)]
    return [type(value).__name__, str.__str__(value) if isinstance(value, str) else repr(value)]


@pytest.fixture
def tell_apart(step_twins):
    """Calls a step with each of the values several times. Its result says which one it has seen."""

    def tell_apart(values, get, call):
        numbers = {str(seen(value)): i for i, value in enumerate(values)}
        assert len(numbers) == len(values)
        x = torch.zeros(1, device=step_twins.device)
        step = step_twins.graphed(lambda x, *args: x + numbers[str(seen(get(*args)))], max_recordings=8)
        for value in [*(each for each in values for _ in range(3)), *values]:
            assert call(step, x, value).item() == numbers[str(seen(value))], value
        assert step.replays >= len(values), step.in_python

    return tell_apart


@pytest.mark.parametrize("values", [*CONTAINERS[:1], *CONTAINERS[2:], *PLAIN], ids=str)
@pytest.mark.nightly_after(2)
def test_arguments_that_look_alike(tell_apart, values):
    tell_apart(values, lambda argument: argument, lambda step, x, value: step(x, value))


@pytest.mark.parametrize("values", KEYS, ids=str)
@pytest.mark.nightly_after(1)
def test_keys_of_arguments_that_look_alike(tell_apart, values):
    tell_apart(values, lambda argument: next(iter(argument["of"])), lambda step, x, key: step(x, {"of": {key: x}}))


class Holder:
    value = None


@pytest.mark.parametrize("values", [*CONTAINERS, *PLAIN, *([{key: 1} for key in each] for each in KEYS)], ids=str)
@pytest.mark.nightly_after(2)
def test_values_from_outside_that_look_alike(tell_apart, values):
    holder = Holder()

    def call(step, x, value):
        holder.value = value
        return step(x)

    tell_apart(values, lambda: holder.value, call)


@pytest.mark.parametrize("values", KEYS, ids=str)
@pytest.mark.parametrize("make", [set, dict, OrderedDict])
@pytest.mark.nightly_after(3)
def test_what_a_container_holds_that_looks_alike(tell_apart, make, values):
    """The container stays one, and somebody takes out what it holds, and puts an equal value in."""
    container = make()

    def call(step, x, value):
        container.clear()
        container.update({value} if make is set else {value: 1})
        return step(x)

    tell_apart(values, lambda: next(iter(container)), call)


def test_a_class_of_an_argument_that_changes(step_twins):
    Fields = namedtuple("Fields", "x")
    Fields.scale = 1.0
    step = step_twins.graphed(lambda batch: batch.x * batch.scale)
    x = torch.ones(1, device=step_twins.device)
    for i in range(8):
        Fields.scale = 1.0 + i // 4
        assert step(Fields(x)).item() == Fields.scale
    assert step.replays == 4, step.in_python


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_one_dictionary_twice_among_the_arguments(step_twins):
    """A capture would make two of it."""
    step = step_twins.graphed(lambda a, b: a["x"] * (1 if a is b else 2))
    batch = {"x": torch.ones(1, device=step_twins.device)}
    for _ in range(4):
        assert step(batch, batch).item() == 1
        assert step(batch, dict(batch)).item() == 2
    assert step.replays == 2 and "as by copy.copy(batch)" in str([*step.in_python]), step.in_python


def test_a_size_stays_a_size(step_twins):
    """PyTorch's trees make a tuple of it."""
    step = step_twins.graphed(lambda x, size: (x.view(size), x.shape, size.numel()))
    for _ in range(4):
        y, shape, count = step(torch.ones(4, device=step_twins.device), torch.Size([2, 2]))
        assert (y.shape, type(shape), shape, count) == ((2, 2), torch.Size, (4,), 4)
    assert step.replays == 2, step.in_python


class Table(dict):
    scale = 1.0


def test_a_class_of_a_container_that_changes(step_twins):
    """No bytecode names the attribute of what is passed on."""
    table, x = Table(), torch.ones(1, device=step_twins.device)
    step = step_twins.graphed(lambda: x * (lambda each: each.scale)(table))
    for i in range(8):
        Table.scale = 1.0 + i // 4
        assert step().item() == Table.scale
    assert step.replays == 4, step.in_python


def test_a_key_of_what_is_carried_that_looks_alike(step_twins):
    holder, zero = Holder(), torch.zeros(1, device=step_twins.device)

    def step(x):
        ((key, last),) = holder.value.items()
        holder.value = {key: last + x}
        return last + x * (2 if key is True else 1)

    graphed, totals = step_twins.graphed(step), []
    for i in range(10):
        holder.value = {1: zero} if i == 0 else {True: zero} if i == 5 else holder.value
        totals.append(graphed(zero + 1).item())
    assert totals == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6] and graphed.replays >= 4, graphed.in_python


class Hidden:
    """A key of which neither ``==`` nor ``repr`` tells what it has."""

    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Hidden)

    def __hash__(self):
        return 0

    def __repr__(self):
        return "Hidden()"


@pytest.mark.parametrize("wrap", [lambda key: key, lambda key: (key, 1)], ids=["key", "tuple"])
def test_a_key_of_an_argument_whose_class_hides_what_it_has(step_twins, wrap):
    def scaled(batch):
        ((key, x),) = batch.items()
        return x * (key[0] if isinstance(key, tuple) else key).scale

    step, x = step_twins.graphed(scaled), torch.ones(1, device=step_twins.device)
    for i in range(10):
        assert step({wrap(Hidden(1.0 + i // 5)): x}).item() == 1.0 + i // 5
    assert step.replays >= 4, step.in_python


@pytest.mark.parametrize("name", ["__name__", "__qualname__", "__module__", "__doc__"])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_name_of_a_function_that_changes(step_twins, name, is_named):
    def named():
        """None"""

    functions, x = [named], torch.ones(1, device=step_twins.device)
    step = step_twins.graphed(lambda: x * len(getattr(named if is_named else functions[0], name)))
    for i in range(8):
        setattr(named, name, "a" * (1 + i // 4))
        assert step().item() == 1 + i // 4
    assert step.replays == 4 and "the name of " in str([*step.in_python]), step.in_python


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
@pytest.mark.parametrize("make", [dict, OrderedDict, lambda x: [*x.values()], lambda x: deque(x.values(), 2)])
def test_a_container_that_is_an_argument_and_outside_too(step_twins, make):
    """A capture would make another one of the argument."""
    outside = make({"scale": 2.0})
    step = step_twins.graphed(lambda x, each: x * (1 if each is outside else 2) * len(outside))
    x = torch.ones(1, device=step_twins.device)
    for i in range(8):
        is_it = i // 2 % 2
        assert step(x, outside if is_it else make({"scale": 2.0})).item() == 2 - is_it
    assert step.replays == 2 and "; pass a copy of it" in str([*step.in_python]), step.in_python
