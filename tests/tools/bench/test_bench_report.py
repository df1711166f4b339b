"""Tables of the results."""

from __future__ import annotations

import pytest

from thunder_cg.tools.bench.report import growth, scaling_tables, table
from thunder_cg.tools.bench.results import BenchmarkResults
from thunder_cg.tools.bench.variants import OURS


def test_tables(results: BenchmarkResults) -> None:
    text = table(results.rows)
    assert text.count("| variant | host p50 / p99, µs | end to end p50 / p99, µs | back to back, µs | ") == 2
    assert "| thunder_cg | 25 / 30 | 110 / 116 | 105 |" in text
    assert "| thunder_cg | RuntimeError: no |" in text
    assert "| thunder_cg | 31 | 35 | 80 |" in scaling_tables(results)
    assert "+0.500 µs per parameter" in scaling_tables(results)


def test_growth_needs_two_sizes_with_the_hand_made_graph(results: BenchmarkResults) -> None:
    assert growth(results, "parameter") == pytest.approx(0.5)
    assert growth(results, "layer") is None
    results.points = [p for p in results.points if p.variant == OURS or p.size == 2]
    assert growth(results, "parameter") is None
