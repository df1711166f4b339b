"""Process groups that go: their graphs go first, nothing hangs, and a new group is not taken for an old one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks, begin_group


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
