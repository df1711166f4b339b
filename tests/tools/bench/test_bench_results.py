"""The result file of the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from thunder_cg.report.rules import RESULTS
from thunder_cg.tools.bench.cases import MLP, SMALL_GPT
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.results import BenchmarkResults, ScalingPoint
from thunder_cg.tools.bench.variants import (
    EAGER,
    FLOOR,
    FLOOR_OF_THUNDER,
    GRAPHED_CALLABLES,
    GRAPHED_STEP,
    GRAPHED_STEP_FUSED,
    OURS,
    OURS_FUSED,
    REDUCE_OVERHEAD,
)
from thunder_cg.tools.results import environment

CPU = torch.device("cpu")
Rows = dict[tuple[str, str], BenchmarkRow]


@pytest.fixture
def page() -> str:
    return (RESULTS / "RESULTS.md").read_text(encoding="utf-8")


@pytest.fixture
def rows() -> Rows:
    """By case and variant."""
    return {(row.case, row.variant): row for row in BenchmarkResults.read(RESULTS / "h200.json").rows}


def test_results_are_read_as_they_were_written_and_added_to(tmp_path: Path, results: BenchmarkResults) -> None:
    results.environment = environment(CPU)
    file = tmp_path / "new" / "results.json"
    results.write(file)
    found = BenchmarkResults.read_or_new(file, environment(CPU))
    assert found == results
    found.add([BenchmarkRow(MLP, OURS, 1.0)])
    found.add_points([ScalingPoint("parameter", 3, OURS, 1.0)])
    assert [(row.case, row.host_p50) for row in found.rows] == [(SMALL_GPT, 0.0), (SMALL_GPT, 20.0), (MLP, 1.0)]
    assert found.points == [ScalingPoint("parameter", 3, OURS, 1.0)]


def test_results_of_the_release_can_be_read() -> None:
    results = BenchmarkResults.read(RESULTS / "h200.json")
    assert results.rows and results.points
    assert results.environment["device"] == "NVIDIA H200"


def times(row: BenchmarkRow | None, bold: bool = False) -> str:
    text = "--" if row is None else "fails" if row.failure else f"{row.back_to_back:,.0f}"
    return f"**{text}**" if bold else text


def test_page_has_the_times_of_fused_kernels(page: str, rows: Rows) -> None:
    training = {case for case, _ in rows if "training" in case}
    assert len(training) == 8
    for case in training:
        eager, other, made, floor, ours = (
            rows[case, variant] for variant in (EAGER, REDUCE_OVERHEAD, GRAPHED_CALLABLES, FLOOR, OURS_FUSED)
        )
        compilation = f"{ours.compile_s:.0f} ({'--' if other.failure else f'{other.compile_s:.0f}'})"
        cells = (*map(times, (eager, other, made, floor)), times(ours, bold=True), compilation)
        assert f"| {case} | {' | '.join(cells)} |" in page
        fastest = min(row.back_to_back for row in (eager, other) if not row.failure)
        assert ours.back_to_back < fastest, "never slower than eager or reduce-overhead"


def test_page_has_the_times_of_whole_steps(page: str, rows: Rows) -> None:
    steps = {case for case, _ in rows if "whole step" in case}
    assert len(steps) == 6
    for case in steps:
        before = [times(rows[case, variant]) for variant in (EAGER, REDUCE_OVERHEAD, OURS_FUSED)]
        after = [times(rows.get((case, variant))) for variant in (GRAPHED_STEP, FLOOR_OF_THUNDER, FLOOR)]
        step = rows[case, GRAPHED_STEP_FUSED]
        assert f"| {' | '.join([case, *before, times(step, bold=True), *after])} |" in page
        assert step.back_to_back < rows[case, REDUCE_OVERHEAD].back_to_back
        if (own := rows.get((case, GRAPHED_STEP))) is not None:
            assert own.back_to_back < 1.03 * rows[case, FLOOR_OF_THUNDER].back_to_back
