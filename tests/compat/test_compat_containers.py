"""Lists, dicts and sets that calls bring or modules have: other items compile anew, and changes of them are said."""

from __future__ import annotations

import copy
import functools
import logging
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from types import SimpleNamespace

import dill
import numpy as np
import pytest
import thunder
import torch
from torch import nn

from tests.support import fast_path_calls, replays, same
from thunder_cg import explain


class Sums(nn.Module):
    """Reads ``items`` in many ways, those of the call or its own."""

    def __init__(self, read, items=None):
        super().__init__()
        self.first, self.last, self.read, self.items = nn.Linear(4, 4), nn.Linear(4, 4), read, items

    def forward(self, x, items=None):
        return self.last(self.first(x)) + self.read(x, self.items if items is None else items)


def each(x, items):
    total = x
    for item in items:
        total = total + item
    return total


def length(x, items):
    return x * (1 + len(items))


def last(x, items):
    return x + items[-1] if items else x


def star(x, items):
    return torch.stack([x, *items]).sum(0)


def named(x, items):
    return x * items["mask"] if "mask" in items else x


def gets(x, items):
    mask = items.get("mask")
    return x if mask is None else x * mask


def keys(x, items):
    return x * 2 if "mask" in sorted(items) else x


def values(x, items):
    return each(x, items.values())


A, B, C = (torch.full((2, 4), float(i)) for i in (2, 3, 5))
WAYS = [
    *[(read, [[], [A], [A, B], [A]]) for read in (each, length, last, star)],
    (each, [(), (A, B), (A,)]),
    *[(read, [{"mask": A}, {"bias": B}, {"mask": C}, {}]) for read in (named, gets, keys, values)],
    (values, [OrderedDict(a=A), OrderedDict(b=A, a=B)]),
    (length, [{"a"}, {"a", "b"}]),
    (lambda x, items: x * 2 if "b" in items else x, [{"a"}, {"b"}, frozenset("b")]),
    (lambda x, items: x * 2 if items == [1, 2] else x, [[1, 2], [1, 3], [1]]),
    (lambda x, items: x if items != {"a": 1} else x * 2, [{"a": 1}, {"a": 2}, {"b": 1}]),
]


@pytest.mark.parametrize("own", [False, True], ids=["argument", "attribute"])
@pytest.mark.parametrize(("read", "contents"), WAYS)
@pytest.mark.nightly_after(3)
def test_other_items(read, contents, own, transform, device):
    torch.manual_seed(0)
    model = Sums(read).to(device).eval().requires_grad_(False)
    eager, jitted = copy.deepcopy(model), thunder.jit(model, transforms=[transform()])
    x = torch.randn(2, 4, device=device)
    moved = [torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), each) for each in contents]
    for items in [*moved, *moved] if own else [each for each in moved for _ in range(3)]:
        model.items = items if own else None
        same(jitted(x) if own else jitted(x, items), eager(x, items))
    if not own:
        assert fast_path_calls(jitted) and "items" in {change.kind for change in explain(jitted).changes}


def test_what_comes_back_as_it_is_is_not_taken_for_a_container(transform, device):
    """Thunder names it as a proxy of what is checked would be named: any0."""

    def scaled(x, factors, mark):
        factor = 1
        for each in factors:
            factor = factor * each
        return torch.tanh(x) * factor, mark

    jitted, x = thunder.jit(scaled, transforms=[transform()]), torch.ones(3, device=device)
    for factors, mark in [((2, 3), [1, 2]), ((2, 3, 4), [1, 2]), ((2, 3), 5)]:
        for _ in range(2):
            found, expected = jitted(x, factors, mark), scaled(x, factors, mark)
            same(found[0], expected[0])
            assert found[1] == expected[1]


def test_what_no_prologue_can_look_up_is_not_checked(transform, device):
    """Thunder raises if it has to look up an item of such a key, or an attribute of a method that it follows."""

    class Scales:
        scale = functools.partialmethod(lambda self, x, by: x * by, by=3)

    def read(x, table, scales):
        y = scales.scale(x) if table[None] is None else x
        return torch.tanh(y).to(table[0, 1])

    jitted, x = thunder.jit(read, transforms=[transform()]), torch.ones(3, device=device)
    table, scales = {None: None, (0, 1): torch.float64}, Scales()
    for _ in range(3):
        same(jitted(x, table, scales), read(x, table, scales))
    assert replays(jitted)


def test_a_list_that_a_module_owns_costs_steady_calls_nothing(transform, device):
    """It is watched together with the module's attributes, and grows under the fast path."""
    model = Sums(length, [object(), object()]).to(device).eval().requires_grad_(False)
    eager, jitted = copy.deepcopy(model), thunder.jit(model, transforms=[transform()])
    x = torch.randn(2, 4, device=device)
    for number in range(8):
        if number == 4:
            model.items.append(object())
            eager.items.append(object())
        same(jitted(x), eager(x))
    assert thunder.cache_misses(jitted) == 2 and fast_path_calls(jitted) == 4
    (change,) = explain(jitted).changes
    assert change.problem == "2 lengths or keys of self.items so far (2, 3)"
    guard = jitted._forward_fn._certain()[0]._guard
    assert guard.keywords == () and any(watched is model.items for watched in guard.attributes._watched)


def test_what_only_collectives_need_costs_steady_calls_nothing(transform, device):
    """Thunder asks in each ``reshape`` whether PyTorch has collectives, which is no communication."""
    model = Sums(lambda x, items: torch.tanh(x.reshape(-1)).reshape(x.shape)).to(device).eval().requires_grad_(False)
    eager, jitted, x = (
        copy.deepcopy(model),
        thunder.jit(model, transforms=[transform()]),
        torch.randn(2, 4, device=device),
    )
    for _ in range(4):
        same(jitted(x), eager(x))
    assert fast_path_calls(jitted) == 2
    assert jitted._forward_fn._certain()[0]._guard.keywords == ()


def test_changes_of_containers_are_said(transform, device, caplog):
    def remembers(x, seen, known):
        y = torch.tanh(torch.sin(x))
        seen.append(y)
        known["y"] = y
        local = [y]
        local.append(y)
        return y + local[1]

    jitted = thunder.jit(remembers, transforms=[transform()])
    x = torch.ones(3, device=device)
    with caplog.at_level(logging.WARNING, "thunder_cg"):
        for _ in range(3):
            same(jitted(x, [], {}), torch.tanh(torch.sin(x)) * 2)
    line = remembers.__code__.co_firstlineno + 2
    places = [f"list.append at test_compat_containers.py:{line} ", f"dict.__setitem__ at {__name__.split('.')[-1]}.py:"]
    found = explain(jitted).differs
    assert len(found) == 2 and all(said.startswith(place) for said, place in zip(found, places))
    assert [record.getMessage() for record in caplog.records] == [f"{jitted_name(remembers)}: {said}" for said in found]
    assert "changes a container of the caller's" in found[0] and "no operator is eager" not in str(explain(jitted))


def jitted_name(function):
    return function.__qualname__


def test_a_trace_with_checks_can_be_pickled(transform, device):
    jitted = thunder.jit(each, transforms=[transform()])
    jitted(torch.ones(2, 4, device=device), [A.to(device)])
    trace = thunder.last_prologue_traces(jitted)[0]
    assert "check_length" in str(trace) and str(dill.loads(dill.dumps(trace))) == str(trace)


def test_thunder_by_itself_stays_as_it_is():
    model = Sums(each).eval().requires_grad_(False)
    jitted = thunder.jit(model)
    jitted(torch.ones(2, 4), [A])
    assert "check_length" not in str(thunder.last_prologue_traces(jitted)[-1])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(4, 4, bias=False), None, None

    def forward(self, x, mask=None, options=None):
        x = torch.sin(self.first(x)) * (2 if self.scale is None else self.scale)
        x = x if mask is None else x * mask
        return x * 3 if options is not None and options["shift"] is None else x


@pytest.mark.parametrize("how", ["positional", "keyword", "item", "attribute"])
def test_what_was_none(how, transform, device):
    model = Masked().to(device).eval().requires_grad_(False)
    jitted = thunder.jit(model, transforms=[transform()])
    x, mask = torch.randn(2, 4, device=device), torch.randn(2, 4, device=device)
    for value in [None, None, None, mask, mask, mask, None, mask]:
        model.scale = 5.0 if how == "attribute" and value is not None else None
        args = [x, *([value] if how == "positional" else [])]
        kwargs = {"keyword": {"mask": value}, "item": {"options": {"shift": value}}}.get(how, {})
        same(jitted(*args, **kwargs), model(*args, **kwargs))
    assert thunder.cache_misses(jitted) == 2 and fast_path_calls(jitted) >= 3


@pytest.mark.parametrize("how", ["argument", "attribute"])
@pytest.mark.parametrize("values", [(np.float32(2), np.float32("nan")), (np.int64(2), np.int64(3)), (..., 2)])
@pytest.mark.nightly_after(3)
def test_values_that_thunder_does_not_check(how, values, transform, device):
    class Compares(nn.Module):
        own = None

        def forward(self, x, value):
            return torch.sin(x).cos() * (2 if (self.own if value is None else value) == values[0] else 3)

    model, x = Compares(), torch.randn(3, device=device)
    jitted = thunder.jit(model, transforms=[transform()])
    for value in [values[0]] * 4 + [values[1]] * 4 + [values[0]]:
        model.own, value = (value, None) if how == "attribute" else (None, value)
        same(jitted(x, value), model(x, value))
    assert thunder.cache_misses(jitted) == 2 and fast_path_calls(jitted) == 5


def an_object(**attributes):
    return SimpleNamespace(**attributes)


class Other(SimpleNamespace):
    pass


ARGUMENTS = {
    "bytes": (lambda x, v: x * v[0] if v != b"ab" else x, [b"ab", b"cd"]),
    "range": (lambda x, v: x * len(v), [range(2), range(3)]),
    "Fraction": (lambda x, v: x * float(v), [Fraction(1, 2), Fraction(1, 3)]),
    "Decimal": (lambda x, v: x * float(v), [Decimal("0.5"), Decimal("0.25")]),
    "Path": (lambda x, v: x * 2 if v.suffix else x, [PurePath("a"), PurePath("a.b")]),
    "list or tuple": (lambda x, v: x * 2 if isinstance(v, list) else x, [(1, 2), [1, 2]]),
    "method of a list": (lambda x, v: x * 2 if hasattr(v, "append") else x, [(1, 2), [1, 2]]),
    "None of an object": (lambda x, v: x * 2 if v.a is None else x, [an_object(a=None), an_object(a=1.0)]),
    "function of an object": (lambda x, v: v.a(x), [an_object(a=torch.sin), an_object(a=torch.cos)]),
    "of its object": (lambda x, v: x if v.a.b is None else x * 2, [an_object(a=an_object(b=b)) for b in (None, 1)]),
    "class of an object": (lambda x, v: x * 2 if isinstance(v, Other) else x, [an_object(a=1), Other(a=1)]),
    "object or None": (lambda x, v: x * 2 if v else x, [an_object(a=1), None]),
    "attribute": (lambda x, v: x * 2 if hasattr(v, "b") else x, [an_object(a=1), an_object(b=1)]),
    "default": (lambda x, v: x * getattr(v, "b", 5), [an_object(a=1), an_object(b=2)]),
}


@pytest.mark.parametrize("how", ["argument", "attribute"])
@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.nightly_after(3)
def test_other_values_than_those_of_the_trace(how, case, transform, device):
    function, values = ARGUMENTS[case]

    class Calls(nn.Module):
        own = None

        def forward(self, x, value):
            return function(torch.sin(x).cos(), self.own if value is None else value)

    if how == "attribute" and case in ("list or tuple", "method of a list", "object or None"):
        pytest.skip("what a module has rarely is something else later: a check in each call costs too much")
    model, x = Calls(), torch.randn(3, device=device)
    jitted = thunder.jit(model, transforms=[transform()])
    for value in [values[0]] * 3 + [values[1]] * 3 + [values[0]]:
        model.own, value = (value, None) if how == "attribute" else (None, value)
        same(jitted(x, value), model(x, value))
    assert thunder.cache_misses(jitted) == 2 and replays(jitted)


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.dtype, self.function = torch.float32, torch.sin

    def forward(self, x, dtype):
        return self.function(x.to(dtype)).to(self.dtype).cos()


def test_one_constant_at_several_places(transform, device):
    """Thunder knows an object by the place where it was found first."""
    model = nn.ModuleList([Casts(), Casts()])

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x, first, second):
            return self.parts[1](self.parts[0](x, first), second)

    eager = Both()
    jitted, x = thunder.jit(eager, transforms=[transform()]), torch.randn(3, device=device)
    single, double = torch.float32, torch.float64
    for dtypes in [(single, single), (single, double), (double, single), (double, double)]:
        for _ in range(3):
            same(jitted(x, *dtypes), eager(x, *dtypes))
    for part in model:
        for name, value in (("dtype", double), ("function", torch.tanh)):
            setattr(part, name, value)
            same(jitted(x, single, single), eager(x, single, single))
    assert thunder.cache_misses(jitted) == 8


_mask: torch.Tensor | None = None


def test_what_was_empty_or_none_at_first(transform, device):
    """Keywords for a call, items that a new dict takes over, and a global."""

    def scaled(x, by=2, plus=0):
        return torch.tanh(x * by + plus)

    def read(x, options, more):
        y = scaled(x, **options) + scaled(x, **{"plus": 1, **more})
        return y if _mask is None else y * _mask

    jitted, x = thunder.jit(read, transforms=[transform()]), torch.ones(3, device=device)
    for options, more, mask in ({}, {}, None), ({"by": 3}, {}, None), ({}, {"by": 4}, None), ({}, {}, x * 2):
        globals()["_mask"] = mask
        for _ in range(3):
            same(jitted(x, options, more), read(x, options, more))
    assert thunder.cache_misses(jitted) == 4


_factors: list[float | None] = [None, 2.0]
_shifts: dict[str, float | None] = {"by": None}


def test_items_that_were_none_at_first(transform, device):
    """Of a global, and of what a module has."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = [None, 2.0]

        def forward(self, x):
            for factor in (*self.factors, *_factors):
                x = torch.tanh(x) if factor is None else x * factor
            return x if _shifts["by"] is None else x + _shifts["by"]

    _factors[0] = _shifts["by"] = None
    model, x = Scaled(), torch.ones(3, device=device)
    jitted = thunder.jit(model, transforms=[transform()])
    for items, key, value in (([], 0, 0.0), (model.factors, 0, 3.0), (_factors, 0, 4.0), (_shifts, "by", 1.0)):
        if items:
            items[key] = value
        for _ in range(3):
            same(jitted(x), model(x))
    assert thunder.cache_misses(jitted) == 4


_once: int | None = None
_made: dict[str, int | None] = {"once": None}


@functools.cache
def _make_table(table):
    table.size = 3


class _Table:
    size: int | None = None


_table = _Table()


def test_what_is_made_once_while_thunder_traces(transform, device):
    """No call would pass a check of a global or an attribute that was None before."""

    def read(x):
        global _once
        if _once is None:
            _once = 2
        if _table.size is None:
            _make_table(_table)
        if _made["once"] is None:
            _made["once"] = 3
        return torch.tanh(x * _once)

    jitted, x = thunder.jit(read, transforms=[transform()]), torch.ones(3, device=device)
    for _ in range(4):
        same(jitted(x), torch.tanh(x * 2))


def in_a_list(x, items):
    return x.exp() if items[0] else x.sin()


@pytest.mark.parametrize(
    ("fn", "values"),
    [
        (lambda x, is_exp: x.exp() if is_exp else x.sin(), (True, False)),
        (lambda x, name: x * {"one": 1, "two": 2}[name], ("one", "two")),
        (lambda x, n: x * 2 if n is None else x * n, (3.0, None, 4.0)),
        (lambda x, n: x * 2 if n is None else x * n, (None, 3, 4)),
        (lambda x, n: x * n, (2, 3.0, 4, 5.0)),
        (in_a_list, ([True], [False])),
    ],
    ids=["bool", "string", "none after a number", "none", "types of numbers", "item"],
)
def test_what_has_no_symbol_compiles_anew(transform, device, fn, values):
    """With symbolic values, Thunder checks no arguments but tensors. A branch was that of the first call."""
    compiled = thunder.jit(fn, transforms=[transform()], cache="symbolic values")
    for value in 3 * values:
        x = torch.randn(3, device=device, requires_grad=True)
        found, expected = compiled(x, value), fn(x, value)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))
    assert thunder.cache_misses(compiled) == 2


def test_a_number_has_a_symbol(transform, device):
    compiled = thunder.jit(lambda x, n: x * n, transforms=[transform()], cache="symbolic values")
    for number in (2.0, 3.0, 4.5):
        assert compiled(torch.ones(1, device=device), number).item() == number
    assert thunder.cache_misses(compiled) == 1
