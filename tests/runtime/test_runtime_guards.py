"""A guard holds for what was captured, and for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thunder_cg.compat.settings import Settings
from thunder_cg.runtime.guards import Guard, OverlapGuard


@pytest.fixture
def tensors():
    return [nn.Parameter(torch.randn(4, 4)), torch.randn(4, 4), None, torch.randn(3)]


@pytest.fixture
def guard(tensors):
    return Guard(tensors, static=[0], written=frozenset())


def test_it_holds_for_the_same_and_for_like_inputs(guard, tensors):
    assert guard.holds(tensors)
    assert guard.holds([tensors[0], torch.zeros(4, 4), None, torch.zeros(3)])
    with torch.no_grad():
        tensors[0].mul_(2)
    assert guard.holds(tensors)


@pytest.mark.parametrize(
    ("position", "other"),
    [
        (0, lambda t: nn.Parameter(t.detach().clone())),
        (1, lambda t: t.t()),
        (1, lambda t: t.double()),
        (1, lambda t: torch.randn(4, 5)),
        (1, lambda t: torch.randn(17)[1:].view(4, 4)),
        (1, lambda t: None),
        (1, lambda t: 3.0),
        (2, lambda t: torch.zeros(1)),
        (3, lambda t: torch.complex(t, t).conj()),
    ],
    ids=["moved", "stride", "dtype", "shape", "alignment", "none", "number", "present", "conjugate"],
)
def test_it_refuses_a_change(guard, tensors, position, other):
    changed = list(tensors)
    changed[position] = other(tensors[position])
    assert not guard.holds(changed)
    assert guard.holds(tensors)


def test_it_refuses_a_static_tensor_with_other_strides(guard, tensors):
    tensors[0].data = tensors[0].data.t()
    assert not guard.holds(tensors)


@pytest.mark.parametrize(("settings", "holds"), [(Settings.MATMUL, False), (Settings.CUDNN, True), (None, True)])
def test_it_refuses_other_settings_of_its_kernels(tensors, settings, holds):
    torch.set_float32_matmul_precision("highest")
    guard = Guard(tensors, static=[0], written=frozenset(), settings=settings)
    torch.set_float32_matmul_precision("medium")
    try:
        assert guard.holds(tensors) is holds
    finally:
        torch.set_float32_matmul_precision("highest")
    assert guard.holds(tensors)


def test_the_same_tensor_twice():
    x = torch.zeros(2)
    guard = Guard([x, x], [], frozenset())
    assert guard.holds([x, x]) and guard.holds([y := torch.ones(2), y])
    assert not guard.holds([x, torch.ones(2)])


@pytest.mark.parametrize("static", [set(), {0}])
def test_written_memory_must_not_be_shared(static):
    base = torch.zeros(8)
    overlap = OverlapGuard([base[:4], torch.zeros(4)], static, frozenset({0}))
    assert overlap.admits([base[:4], torch.zeros(4)])
    assert not overlap.admits([base[:4], base[4:]])
