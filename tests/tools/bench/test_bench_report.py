"""Tables of the results."""

from __future__ import annotations

from thunder_cg.tools.bench.goals import Goal
from thunder_cg.tools.bench.report import goals_table, scaling_tables, table
from thunder_cg.tools.bench.results import BenchmarkResults


def test_tables(results: BenchmarkResults) -> None:
    text = table(results.rows)
    assert text.count("| variant | host p50 / p99, µs | end to end p50 / p99, µs | back to back, µs | ") == 2
    assert "| thunder_cg | 25 / 30 | 110 / 116 | 105 |" in text
    assert "| thunder_cg | RuntimeError: no |" in text
    assert "| thunder_cg | 31 | 35 | 80 |" in scaling_tables(results)
    assert "+0.500 µs per parameter" in scaling_tables(results)
    goal = Goal("small", 1.1, 1.25, "x")
    assert "| small | 1.1 x | 1.25 x | NO |" in goals_table([goal])
