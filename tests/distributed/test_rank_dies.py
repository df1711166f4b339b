"""Processes that end: in the usual way, while their graphs hold collectives, and by a rank that dies."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from ranks import Ranks
from test_whole_steps import graphed, training_step

TIMEOUT = 5.0  # seconds


def train_and_leave(destroys: bool) -> list[list[int]]:
    import parallel

    compiled = parallel.fsdp(parallel.transform())
    parallel.train(compiled, 4)
    waiting.append(compiled(parallel.tokens(4)).square().mean())  # for a backward that never comes
    replays = [trace["replays"] for trace in parallel.summary(compiled)]
    if destroys:
        torch.distributed.destroy_process_group()
    return replays


waiting: list[torch.Tensor] = []


@pytest.mark.nightly
@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_processes_end(device: str, destroys: bool) -> None:
    """With and without their groups being destroyed before."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    ranks = Ranks(2, device, spawns=True)
    try:
        assert ranks.run(train_and_leave, destroys) == [[[4], [3]]] * 2
        assert ranks.end(timeout=60) == [0, 0]
    finally:
        ranks.close()


def train_until_rank_1_dies(is_whole: bool) -> None:
    import parallel
    import torch.distributed.distributed_c10d as c10d

    compiled = parallel.ddp(parallel.transform())
    for group in c10d._world.pg_map:  # Thunder makes a group of its own, with torch's default of 10 minutes
        c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)
    step = graphed(training_step(compiled), modules=compiled) if is_whole else None
    train(compiled, step)
    replays = [step.replays] if step is not None else [trace["replays"][0] for trace in parallel.summary(compiled)]
    assert set(replays) == {3}
    if parallel.RANK() == 1:
        os._exit(7)
    train(compiled, step)
    if parallel.device().type == "cuda":
        torch.cuda.synchronize()
    raise AssertionError("this rank does not miss the other one")


def train(compiled: Any, step: Any) -> None:
    import parallel

    if step is None:
        parallel.train(compiled, 4)
    else:
        for i in range(6):
            step(parallel.tokens(i))


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.nightly), "cuda"])
def test_a_rank_that_dies(device: str, is_whole: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """On GPUs, torch's watchdog does not see the collectives of a graph, and ours ends the process."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    ranks = Ranks(2, device, collective=TIMEOUT)
    with pytest.raises(AssertionError) as caught:
        ranks.run(train_until_rank_1_dies, is_whole, timeout=60)
    text = str(caught.value)
    assert "rank 1: the process ended with 7" in text and "does not miss" not in text
    if device == "cuda":
        assert "rank 0: the process ended with -6" in text
        assert f"collectives in a CUDA graph have not ended within {TIMEOUT:g} s" in capfd.readouterr().err
    else:
        assert "RuntimeError" in text
