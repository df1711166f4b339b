"""What is returned beside what it is a view of: a later write to one shows in the other, as in PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import regions, same
from torch import nn

from thunder_cg import explain, thunderfx

VIEWS = [
    "y.diagonal()",
    "torch.diagonal(y, 1)[1:]",
    "y.unfold(0, 2, 1)",
    "y.ravel()",
    "y.swapaxes(0, 1)",
    "y[1:, 0]",
    "y.float()",
    "y.float().float()",
    "y.repeat(1, 1)",  # new memory, though its values are those of y
    "y.repeat((1, 1))",
    "y.repeat(2, 1, 1)",
    "y.t().repeat(1, 1)",
    "y[:1].repeat_interleave(4, 0)",
    "y.flip(())",
]


def returning(results: str) -> Any:
    names: dict[str, Any] = {"torch": torch}
    exec(f"def made(x):\n y = x * 2\n return {results}", names)
    return names["made"]


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.nightly_after(10)
def test_a_view_beside_what_it_shows(backend, device, view, with_gradient):
    of_y, of_x = returning(f"y, {view}"), returning(view.replace("y.", "x.").replace("y[", "x[").replace("(y", "(x"))
    for fn in (of_y, lambda x: (x, of_x(x))):
        graphed = thunderfx(fn, backend=backend)
        for seed in range(4):
            outcomes = []
            for each in (graphed, fn):
                torch.manual_seed(seed)
                x = torch.randn(4, 4, device=device, requires_grad=with_gradient)
                whole, part = each(x)
                if with_gradient:
                    (whole.exp().sum() + part.sin().sum()).backward()
                with torch.no_grad():
                    whole[1] = 7.0
                    seen = part.clone()
                    part.zero_()
                outcomes.append((whole.detach(), seen, x.grad))
            same(*outcomes)


def test_what_is_left_to_inductor_is_named(backend, device):
    graphed = thunderfx(returning("y, y.diagonal()"), backend=backend)
    graphed(torch.ones(3, 3, device=device, requires_grad=True))
    (outside,) = explain(graphed).outside
    assert "returned beside it, and Thunder may return a copy" in outside.reason


@pytest.mark.parametrize("view", ["y.detach()", "y.ravel()", "y.float()", "y.double()"])
def test_a_view_that_a_trace_makes_is_in_the_graph(backend, device, view):
    graphed = thunderfx(returning(f"(y := x.double()), {view}" if "double" in view else f"y, {view}"), backend=backend)
    for _ in range(3):
        whole, part = graphed(torch.ones(3, 3, device=device, requires_grad=True))
        whole.detach()[:] = 7.0
        assert (part == 7.0).all()
    assert not explain(graphed).outside


def test_a_view_that_is_returned_alone_is_in_the_graph(backend, device):
    graphed = thunderfx(returning("y.diagonal() * y[0], y.diagonal()"), backend=backend)
    for _ in range(4):
        x = torch.ones(3, 3, device=device, requires_grad=True)
        sum(result.sum() for result in graphed(x)).backward()
    assert not explain(graphed).outside and any(region["replays"] for region in regions(graphed))


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.mT,
        lambda y: y.diagonal(),
        lambda y: y.imag,
        lambda y: y.mT.real[1:],
        lambda y: y.T,
        lambda y: torch.einsum("ij->ji", y),
    ],
    ids=["mT", "diagonal", "imag", "real of mT", "T", "einsum"],
)
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.nightly_after(4)
def test_a_view_beside_what_trains(backend, device, view, is_written):
    """Of what has no gradient, where a layer has one: it is written, or shows what is written to the other."""

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, device=device)

        def forward(self, x, c):
            y = c * 2
            part = view(y)
            (part if is_written else y).mul_(3)
            return self.linear(x) * y.abs(), part, y

    model = Writes()
    twin = copy.deepcopy(model)
    graphed = thunderfx(twin, backend=backend)
    for _ in range(4):
        x, c = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device, dtype=torch.complex64)
        found, expected = (each(x, c) for each in (graphed, model))
        same(found, expected)
        for each in (found, expected):
            each[0].sum().backward()
            each[2].zero_()
        assert not found[1].any()
    same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])
    assert not explain(graphed).outside and all(region["replays"] for region in regions(graphed))
