"""The benchmark on several ranks: what is made by hand computes what PyTorch does; the command measures and writes."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from thunder_cg import __main__ as command_line
from thunder_cg.tools.bench import distributed as bench_distributed, rank_run
from thunder_cg.tools.bench.distributed import RankRow, _template, under_way
from thunder_cg.tools.bench.parallel import (
    COLLECTIVES_EAGER,
    DDP,
    FLOOR,
    FLOOR_OF_THUNDER,
    TENSOR,
    ZERO2,
    ZERO3,
    prepare,
    step_by_hand,
)
from thunder_cg.tools.bench.rank_cases import RankCase, rank_cases
from thunder_cg.tools.bench.rank_run import RankResults, RankSettings, overview, rank_table
from thunder_cg.tools.bench.variants import EAGER, OURS, THUNDER
from thunder_cg.tools.ranks import Rank, RankFailed, run_on_ranks
from thunder_cg.tools.workers import Supervisor

CPU = torch.device("cpu")


def by_both(here: Rank, supervisor: Supervisor, parallels: tuple[str, ...]) -> dict[str, list[float]]:
    """How far loss and gradients of the step by hand are from those of PyTorch's own parallelism."""
    return {parallel: _distances(parallel) for parallel in parallels}


def _distances(parallel: str) -> list[float]:
    (case, *_) = rank_cases(CPU, False)
    template = _template(replace(case, parallel=parallel))
    found = []
    for make in (lambda own: prepare(EAGER, own), step_by_hand):
        step = make(replace(template, model=copy.deepcopy(template.model)))
        for _ in range(2):
            loss = step.step()
        gradients = [_local(parameter.grad).flatten() for parameter in step.parameters if parameter.grad is not None]
        found.append([loss.flatten(), *gradients])
    return [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.nightly
def test_step_by_hand_computes_what_pytorch_does() -> None:
    parallels = (DDP, ZERO2, ZERO3, TENSOR)
    for found in run_on_ranks(by_both, (parallels,), 2, "cpu", 60.0):
        for parallel in parallels:
            assert len(found[parallel]) > 10 and max(found[parallel]) < 1e-6, parallel


@pytest.mark.nightly
def test_command_measures_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    words = ["bench", "--gpus", "2", "--device", "cpu", "--only", "ddp", "--calls", "1", "--json", str(file)]
    assert command_line.main([*words, "--variants", THUNDER, OURS]) == 0
    printed = capsys.readouterr().out
    assert "training 2 x 16 tokens, ddp**" in printed and "2 regions with" in printed and "; 0 ops eager" in printed
    content = json.loads(file.read_text())
    assert content["environment"]["ranks"] == "2"
    plain, ours = content["rows"]
    assert (plain["variant"], ours["variant"], ours["bits"]) == (THUNDER, OURS, "same")
    for row in (plain, ours):
        assert row["back_to_back_ms"] > 0 and row["skew_p99_ms"] > 0 and not row["failure"]


@pytest.mark.parametrize("jobs", [1, 3])
def test_failed_ranks_cost_one_case(
    jobs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = RankSettings(
        device=torch.device("cuda"), ranks=2, names=("ResNet",), jobs=jobs, json=tmp_path / "results.json"
    )
    cases = [case.name for case in settings.chosen]

    def run(work: Any, arguments: Any, size: int, kind: str, timeout: float, on_progress: Any, on_result: Any) -> None:
        (name,) = arguments[0].names
        if name == cases[1]:
            raise RankFailed("rank 1: out of luck")
        on_result([RankRow(name, OURS, 1.0)])
        on_result(None)  # what the work returns

    monkeypatch.setattr(rank_run, "run_on_ranks", run)
    monkeypatch.setattr(rank_run, "environment", lambda device: {})
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27))
    assert rank_run.run_ranks(settings) == 1
    printed = capsys.readouterr().out
    assert [f"**{case}**" in printed for case in cases] == [True] * 3 and "rank 1: out of luck" in printed
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["case"]: bool(row["failure"]) for row in rows} == dict(zip(cases, (False, True, False)))


def test_a_variant_that_hangs_costs_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The others are measured without it, in new processes."""
    (name,) = (case.name for case in RankSettings(device=CPU, ranks=2, names=("ddp",)).chosen)
    asked = []

    def run(work: Any, arguments: Any, size: int, kind: str, timeout: float, on_progress: Any, on_result: Any) -> None:
        names = arguments[2]
        asked.append([*names])
        if THUNDER in names:
            raise RankFailed("rank 0: no result within 90 s, in wait", f"{name}: turn 1 of 5: {THUNDER}")
        on_result([RankRow(name, each, 1.0) for each in names])

    monkeypatch.setattr(rank_run, "run_on_ranks", run)
    settings = RankSettings(
        device=CPU, ranks=2, names=("ddp",), variants=(EAGER, THUNDER, OURS), json=tmp_path / "results.json"
    )
    assert rank_run.run_ranks(settings) == 1
    assert THUNDER in asked[0] and asked[1] == [each for each in asked[0] if each != THUNDER]
    assert "| thunder | rank 0: no result within 90 s, in wait |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["variant"]: bool(row["failure"]) for row in rows} == {each: each == THUNDER for each in asked[0]}


def test_a_rank_says_what_was_raised_before_it_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their GPUs may wait for it for ever."""
    order: list[str] = []

    def everyone(value: Any, control: Any) -> list[Any]:
        order.append("waits")
        return ["", value]

    def raises() -> None:
        raise ValueError("no luck")

    monkeypatch.setattr(bench_distributed, "_everyone", everyone)
    control: Any = None
    assert bench_distributed._failure(raises, control, order.append) == "rank 1: ValueError: no luck"
    assert order == ["ValueError: no luck", "waits"]


def test_a_variant_that_is_under_way_is_known() -> None:
    names = [EAGER, COLLECTIVES_EAGER, OURS]
    assert [under_way(f"GPT: turn 1 of 5: {name}", names) for name in (*names, "other")] == [*names, None]


def test_table_has_the_ratios_that_count() -> None:
    rows = [
        RankRow("case", THUNDER, 30.0, 29.0, 1.5, 900.0, 10.0),
        RankRow("case", OURS, 6.0, 0.1, 0.01, 950.0, 12.0, bits="same", captured="2 regions with 9 of 9 ops"),
        RankRow("case", FLOOR, 5.0, 0.02, 0.01, 800.0, 1.0),
        RankRow("case", EAGER, failure="a | b"),
    ]
    table = rank_table(rows)
    assert "| thunder_cg | 6.00 | 0.10 | 0.010 | 950 | 12.0 | same |" in table
    assert "thunder_cg, back to back: 0.20 x thunder, 1.20 x hand-made graph" in table
    assert "| eager | a / b |" in table


def test_page_has_the_times_of_two_gpus() -> None:
    folder = Path(__file__).parents[3] / "thunder_cg" / "tools" / "results"
    results = RankResults.read(folder / "ranks-h200.json")
    assert overview(results.rows) in (folder / "RESULTS.md").read_text(encoding="utf-8")


def test_names_choose_cases_and_variants() -> None:
    gpu = torch.device("cuda")
    settings = RankSettings(device=gpu, ranks=2, names=("GPT, 12 layers, width 768, training 2 x",))
    names = [case.name for case in settings.chosen]
    assert names == [f"GPT, 12 layers, width 768, training 2 x 128 tokens, {p}" for p in (DDP, ZERO2, ZERO3, TENSOR)]
    case = RankCase(settings.chosen[0].case, DDP, gpu)
    assert replace(settings, variants=(OURS, "hand")).chosen_variants(case) == [OURS, FLOOR_OF_THUNDER, FLOOR]
    assert COLLECTIVES_EAGER in replace(settings, variants=("collectives",)).chosen_variants(case)


def test_command_says_how_many_gpus_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command_line.main(["bench", "--gpus", "99"])
    assert left.value.code == 2
    assert f"--gpus 99: this machine has {torch.cuda.device_count()} GPUs; --device cpu" in capsys.readouterr().err
