"""Nothing depends on there being two ranks: four agree, capture, and compute the same bits as without graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import thunder
import torch
from ranks import Ranks
from test_parallel import same_bits
from test_whole_steps import counts_less, graphed, same_bits as same_bits_of_steps
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def four(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("there are no four GPUs")
    pool = Ranks(4, request.param)
    yield pool
    pool.close()


@pytest.mark.nightly
def test_four_ranks(four: Ranks) -> None:
    for differing, traces in four.run(same_bits, "fsdp zero2", 4, 1, timeout=180.0):
        assert not differing, traces
        for trace in traces:
            assert trace["replays"] == [3] and not trace["eager"] and not trace["fallbacks"], trace
        # The sum of four numbers depends on the order, which NCCL chooses by size; gathers only move bits.
        assert [trace["launches"] < trace["collectives"] for trace in traces] == [True, False]


@pytest.mark.nightly
def test_whole_steps(four: Ranks) -> None:
    for differing, replays, in_python in four.run(same_bits_of_steps, "ddp", 6, 1, timeout=180.0):
        assert not differing and replays == 3, in_python


class InTwoGroups(torch.nn.Module):
    """The forward communicates in both dimensions of a mesh, its backward in one."""

    def __init__(self, row: Any, column: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.row, self.column = row, column

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.all_reduce(torch.tanh(self.first(x)), "sum", self.row)
        with torch.no_grad():
            scale = y.sum(0)
            dist.all_reduce(scale, group=self.column)
        return self.second(y) + scale


def train_a_module(lost: int, row: Any, column: Any, *, captures: bool) -> tuple[list[torch.Tensor], Any]:
    import parallel

    found, kept = [], []
    capture = "auto" if captures else "never"
    compiled = thunder.jit(
        InTwoGroups(row, column).to(parallel.device()), transforms=[parallel.transform(capture_collectives=capture)]
    )
    for step in range(36):
        compiled.zero_grad(set_to_none=True)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 4 + dist.get_rank()))
        compiled(x.to(parallel.device())).square().mean().backward()
        if step == 4 and dist.get_rank() == lost:
            kept += [p.grad for p in compiled.parameters()]  # so that it has to capture anew
        found += [p.grad.clone() for p in compiled.parameters()]
    return found, [count for trace in parallel.summary(compiled) for count in trace["captures"]]


def train_a_step(lost: int, row: Any, column: Any, *, captures: bool) -> tuple[list[torch.Tensor], Any]:
    import parallel

    model, found = parallel.model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def fn(tokens):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        for work in [dist.all_reduce(p.grad, group=column, async_op=True) for p in model.parameters()]:
            work.wait()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=row)
        return mean

    step = graphed(fn) if captures else fn
    for i in range(36):
        if captures and dist.get_rank() == lost and i == 6:
            step.release()
        found += [step(parallel.tokens(i)).clone(), *(p.detach().clone() for p in model.parameters())]
    return found, [step.captures] * 2 if captures else None


def meets(train: Callable[..., Any], lost: int) -> tuple[int, list[int]]:
    import parallel

    mesh = init_device_mesh(parallel.device().type, (2, 2), mesh_dim_names=("column", "row"))
    groups = mesh["row"].get_group(), mesh["column"].get_group()
    parallel.forget_meetings()
    with patch.multiple("thunder_cg.runtime.ranks.groups", _TIMEOUT=1.0, _MEETING_TIMEOUT=10.0, _PERIOD=8, _MEETING=8):
        (theirs, _), (ours, counts) = (train(lost, *groups, captures=captures) for captures in (False, True))
    return parallel.differing(ours, theirs), counts


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [0, 3])
@pytest.mark.parametrize("train", [train_a_module, train_a_step])
def test_ranks_of_a_mesh_get_together_again(four: Ranks, train: Callable[..., Any], lost: int) -> None:
    """One rank has lost its recording, and shares no group with another one that has to capture, too."""
    assert four.run(meets, train, lost, timeout=120.0) == [(0, [2, 2])] * 4


@pytest.mark.nightly
def test_ranks_that_have_counted_less(four: Ranks) -> None:
    """Each of them by another number of calls."""
    found = four.run(counts_less, (0, 1, 2, 3), timeout=120.0)
    assert len({replays for replays, _ in found}) == 1 and found[0][0] >= 3, found
