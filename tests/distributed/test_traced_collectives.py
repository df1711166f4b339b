"""Collectives of ``torch.distributed`` in what is compiled: symbols of the trace, in graphs with their waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from ranks import Ranks
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

from thunder_cg import explain, thunderfx
from thunder_cg.errors import CollectiveError

SPLITS = [([1, 2], [1, 3]), ([3, 2], [2, 2])]  # received and sent, of each rank


def broadcasts(x: torch.Tensor) -> torch.Tensor:
    """In place, of an argument, of a view, and of what only the other rank uses."""
    dist.broadcast(x, 1)
    y = torch.sin(x + dist.get_rank())
    handle = dist.broadcast(y[1], group_src=0, async_op=True)
    z = torch.cos(x)
    handle.wait()
    other = x * (2 + dist.get_rank())
    dist.broadcast(other, 1, dist.group.WORLD)
    return y * z + (other if dist.get_rank() == 0 else 1)


def exchanges(x: torch.Tensor) -> torch.Tensor:
    received, sent = SPLITS[dist.get_rank()]
    found = torch.empty(sum(received), 8, device=x.device)
    handle = dist.all_to_all_single(found, torch.sin(x), received, sent, async_op=True)
    equal = torch.empty_like(x)
    dist.all_to_all_single(equal, x * 2)
    x.add_(1)
    handle.wait()
    return torch.cat([found, equal, x])


def reduces(x: torch.Tensor) -> torch.Tensor:
    """All at once, as of gradients; what is added afterwards stays apart."""
    parts = [torch.sin(x * i) for i in range(1, 4)]
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)
    handles = [dist.all_reduce(part, kind, async_op=True) for part, kind in zip(parts, kinds)]
    gathered = torch.empty(8, 8, device=x.device)
    dist.all_gather_into_tensor(gathered, x)
    scattered = torch.empty(2, 8, device=x.device)
    dist.reduce_scatter_tensor(scattered, x)
    for handle in handles:
        handle.wait()
    parts[0].add_(1)
    dist.all_reduce(parts[0])
    return torch.cat([*parts, gathered, scattered])


def functionally(x: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    total = functional.all_reduce(x, "sum", world)
    parts = functional.all_gather_tensor(torch.sin(x), 0, world)
    meanwhile = torch.cos(x)
    mean = functional.reduce_scatter_tensor(parts, "max", 0, world)
    exchanged = functional.all_to_all_single(mean, None, None, world)
    return functional.broadcast(exchanged * meanwhile, 1, world) + functional.wait_tensor(total)


def unused(x: torch.Tensor) -> torch.Tensor:
    """Rank 1 sends, and uses nothing of it."""
    sent = functional.broadcast(torch.sin(x), 1, dist.group.WORLD)
    total = functional.all_reduce(torch.cos(x), "sum", dist.group.WORLD)
    return sent + total if dist.get_rank() == 0 else x + 1


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    each.__name__: each for each in (broadcasts, exchanges, reduces, functionally, unused)
}


def batches(steps: int) -> list[torch.Tensor]:
    import parallel

    seeds = [torch.Generator().manual_seed(2 * step + parallel.RANK()) for step in range(steps)]
    return [torch.randn(4, 8, generator=seed).to(parallel.device()) for seed in seeds]


def called(name: str, by: str, **options: Any) -> tuple[int, list[dict[str, Any]], str]:
    """How many results and arguments differ from eager ones, what ran, and the report."""
    import parallel

    torch._dynamo.reset()
    function = FUNCTIONS[name]
    if by == "jit":
        compiled = thunder.jit(function, transforms=[parallel.transform(**options)])
    else:
        kind = "tape" if parallel.device().type == "cpu" else "cuda"
        compiled = thunderfx(function, backend=kind, debug=True, **options)
    with torch.no_grad():
        found = [[each(x), x] for each in (function, compiled) for x in batches(4)]
    differing = parallel.differing(sum(found[4:], []), sum(found[:4], []))
    return differing, parallel.summary(compiled), str(explain(compiled))


@pytest.mark.parametrize(("name", "collectives"), [("broadcasts", 3), ("exchanges", 2), ("reduces", 6), ("functionally", 5)])
def test_collectives_are_captured(ranks: Ranks, name: str, collectives: int) -> None:
    for differing, (trace,), text in ranks.run(called, name, "jit"):
        assert not differing
        assert not trace["eager"] and trace["collectives"] == collectives
        assert trace["replays"] == [3] and not trace["fallbacks"]
        assert f"{collectives} collectives" in text or "in group" in text


def test_collectives_that_one_rank_alone_uses(ranks: Ranks) -> None:
    """Thunder would drop them on the other rank."""
    for differing, (trace,), _ in ranks.run(called, "unused", "jit"):
        assert not differing and trace["collectives"] == 2 and trace["replays"] == [3]
