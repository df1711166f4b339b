"""In `thunderfx`, parameters that no loss depends on have no gradient, as in PyTorch: no optimizer changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from torch import Tensor, nn

from thunder_cg import cudagraph_transform, thunderfx


class Net(nn.Module):
    """Two layers, of which a loss uses the first result only."""

    def __init__(self, forward: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def _returned(net: Net, x: Tensor) -> Any:
    return net.first(x), net.second(x).relu()


def _detached(net: Net, x: Tensor) -> Any:
    return net.first(x) + net.second(x).detach(), x.relu()


def _of_zeros(net: Net, x: Tensor) -> Any:
    return net.first(x) + 0 * net.second(x), net.second(x)


def _in_place(net: Net, x: Tensor) -> Any:
    y = torch.zeros_like(x)
    y[0] = net.second(x[0])
    return net.first(x) + y.relu(), net.second.bias * 2


def _across_a_break(net: Net, x: Tensor) -> Any:
    y = net.first(x).relu()
    z = net.second(y).sin()
    torch._dynamo.graph_break()
    return y * 2, z.cos() * y.detach()


def _checkpointed(net: Net, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(lambda x: (net.first(x), net.second(x)), x, use_reentrant=False)


def _steps(net: Net, call: Callable[[Tensor], Any]) -> list[Any]:
    """Some steps of an optimizer with weight decay, the last one with a loss of both results."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.1)
    found = []
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        first, second = call(torch.randn(3, 4))
        (first.sum() if step < 4 else first.sum() + second.sum()).backward()
        optimizer.step()
        found.append([parameter.grad is None for parameter in net.parameters()])
    return [*found, *(parameter.detach() for parameter in net.parameters())]


@pytest.mark.parametrize("forward", [_returned, _detached, _of_zeros, _in_place])
@pytest.mark.nightly_after(2)
def test_gradients_that_a_loss_does_not_depend_on_are_none(forward: Callable[..., Any]) -> None:
    net = Net(forward)
    plain = copy.deepcopy(net)
    expected = _steps(plain, plain)
    torch.testing.assert_close(_steps(net, thunderfx(net, backend="tape")), expected)
    assert expected[0] == [False, False, *([forward is not _of_zeros and forward is not _in_place] * 2)]


@pytest.mark.parametrize("forward", [_across_a_break, _checkpointed])
@pytest.mark.nightly_after(1)
def test_gradients_are_none_across_graphs_of_dynamos(forward: Callable[..., Any]) -> None:
    net = Net(forward)
    plain = copy.deepcopy(net)
    torch.testing.assert_close(_steps(net, thunderfx(net, backend="tape")), _steps(plain, plain))


@pytest.mark.parametrize("forward", [_returned, _of_zeros])
@pytest.mark.nightly_after(1)
def test_gradients_with_a_transform_are_those_of_thunder(forward: Callable[..., Any]) -> None:
    net = Net(forward)
    plain, graphed = thunder.jit(copy.deepcopy(net)), thunder.jit(net, transforms=[cudagraph_transform(backend="tape")])
    torch.testing.assert_close(_steps(graphed, graphed), _steps(plain, plain), rtol=0, atol=0)
