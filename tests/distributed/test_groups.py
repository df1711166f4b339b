"""Process groups that go: their graphs go first, nothing hangs, and a new group is not taken for an old one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from ranks import Ranks, begin_group
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from thunder_cg.dynamo.compiler import compile_with


def destroy_and_begin_anew(builder: str, folder: str) -> dict[str, Any]:
    """Trains, destroys the default group, tries to go on, makes a new group, and trains a new model."""
    import parallel

    where, rank, size = parallel.device(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    build = parallel.BUILDERS[builder]
    plain, compiled = build(), build(parallel.transform())
    differing = [parallel.differing(parallel.train(compiled, 4), parallel.train(plain, 4))]
    waiting = [each(parallel.tokens(9)).square().mean() for each in (plain, compiled)]  # for their backward
    replays = [each for trace in parallel.summary(compiled) for each in trace["replays"]]
    torch.distributed.destroy_process_group()
    begin_group(rank, size, where.type, f"{folder}/store")
    plainly, graphed = [outcome(loss.backward) for loss in waiting]
    outcomes = [(plainly, graphed)]
    outcomes.append(tuple(outcome(lambda: parallel.train(each, 2)) for each in (plain, compiled)))  # noqa: B023
    differing.append(parallel.differing(parallel.train(build(parallel.transform()), 4), parallel.train(build(), 4)))
    return {
        "differing": differing,
        "outcomes": outcomes,
        "replays": (replays, [each for trace in parallel.summary(compiled) for each in trace["replays"]]),
        "fallbacks": [reason for trace in parallel.summary(compiled) for reason in trace["fallbacks"]],
    }


def outcome(call: Callable[[], Any]) -> str:
    """What gloo allows with a group that has been destroyed, NCCL refuses."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


@pytest.mark.parametrize("builder", ["ddp", pytest.param("tensor parallel", marks=pytest.mark.nightly)])
def test_a_group_that_is_destroyed(ranks: Ranks, builder: str) -> None:
    for found in ranks.run(destroy_and_begin_anew, builder, tempfile.mkdtemp()):
        assert found["differing"] == [0, 0]
        for plainly, graphed in found["outcomes"]:
            assert graphed == plainly
        before, after = found["replays"]
        assert before[-1] == after[-1]  # the backward; a forward of ddp does not communicate
        assert any("has been destroyed or aborted" in reason for reason in found["fallbacks"])


def goes_on_in_a_destroyed_group() -> list[str]:
    """What comes of calls of uncaptured Thunder, and with graphs, of a function that has the group itself."""
    import parallel

    group, found = dist.new_group([0, 1]), []

    def reduced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        return y + 1

    plain, compiled = thunder.jit(reduced), thunder.jit(reduced, transforms=[parallel.transform()])
    x = torch.ones(4, device=parallel.device())
    for call in (plain, compiled, compiled, compiled):
        call(x)
    dist.destroy_process_group(group)
    for call in (plain, compiled, compiled):
        found.append(outcome(lambda: torch.testing.assert_close(call(x), 4 * x + 1)))  # noqa: B023
    return [each.partition(":")[0] for each in found]


def test_calls_go_on_as_without_graphs_where_a_group_is_destroyed(ranks: Ranks) -> None:
    for plainly, *graphed in ranks.run(goes_on_in_a_destroyed_group):
        assert graphed == [plainly] * 2, (plainly, graphed)


def by_default(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def by_name(x: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor(x * 2, 0, _default["name"]) + 1


def as_a_mesh(x: torch.Tensor) -> torch.Tensor:
    return functional.all_reduce(x * 2, "sum", _default["mesh"]) + 1


def by_rank(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 + (5 if dist.get_rank() == 0 else 0)
    dist.broadcast(y, 0)
    return y * (1 + dist.get_rank())


def by_place(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * 2) * (1 + _default["latest"].get_local_rank())


_default: dict[str, Any] = {}


def default_group_anew(
    function: Callable[[torch.Tensor], torch.Tensor], folder: str, compiler: str = "jit"
) -> list[tuple[int, list[int]]]:
    """How many results are not eager PyTorch's, and the replays, with one default group and with another one.

    On a CPU, the ranks are the other way round in that.
    """
    import parallel

    where, rank, size = parallel.device(), dist.get_rank(), dist.get_world_size()
    other = size - 1 - rank if where.type == "cpu" else rank
    torch._dynamo.reset()
    compile_ = thunder.jit if compiler == "jit" else compile_with
    compiled, found = compile_(function, transforms=[parallel.transform()]), []
    for current in (other, rank):
        latest = init_device_mesh(where.type, (size,))
        mesh = _default.get("mesh") or latest
        _default.update(name=dist.group.WORLD.group_name, mesh=mesh, latest=latest)
        seeds = [torch.Generator().manual_seed(10 * i + dist.get_rank()) for i in range(4)]
        batches = [torch.randn(4, 4, generator=seed).to(where) for seed in seeds]
        differing = sum(not torch.equal(compiled(x.clone()), function(x)) for x in batches)
        found.append((differing, [each for trace in parallel.summary(compiled) for each in trace["replays"]]))
        dist.destroy_process_group()
        begin_group(current, size, where.type, f"{folder}/{len(found)}")
    _default.clear()
    return found


@pytest.mark.parametrize("function", [by_default, by_name, as_a_mesh])
def test_the_default_group_made_anew(ranks: Ranks, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What takes it without naming the object is compiled anew: Thunder would go on in the old group."""
    assert ranks.run(default_group_anew, function, tempfile.mkdtemp()) == [[(0, [3]), (0, [3, 3])]] * 2


@pytest.mark.parametrize(("function", "compiler"), [(by_rank, "jit"), (by_rank, "thunderfx"), (by_place, "thunderfx")])
def test_ranks_that_are_numbered_anew(
    ranks: Ranks, function: Callable[[torch.Tensor], torch.Tensor], compiler: str
) -> None:
    """They capture no collectives, since their programs differ. Dynamo takes its rank for constant, also in a mesh."""
    for found in ranks.run(default_group_anew, function, tempfile.mkdtemp(), compiler):
        assert [differing for differing, _ in found] == [0, 0]


def abort_and_go_on() -> list[dict[str, Any]]:
    """Trains, aborts the group that ddp has made, and trains on, which gloo allows."""
    import parallel
    import torch.distributed.distributed_c10d as c10d

    before = set(c10d._world.pg_map)
    compiled = parallel.ddp(parallel.transform())
    parallel.train(compiled, 3)
    for group in set(c10d._world.pg_map) - before:
        group.abort()
    parallel.train(compiled, 3)
    return parallel.summary(compiled)


def test_a_group_that_is_aborted(ranks: Ranks) -> None:
    """Nothing is captured with it again."""
    if ranks.device == "cuda":
        pytest.skip("NCCL does not go on")
    for _, backward in ranks.run(abort_and_go_on):
        assert backward["replays"] == [2] and backward["captures"] == [1]
        assert backward["fallbacks"] == {"the process group of its collectives has been destroyed or aborted": 3}
