"""Results of a made-up machine with a GPU."""

from __future__ import annotations

import pytest

from thunder_cg.tools.bench.cases import MLP, SMALL_GPT
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.results import BenchmarkResults, ScalingPoint
from thunder_cg.tools.bench.variants import FLOOR, OURS, THUNDER


@pytest.fixture
def results() -> BenchmarkResults:
    rows = [
        BenchmarkRow(MLP, THUNDER, 400.0, 500.0, 500.0, 600.0, 450.0, compile_s=9.0),
        BenchmarkRow(MLP, OURS, 25.0, 30.0, 110.0, 115.5, 105.0, compile_s=10.5, capture_ms=2.0, analysis_ms=500.0),
        BenchmarkRow(MLP, FLOOR, 4.0, 5.0, 100.0, 101.0, 100.0),
        BenchmarkRow(SMALL_GPT, OURS, failure="RuntimeError: no"),
        BenchmarkRow(SMALL_GPT, FLOOR, 20.0, 30.0, 300.0, 310.0, 300.0),
    ]
    times = [(n, v, t) for n in (2, 10, 100) for v, t in ((OURS, 30.0 + 0.5 * n), (FLOOR, 5.0))]
    points = [ScalingPoint("parameter", *each) for each in times]
    return BenchmarkResults({"device": "a GPU", "backend": "cuda"}, rows, points)
