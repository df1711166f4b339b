"""Ranks in processes of their own: results, failures, hangs; and the demo on two of them."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from thunder_cg import __main__ as command_line
from thunder_cg.tools import demo, demo_ranks
from thunder_cg.tools.ranks import Rank, RankFailed, run_on_ranks
from thunder_cg.tools.workers import Supervisor


def summed(here: Rank, supervisor: Supervisor, addend: int) -> int:
    supervisor.report(f"rank {here.rank} of {here.size}")
    supervisor.send_result("early")
    total = torch.tensor(here.rank + addend)
    dist.all_reduce(total)
    return int(total)


def troubled(here: Rank, supervisor: Supervisor, how: str) -> None:
    """Rank 1 fails or hangs; rank 0 waits for it in a collective."""
    if here.rank == 1 and how == "raises":
        raise ValueError("no luck")
    if how == "hangs":
        dist.barrier()  # the first one takes longer
    supervisor.report("the barrier", timeout=2.0 if how == "hangs" else 60.0)
    if here.rank == 1:
        time.sleep(600)
    dist.barrier()


@pytest.mark.usefixtures("forked_workers")
def test_results_of_all_ranks() -> None:
    stages: list[Any] = []
    results: list[Any] = []
    found = run_on_ranks(
        summed, (10,), 2, "cpu", 60.0, on_progress=lambda *stage: stages.append(stage), on_result=results.append
    )
    assert found == [21, 21]
    assert stages == [("rank 0 of 2", 1)] and results == ["early", 21]


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "rank 1: ValueError: no luck"),
        pytest.param(
            "hangs",
            "rank [01]: no result within 2 s, the barrier.*, in .*; rank [01]: the barrier, in .*",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_one_rank_ends_all(how: str, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match=said) as caught:
        run_on_ranks(troubled, (how,), 2, "cpu", 60.0)
    assert time.monotonic() - began < 30
    if how == "hangs":
        assert caught.value.stage == "the barrier"
        for each in ("in troubled (tools/test_ranks.py:", "barrier ("):
            assert each in str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", demo_ranks.PARALLEL)
def test_demo_agrees_on_both_ranks(
    parallel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = demo.DemoSettings(torch.device("cpu"), layers=1, width=16, heads=2, context=16, batch=2, steps=6)
    monkeypatch.setattr(demo, "settings_for", lambda device: tiny)
    assert command_line.main(["demo", "--device", "cpu", "--gpus", "2", "--parallel", parallel]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"on each of 2 ranks, 6 losses and \d+ parameters are the same .* bit for bit", printed)
    assert "2 regions with" in printed and "; 0 ops eager" in printed
    assert re.search(r"\d+ (all_reduce|reduce_scatter) of .* of 2 ranks, captured; \d+ can overlap", printed)
    losses = re.findall(r"^  rank \d .*x +([\d.]+)$", printed, re.MULTILINE)
    assert len(set(losses)) == 2, "ranks draw batches of their own"


def test_demo_names_the_rank_that_differs(capsys: pytest.CaptureFixture[str]) -> None:
    found = [demo_ranks.RankDemo(6, 9, differences, 1.0, 1.0, 1.0, []) for differences in ([], ["loss of step 2: ..."])]
    settings = demo.settings_for(torch.device("cpu"))
    assert demo_ranks._print_results(settings, found) == 1
    printed = capsys.readouterr().out
    assert "DISAGREEMENT on rank 1: of 6 losses and 9 parameters, 1 differ" in printed and "rank 0: of" not in printed
