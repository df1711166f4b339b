"""Gradients under ``thunderfx`` where Thunder's own are NaN, or those of another side of a comparison."""

from __future__ import annotations

import pytest
import thunder
import torch
from support import run_what_inductor_gets
from torch.nn import functional as F

from thunder_cg import cudagraph_transform, executors, explain, thunderfx
from thunder_cg.kernels import torchs_derivatives

_EQUAL = [[1.0, 2.0, 2.0, 0.0], [-2.0, 0.0, -1.0, 6.0], [0.0, 0.0, 0.0, 0.0], [3.0, 3.0, -2.0, -3.0]]
_LARGE = [[-1e4, -100.0, -89.0, -20.0], [100.0, 1e4, 89.0, 45.0], [0.0, 1e-30, -1e-30, 3.0], [1.0, 88.0, -88.0, 6.0]]
_BOUNDS = [[1.0, 0.0, 3.0, 0.0], [-2.0, -1.0, -2.0, 5.0], [0.0, 0.0, 1.0, -1.0], [2.0, 3.0, -2.0, 0.0]]
_OPERATORS = {
    "clamp": lambda x, y: x.clamp(-2, 2),
    "clamp, one bound": lambda x, y: x.clamp(min=0) + torch.clamp(x, max=2.0),
    "clamp, bounds are tensors": lambda x, y: torch.clamp(x, y - 1, y + 1) + torch.clamp(x, y[0]),
    "clamp, bounds by name": lambda x, y: torch.clamp(x, min=y, max=None),
    "clamp in place": lambda x, y: (x * 1).clamp_(-2, 2),
    "hardtanh": lambda x, y: F.hardtanh(x, -2.0, 2.0),
    "hardsigmoid": lambda x, y: F.hardsigmoid(x),
    "hardswish": lambda x, y: F.hardswish(x),
    "relu6": lambda x, y: F.relu6(x * 1, inplace=True),
    "sigmoid": lambda x, y: x.sigmoid(),
    "glu": lambda x, y: F.glu(x),
    "elu": lambda x, y: F.elu(x, 0.5),
    "celu": lambda x, y: F.celu(x, 0.5),
    "selu": lambda x, y: F.selu(x),
    "mish": lambda x, y: F.mish(x),
    "relu": lambda x, y: F.relu(x),
    "max along a dimension": lambda x, y: x.max(-1).values,
    "max along another": lambda x, y: x.max(0, keepdim=True)[0],
    "prod": lambda x, y: x.tanh().prod(-1),
    "pow of zero": lambda x, y: x.tanh() ** 0,
    "pow": lambda x, y: x.relu().tanh() ** y.abs(),
    "atan2": lambda x, y: torch.atan2(torch.where(x.abs() < 1e-9, 0.0, x), y),  # PyTorch squares both
    "normalize": lambda x, y: F.normalize(x, dim=-1),
    "max_pool1d": lambda x, y: F.max_pool1d(x[None], 3, 1, 1),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if not torch.cuda.is_available():
        run_what_inductor_gets(monkeypatch)


def gradients(fn, x, y):
    x, y = (torch.tensor(each, requires_grad=True) for each in (x, y))
    result = fn(x, y)
    weights = torch.arange(1.0, 1 + result.numel()).reshape(result.shape)
    return result.detach(), torch.autograd.grad(result, (x, y), weights, allow_unused=True)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("operator", _OPERATORS)
def test_gradients_are_pytorchs_where_values_are_equal_or_large(operator, fused):
    fn = _OPERATORS[operator]
    compiled = thunderfx(fn, backend="tape", **({"executors": executors()} if fused else {}))
    for x in (_EQUAL, _LARGE, _EQUAL):
        expected = gradients(fn, x, _BOUNDS)
        assert all(each is None or each.isfinite().all() for each in expected[1]), "the test shows nothing then"
        torch.testing.assert_close(gradients(compiled, x, _BOUNDS), expected, rtol=1e-5, atol=1e-6)
    assert not explain(compiled).outside


_AT_NAN_ALONE = {"hardtanh", "hardsigmoid", "hardswish", "relu6", "relu"}
_LAST = {"max along a dimension", "max along another"}  # among equals, which one depends on more


@pytest.mark.parametrize("operator", sorted(_OPERATORS.keys() - _AT_NAN_ALONE - _LAST))
@pytest.mark.nightly_after(2)
def test_thunders_own_still_differ(operator):
    """Where this fails, Thunder is mended, and what torchs_derivatives.py has for the operator can go."""
    fn, differ = _OPERATORS[operator], 0
    for x in (_EQUAL, _LARGE):
        (_, found), (_, expected) = (gradients(each, x, _BOUNDS) for each in (thunder.jit(fn), fn))
        pairs = [(a, b) for a, b in zip(found, expected) if a is not None and b is not None]
        differ += not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    assert differ


def test_what_is_not_a_number_stays_so_behind_a_relu():
    x = [[float("nan"), 1.0, -1.0]]
    expected = gradients(lambda x, y: x.relu(), x, x)
    compiled = thunderfx(lambda x, y: x.relu(), backend="tape")
    torch.testing.assert_close(gradients(compiled, x, x), expected, equal_nan=True)


def test_thunder_jit_has_them_with_the_executor_alone():
    def derivative(**options):
        _, (gradient, _) = gradients(thunder.jit(lambda x, y: x.sigmoid(), **options), _LARGE, _BOUNDS)
        return gradient

    graphed = [cudagraph_transform(backend="tape")]
    assert derivative(transforms=graphed).isnan().any()  # Thunder's own, which THUNDER.md says
    ours = [torchs_derivatives.executor, *thunder.get_default_executors()]
    assert derivative(transforms=graphed, executors=ours).isfinite().all()


@pytest.mark.parametrize("exponents", [(2.0, 3.0, 0.0, -1.0), (3, 2, 0, 1)], ids=["float", "int"])
def test_an_exponent_of_a_trace_for_all_numbers(exponents):
    """It was taken for zero."""
    ours = [torchs_derivatives.executor, *thunder.get_default_executors()]
    graphed = [cudagraph_transform(backend="tape")]
    compiled = thunder.jit(lambda x, n: x**n, executors=ours, transforms=graphed, cache="symbolic values")
    for number in exponents:
        x = torch.tensor([0.0, 1.5, -2.0, 3.0], requires_grad=True)
        for _ in range(3):
            (found,), (expected,) = (torch.autograd.grad(y.sum(), x) for y in (compiled(x, number), x**number))
            torch.testing.assert_close(found, expected)
