"""The result file of the benchmark."""

from __future__ import annotations

from pathlib import Path

import torch

from thunder_cg.report.rules import RESULTS
from thunder_cg.tools.bench.cases import MLP, SMALL_GPT
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.results import BenchmarkResults, ScalingPoint
from thunder_cg.tools.bench.variants import EAGER, FLOOR, GRAPHED_CALLABLES, OURS, OURS_FUSED, REDUCE_OVERHEAD
from thunder_cg.tools.results import environment

CPU = torch.device("cpu")


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
    results = BenchmarkResults.read(RESULTS / "h100.json")
    assert results.rows and results.points
    assert results.environment["device"] == "NVIDIA H100 80GB HBM3"


def test_page_has_the_times_of_fused_kernels() -> None:
    page = (RESULTS / "RESULTS.md").read_text(encoding="utf-8")
    files = [BenchmarkResults.read(RESULTS / name) for name in ("h100.json", "training-h200.json")]
    rows = {(row.case, row.variant): row for results in files for row in results.rows}
    cases = {case for case, _ in rows if "training" in case}
    assert len(cases) == 8
    for case in cases:
        measured = [rows[case, variant] for variant in (EAGER, REDUCE_OVERHEAD, GRAPHED_CALLABLES, FLOOR, OURS_FUSED)]
        times = ["fails" if row.failure else f"{row.back_to_back:,.0f}" for row in measured]
        eager, other, *_, ours = measured
        compilation = f"{ours.compile_s:.0f} ({'--' if other.failure else f'{other.compile_s:.0f}'})"
        assert f"| {case} | {' | '.join(times[:-1])} | **{times[-1]}** | {compilation} |" in page
        assert ours.end_to_end_p50 < eager.end_to_end_p50 or eager.failure
