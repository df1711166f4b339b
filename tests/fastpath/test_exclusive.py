"""Which compiled versions can be for the same call."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn

from thunder_cg.fastpath.prologue import PrologueChecks


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x, mask=None, scale=1, name="a"):
        y = self.dropout(self.first(x)) * scale
        return y if mask is None or name == "b" else y * mask


X, MASK = torch.ones(2, 4), torch.ones(4)


def version(*args, **kwargs):
    jmodel = thunder.jit(Masked())
    jmodel(*args, **kwargs)
    return PrologueChecks(thunder.compile_stats(jmodel).interpreter_cache[-1].prologue_traces[-1])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(3, 4),), {}),
        ((torch.ones(2, 4, requires_grad=True),), {}),
        ((X, MASK), {}),
        ((X,), {"mask": MASK}),
        ((X,), {"scale": 1}),
        ((X.double().float()[:1],), {}),
    ],
)
@pytest.mark.nightly_after(1)
def test_other_arguments(args, kwargs):
    assert version(X).excludes(version(*args, **kwargs)) and version(*args, **kwargs).excludes(version(X))


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 1.0), (1, True), (0.5, 0.25)])
@pytest.mark.nightly_after(2)
def test_other_numbers(one, other):
    assert version(X, None, one).excludes(version(X, None, other))


def test_other_surroundings():
    usual = version(X)
    with torch.no_grad():
        assert usual.excludes(version(X))
    with torch.autocast("cpu", torch.bfloat16):
        assert usual.excludes(version(X))


def test_what_proves_nothing():
    """The same value, zeros of either sign, what is not equal to itself, or nothing at all."""
    assert not version(X).excludes(version(X))
    assert not version(X, None, 0.0).excludes(version(X, None, -0.0))
    assert not version(X, None, float("nan")).excludes(version(X, None, float("nan")))
    without_expectations = version(X)
    without_expectations.expected.clear()
    assert not version(X).excludes(without_expectations)
