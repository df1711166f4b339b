"""The one check of all parameters refuses whatever Thunder's own checks refuse, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import thunder
import torch
from models import mlp
from support import fast_path_calls, same
from torch import nn

from thunder_cg.fastpath.prologue import Metadata, ParameterCheck
from thunder_cg.runtime.program import program_of

METADATA = Metadata((2, 3), "cpu", torch.float32, False)


def test_it_shows_in_the_prologue(transform, device):
    jfn = thunder.jit(mlp().to(device), transforms=[transform()])
    jfn(torch.randn(4, 16, device=device))
    prologue = str(thunder.last_prologue_traces(jfn)[-1])
    assert prologue.count("cudagraph_check_parameters(") == 1
    assert prologue.count("= check_tensor_metadata(") + prologue.count("\n  check_tensor_metadata(") == 1  # the input's


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, requires_grad=True), None, 3],
    ids=["shape", "dtype", "requires_grad", "none", "number"],
)
@pytest.mark.parametrize("position", [0, 1])
def test_it_refuses(wrong, position):
    check = ParameterCheck((METADATA, METADATA))
    good = [torch.zeros(2, 3), torch.ones(2, 3)]
    for _ in range(3):
        check(*good)
    bad = list(good)
    bad[position] = wrong
    for _ in range(2):
        with pytest.raises((AssertionError, TypeError)):
            check(*bad)
        check(*good)


def test_it_admits_what_thunder_admits():
    check = ParameterCheck((METADATA, METADATA))
    for _ in range(2):
        check(torch.zeros(2, 3), torch.zeros(2, 3))
        check(torch.zeros(3, 2).t(), torch.zeros(1, 3).expand(2, 3))
        check(tied := torch.zeros(2, 3), tied)
        check(nn.Parameter(torch.zeros(2, 3), requires_grad=False), torch.zeros(2, 3))
        with torch.inference_mode():
            check(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.nightly
def test_every_change_compiles_anew(twins, device):
    plain, graphed = twins(mlp())
    x = torch.randn(4, 16, device=device)
    changes = [
        lambda m: m.get_parameter("0.weight").requires_grad_(False),
        lambda m: m.to(torch.float64),
        lambda m: m.to(torch.float32),  # as before
    ]
    for change in [lambda m: None, *changes]:
        for model in (plain, graphed):
            change(model)
        for _ in range(3):
            at = x.to(next(iter(graphed.parameters())).dtype)
            same(plain(at).detach(), graphed(at).detach())
        assert thunder.cache_misses(plain) == thunder.cache_misses(graphed)


def scaled(by):
    return lambda t, by=by: t * by


class Branching(nn.Module):
    """What it computes depends on what Thunder checks nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, mask=None, *, more=(), by_name=None, dtype=None, function=torch.sin):
        y = function(self.linear(x))
        y = y if mask is None else y * mask
        for each in more:
            y = y + each
        for name, value in (by_name or {}).items():
            y = y * (2 if name == "a" else 3) + value
        return (y if dtype is None else y.to(dtype)).cos()


def test_calls_that_differ_where_thunder_checks_nothing(transform, device):
    model = Branching().to(device)
    jmodel = thunder.jit(model, transforms=[transform()])
    x = torch.randn(2, 3, device=device)
    a, b = x + 1, x + 2
    calls = [
        *(((mask,), {}) for mask in (a, None)),
        *(((), {"more": more}) for more in ([a], [a, b], [])),
        *(((), {"by_name": names}) for names in ({"a": a}, {"a": a, "b": b}, {"b": b, "a": a})),
        ((), {"dtype": torch.float64}),
        *(((), {"function": function}) for function in (torch.cos, lambda t: t * 2, lambda t: t * 3)),
        *(((), {"function": scaled(by)}) for by in (4, 5)),
    ]
    for _ in range(3):  # in the third, all replay
        for args, kwargs in calls:
            same(jmodel(x, *args, **kwargs), model(x, *args, **kwargs))
    assert thunder.cache_misses(jmodel) == len(calls)
    forwards = [program_of(entry.computation_traces) for entry in thunder.compile_stats(jmodel).interpreter_cache]
    assert all(forward.replays == 1 for forward in forwards)
    assert all(forward.no_fast_path is None for forward in forwards[:2])  # no call can be for both


def test_arguments_that_share_memory_with_one_that_stays(transform, device):
    """``cache`` is written, so it stays where it is, and a call compares the memory of the others with it alone."""

    class Decoder(nn.Module):
        def forward(self, x, y, cache):
            cache.mul_(2.0)
            return x * y + cache

    def run(fn):
        cache, one = torch.ones(4, device=device), torch.ones(4, device=device)
        pairs = [(one, one + 1)] * 4 + [(cache, one), (one, one + 2), (one, one), (one, cache[:]), (one, one + 3)]
        found, counts = [], []
        for x, y in pairs:
            found += [fn(x, y, cache).clone(), cache.clone()]
            counts.append(fast_path_calls(fn) if fn is jmodel else 0)
        return found, counts

    jmodel = thunder.jit(Decoder(), transforms=[transform()])
    found, counts = run(jmodel)
    same(found, run(Decoder())[0])
    are_fast = [after > before for before, after in pairwise(counts)]
    assert are_fast == [False, True, True, False, True, False, False, True]


def test_arguments_that_share_memory(transform, device):
    def function(number, x, y, z):
        x.add_(number)
        return (x * y + z).sin().cos()

    def calls():
        base, other = torch.arange(12.0, device=device).view(4, 3), torch.ones(2, 3, device=device)
        return [(base[:2], base[2:], other), (base[:2], base[:2], other), (base[:2], other, base[2:])]

    jfn = thunder.jit(function, transforms=[transform()])
    for _ in range(3):
        for arguments, others in zip(calls(), calls(), strict=True):
            same(jfn(2, *arguments), function(2, *others))
            same(arguments, others)
