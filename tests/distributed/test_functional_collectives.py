"""Functional collectives, which Dynamo traces: in graphs, or in Inductor between them, and waited for there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain, thunderfx


def gathered(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    found = torch.empty_like(torch.cat([y, y]))
    dist.all_gather_into_tensor(found, y)
    return torch.tanh(found) + 1


def scattered(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    found = torch.empty_like(y[::2])
    dist.reduce_scatter_tensor(found, y)
    return torch.tanh(found) + 1


def exchanged(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    found = torch.empty_like(y)
    dist.all_to_all_single(found, y)
    return torch.tanh(found) + 1


def sent(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(functional.broadcast(x * 2, 1, dist.group.WORLD)) + 1


def smallest(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(functional.all_reduce(x * 2, "min", dist.group.WORLD)) + 1


def waited_for_late(x: torch.Tensor) -> torch.Tensor:
    """The operators in between are Thunder's."""
    begun = torch.ops._c10d_functional.all_gather_into_tensor(x * 2, 2, dist.group.WORLD.group_name)
    meanwhile = torch.sin(x) * 3 + 1
    return torch.tanh(torch.ops._c10d_functional.wait_tensor(begun)).sum(0) + meanwhile


def several(x: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    total = functional.all_reduce(x * 2, "sum", world)
    parts = functional.all_gather_tensor(torch.sin(x), 0, world)
    return torch.tanh(total) + functional.reduce_scatter_tensor(torch.cos(parts) + 1, "sum", 0, world)


def coalesced(x: torch.Tensor) -> torch.Tensor:
    first, second = functional.all_reduce_coalesced([x * 2, torch.sin(x)], "sum", dist.group.WORLD)
    return torch.tanh(first) + second


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    each.__name__: each
    for each in (gathered, scattered, exchanged, sent, smallest, waited_for_late, several, coalesced)
}


def late_rank(name: str, steps: int) -> tuple[int, list[dict[str, Any]], str]:
    """How many results differ from eager ones, where rank 1 comes late to each call; what ran, and the report."""
    import parallel

    torch._dynamo.reset()
    kind = "tape" if parallel.device().type == "cpu" else "cuda"
    compiled = thunderfx(FUNCTIONS[name], backend=kind, debug=True)
    seeds = [torch.Generator().manual_seed(2 * step + parallel.RANK()) for step in range(steps)]
    batches = [torch.randn(4, 8, generator=seed).to(parallel.device()) for seed in seeds]
    with torch.no_grad():
        expected = [FUNCTIONS[name](batch) for batch in batches]
        compiled(batches[0])
        found = []
        for batch in batches:
            time.sleep(0.1 * parallel.RANK())
            found.append(compiled(batch))
    return parallel.differing(found, expected), parallel.summary(compiled), str(explain(compiled))


@pytest.mark.parametrize(
    "name", [each if each == "several" else pytest.param(each, marks=pytest.mark.nightly) for each in FUNCTIONS][:-1]
)
def test_collectives_are_in_the_graphs(ranks: Ranks, name: str) -> None:
    for differing, (trace,), _ in ranks.run(late_rank, name, 4):
        assert not differing
        assert trace["replays"] == [4] and trace["collectives"] == (3 if name == "several" else 1)


@pytest.mark.nightly
def test_coalesced_collectives_are_between_graphs(ranks: Ranks) -> None:
    for differing, traces, text in ranks.run(late_rank, "coalesced", 4):
        assert not differing
        assert any(trace["replays"] for trace in traces) and not any(trace["fallbacks"] for trace in traces)
        assert "waits for a collective that Thunder does not trace" in text


def loses_gradient() -> str:
    import parallel

    torch._dynamo.reset()
    kind = "tape" if parallel.device().type == "cpu" else "cuda"
    with pytest.raises(Exception, match="has a gradient, which would be lost") as caught:
        thunderfx(sent, backend=kind)(torch.zeros(4, 8, device=parallel.device(), requires_grad=True))
    return str(caught.value)


def test_a_gradient_that_inductor_would_lose(ranks: Ranks) -> None:
    for said in ranks.run(loses_gradient):
        assert "CollectiveError: torch.distributed's broadcast at test_functional_collectives.py" in said


class Between(torch.nn.Module):
    """Two linear layers, and a collective that has a gradient between them."""

    def __init__(self, communicate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.communicate = communicate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.communicate(torch.tanh(self.first(x))))


class Copied(torch.autograd.Function):
    """As Megatron has it: the ranks' gradients of one tensor are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """And the ranks' tensors, whose gradients are one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        found = x.new_empty(2 * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(found, x.contiguous())
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found = gradient.new_empty(gradient.shape[0] // 2, *gradient.shape[1:])
        dist.reduce_scatter_tensor(found, gradient.contiguous())
        return found


DIFFERENTIABLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda y: functional.all_reduce(y, "sum", dist.group.WORLD),
    "all_gather": lambda y: functional.all_gather_tensor_autograd(y, 0, dist.group.WORLD),
    "as in Megatron": lambda y: Summed.apply(torch.sin(Copied.apply(y))),
    "gathered": Gathered.apply,
    "checkpointed": lambda y: checkpoint(DIFFERENTIABLE["all_reduce"], y, use_reentrant=False),
}


def late_rank_trains(name: str, steps: int) -> list[list[torch.Tensor]]:
    """The gradients of eager PyTorch and of thunderfx, where rank 1 comes late to each call."""
    import parallel

    torch._dynamo.reset()
    kind = "tape" if parallel.device().type == "cpu" else "cuda"
    found: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        model = Between(DIFFERENTIABLE[name]).to(parallel.device())
        called = thunderfx(model, backend=kind, debug=True) if compiles else model
        found.append([])
        for step in range(steps):
            seed = torch.Generator().manual_seed(2 * step + parallel.RANK())
            time.sleep(0.1 * parallel.RANK())
            model.zero_grad()
            called(torch.randn(4, 8, generator=seed).to(parallel.device())).square().sum().backward()
            found[-1] += [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_of_collectives(ranks: Ranks, name: str) -> None:
    """Inductor, which gets the collective, may sum in another order."""
    for expected, found in ranks.run(late_rank_trains, name, 4):
        assert len(found) == 4 * 4
        torch.testing.assert_close(found, expected)
