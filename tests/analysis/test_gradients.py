"""Gradients that Thunder computes wrongly are warned of, and no others."""

from __future__ import annotations

import warnings

import pytest
import thunder
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_cg import WrongGradientWarning, cudagraph_transform, thunderfx

OVERWRITTEN, LOST, OTHER = "overwrites in place", "writes in place to memory that another", "has another gradient"
WITHOUT_GRAD = "writes in place under no_grad"
NOT_SUMMED = "combines a 0-dim tensor on the CPU"


def after_sin(write, then=torch.exp):
    """A function that writes into a tensor that needs a gradient."""

    def fn(x, z):
        y = torch.sin(x)
        write(y, x, z)
        return then(y)

    return fn


def through_an_older_view(x, z):
    y = torch.sin(x)
    view = y.view(-1)
    y.mul_(2.0)
    return view * 3


def items_seen_by_a_view(x, z):
    y = torch.sin(x)
    view = y.view(-1)
    y[:, :2] = z
    return view * 2


def returned_by_both_names(x, z):
    y = torch.sin(x)
    product = y.mul_(2.0)
    return product, y


def returned_twice(x, z):
    y = torch.sin(x)
    y.mul_(2.0)
    return y, y.t(), y


def into_zeros(x, z):
    y = torch.zeros(3, 4)
    y[:, :2].copy_(z)
    return y * x


def into_slices(x, z):
    keys = torch.sin(x).new_empty(3, 4)
    keys[:, :2].copy_(z * 2)
    keys[:, 2:].copy_(z * 3)
    return keys


def add_without_gradients(y, x, z):
    with torch.no_grad():
        y.add_(1)


def clamps_an_argument(x, z):
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)
    return x * z.sum()


WRONG = {
    "divides by its sum": (after_sin(lambda y, x, z: y.div_(y.sum(0))), OVERWRITTEN),
    "times what needs it": (after_sin(lambda y, x, z: y.mul_(torch.cos(x))), OVERWRITTEN),
    "hardswish": (lambda x, z: F.hardswish(torch.sin(x) * 3, True), OVERWRITTEN),
    "silu": (lambda x, z: F.silu(torch.sin(x) * 3, True), OVERWRITTEN),
    "slice, add": (after_sin(lambda y, x, z: y[:, :2].add_(z)), LOST),
    "slice, masked_fill": (after_sin(lambda y, x, z: y[:, :2].masked_fill_(z > 0, 0.0)), LOST),
    "view, mul": (after_sin(lambda y, x, z: y.view(-1).mul_(2.0)), LOST),
    "older view": (through_an_older_view, LOST),
    "items, older view": (items_seen_by_a_view, LOST),
    "returned by both names": (returned_by_both_names, "writes in place to what is returned twice"),
    "into zeros": (into_zeros, LOST),
    "into slices": (into_slices, LOST),
    "no_grad": (after_sin(add_without_gradients), WITHOUT_GRAD),
    "no_grad, an argument": (clamps_an_argument, WITHOUT_GRAD),
    "minus its mean": (lambda x, z: torch.exp(x - x.mean()) * x, NOT_SUMMED),
    "a function of its sum": (lambda x, z: torch.exp(x) * torch.tanh(x.sum()), NOT_SUMMED),
    "index_put": (lambda x, z: torch.index_put(torch.sin(x), (torch.arange(3),), torch.cat([z, z], 1)), OTHER),
    "in a list": (lambda x, z: torch.hstack([x, z]).sum() + torch.exp(z).sum(), OTHER),
    "complex product": (lambda x, z: torch.view_as_real(rotated(x) * rotated(x)), OTHER),
    "complex product with a real number": (lambda x, z: torch.view_as_real(rotated(x) * x[:, :2]), OTHER),
    "complex divisor": (lambda x, z: torch.view_as_real(2.0 / rotated(x)), OTHER),
    "imaginary factor": (lambda x, z: torch.view_as_real(rotated(x) * 2j), OTHER),
    "complex matrices": (lambda x, z: torch.view_as_real(rotated(x).T @ rotated(x)), OTHER),
    "negative padding_idx": (lambda x, z: F.embedding(torch.arange(3), x.exp(), padding_idx=-1), OTHER),
}


def rotated(x):
    """Complex numbers of a half as many columns."""
    return torch.view_as_complex(x.reshape(3, -1, 2))


def write_to_zeros(y):
    zeros = torch.zeros_like(y)
    view = zeros.view(-1)
    zeros.add_(1)
    y.mul_(view.sum())


def without_gradients(y, x, z):
    with torch.no_grad():
        y[:, :2].add_(1)


def keeps_apart(x, z):
    y = torch.sin(x)
    with torch.no_grad():
        copied = y.clone().add_(1)
    return y * copied.sum()


RIGHT = {
    "relu": after_sin(lambda y, x, z: y.relu_()),
    "exp": after_sin(lambda y, x, z: y.exp_()),
    "add and mul": after_sin(lambda y, x, z: y.add_(1).mul_(2)),
    "returned twice": returned_twice,
    "masked_fill": after_sin(lambda y, x, z: y.masked_fill_(x > 0, 0.0)),
    "items": after_sin(lambda y, x, z: y.__setitem__((slice(None), slice(2)), z)),
    "no_grad": after_sin(without_gradients, lambda y: y + 1),
    "no_grad, of a copy": keeps_apart,
    "minus its mean of a dimension": lambda x, z: torch.exp(x - x.mean(0, keepdim=True)),
    "a larger sum": lambda x, z: torch.exp(x.mean()) * z.sum(),
    "a mean that is expanded": lambda x, z: torch.exp(x - x.mean().expand(3, 4)),
    "memory without a gradient": after_sin(lambda y, x, z: write_to_zeros(y)),
    "a list": lambda x, z: torch.cat([torch.stack([x, x]).sum(0), z], 1),
    "padding_idx": lambda x, z: F.embedding(torch.arange(3), x.exp(), padding_idx=1),
    "complex sums": lambda x, z: torch.view_as_real((rotated(x) + rotated(x)).sum(0) / 3),
    "complex, by PyTorch": lambda x, z: torch.fft.irfft(torch.fft.rfft(x)) * 2,
    "complex, without gradients": lambda x, z: torch.view_as_real(rotated(x.detach()) * 2j).view(3, 4) * x,
    "dropout": lambda x, z: F.dropout(torch.sin(x), 0.0, inplace=False) * 2,
}


def gradients(fn, args):
    args = [arg.detach().requires_grad_() for arg in args]
    results = fn(*args)
    results = results if isinstance(results, tuple) else (results,)
    return torch.autograd.grad(sum(each.sum() for each in results), args, allow_unused=True)


def is_right(fn, graphed):
    torch.manual_seed(0)
    args = torch.randn(3, 4), torch.randn(3, 2)
    try:
        found = gradients(graphed, args)
    except RuntimeError:  # Thunder's backward broadcasts a shape that cannot be
        return False
    pairs = zip(found, gradients(fn, args))
    zeros = [(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b) for a, b in pairs]
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zeros)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.nightly_after(12)
def test_a_wrong_gradient_is_warned_of(name):
    fn, problem = WRONG[name]
    graphed = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    with pytest.warns(
        WrongGradientWarning, match=rf"at test_gradients.py:\d+ {problem}.*; (write|give|compile|do|return)"
    ):
        right = is_right(fn, graphed)
    assert not right, "Thunder's gradient has become right: the warning can go"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_gradient_is_not(name):
    fn = RIGHT[name]
    assert is_right(fn, thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")]))


def items_of_an_argument(x, z):
    x[:, :2] = z
    return x.exp()


ARGUMENT_WRITTEN = {
    "divided": lambda x, z: x.div_(2.0).exp(),
    "items": items_of_an_argument,
    "a slice": lambda x, z: x[:, :2].mul_(2.0).sum() + x.exp().sum(),
}


@pytest.mark.parametrize("name", ARGUMENT_WRITTEN)
def test_a_gradient_of_an_argument_that_is_written_is_warned_of(name):
    """An argument that is made of another tensor: autograd lets nobody write to that one."""
    fn = ARGUMENT_WRITTEN[name]
    graphed = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])

    def gradient(call, x):
        argument = x * 2
        (call(argument, torch.ones(3, 2)).sum() + argument.sum()).backward()
        return x.grad

    mine, other = (torch.ones(3, 4, requires_grad=True) for _ in range(2))
    with pytest.warns(WrongGradientWarning, match=r"gradients.py:\d+ writes in place to an argument"):
        found = gradient(graphed, mine)
    assert not torch.allclose(found, gradient(fn, other)), "Thunder's gradient has become right: the warning can go"


def test_a_write_that_thunder_puts_off_to_the_backward_is_warned_of():
    """It has no part in the gradient, and the graph of the forward has handed its result out by then."""

    def fn(x, z):
        y = z * 2
        y[:2].mul_(3.0)
        return torch.sin(x), y

    graphed = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    x, z = torch.randn(3, 4, requires_grad=True), torch.ones(3, 4)
    with pytest.warns(WrongGradientWarning, match=r"gradients.py:\d+ writes in place to what the caller sees"):
        _, y = graphed(x, z)
    assert not torch.equal(y, fn(x, z)[1]), "Thunder writes in time: the warning can go"


SCALARS = {  # of a matrix, a vector and a 0-dim tensor; whether Thunder's gradient of the last one is right
    "and of itself": (lambda x, v, s: (x * s).sum() + s.exp() * 3, False),
    "by a function of it": (lambda x, v, s: (x * s.exp()).sum() + s.sin(), False),
    "with two shapes": (lambda x, v, s: (x * s).sum() + (v * s).sum(), False),
    "in one place": (lambda x, v, s: (x * s.exp()).sum(), True),
    "with one shape": (lambda x, v, s: (x * (s.exp() + s)).sum() + (x.sin() / (s + 1)).sum(), True),
    "expanded": (lambda x, v, s: (x * s.expand(3, 3)).sum() + s.sin(), True),
    "alone": (lambda x, v, s: x.sum() + s.exp() * s.sin() + s, True),
}


@pytest.mark.parametrize("name", SCALARS)
def test_gradients_of_different_shapes_that_meet(name):
    fn, right = SCALARS[name]
    args = torch.randn(3, 3), torch.randn(3), torch.randn(())
    mine, others = ([arg.clone().requires_grad_() for arg in args] for _ in range(2))
    graphed = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        graphed(*mine).backward()
    assert any(NOT_SUMMED in str(each.message) for each in said) == (not right)
    fn(*others).backward()
    assert torch.allclose(mine[2].grad, others[2].grad, atol=1e-5) == right


def checkpointed(x, v, s):
    return checkpoint(lambda x, s: torch.tanh(x) * s, x, s, use_reentrant=False).sum() + s.exp()


UNSUMMED = {name: fn for name, (fn, right) in SCALARS.items() if not right} | {"checkpointed": checkpointed}


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("name", UNSUMMED)
def test_our_thunderfx_sums_them(name):
    fn = UNSUMMED[name]
    args = torch.randn(3, 3), torch.randn(3), torch.randn(())
    graphed = thunderfx(fn, backend="tape")
    for _ in range(3):
        mine, others = ([arg.clone().requires_grad_() for arg in args] for _ in range(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error", WrongGradientWarning)
            graphed(*mine).backward()
        fn(*others).backward()
        for one, other in zip(mine, others):
            torch.testing.assert_close(one.grad, other.grad)


def test_nothing_is_said_where_no_gradient_is_wanted():
    fn, _ = WRONG["slice, add"]
    graphed = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    torch.testing.assert_close(graphed(*(args := (torch.ones(3, 4), torch.ones(3, 2)))), fn(*args))


def test_layers_that_write_in_place_are_not_mistaken():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(True), nn.Linear(4, 2))
    graphed = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    for _ in range(3):
        graphed(torch.randn(5, 4)).sum().backward()


@pytest.mark.parametrize(
    "name", ["divides by its sum", "slice, add", "complex product", "imaginary factor", "negative padding_idx"]
)
@pytest.mark.nightly_after(2)
def test_our_thunderfx_has_the_right_gradient_and_says_nothing(name):
    fn, _ = WRONG[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", WrongGradientWarning)
        assert is_right(fn, thunderfx(fn, backend="tape"))
