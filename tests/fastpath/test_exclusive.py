"""Which compiled versions can be for the same call."""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import nn

from thunder_cg.fastpath.exclusive import are_exclusive, checks


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
    return checks(thunder.compile_stats(jmodel).interpreter_cache[-1].prologue_traces[-1])


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
def test_other_arguments(args, kwargs):
    assert are_exclusive(version(X), version(*args, **kwargs)) and are_exclusive(version(*args, **kwargs), version(X))


@pytest.mark.parametrize(("one", "other"), [(1, 2), (1, 1.0), (1, True), (0.5, 0.25)])
def test_other_numbers(one, other):
    assert are_exclusive(version(X, None, one), version(X, None, other))


def test_other_surroundings():
    usual = version(X)
    with torch.no_grad():
        assert are_exclusive(usual, version(X))
    with torch.autocast("cpu", torch.bfloat16):
        assert are_exclusive(usual, version(X))


def test_what_proves_nothing():
    """The same value, zeros of either sign, what is not equal to itself, or nothing at all."""
    assert not are_exclusive(version(X), version(X))
    assert not are_exclusive(version(X, None, 0.0), version(X, None, -0.0))
    assert not are_exclusive(version(X, None, float("nan")), version(X, None, float("nan")))
    assert not are_exclusive(version(X), {})
