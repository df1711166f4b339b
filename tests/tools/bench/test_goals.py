"""The goals follow from the rows and points alone."""

from __future__ import annotations

import pytest

from thunder_cg.tools.bench.cases import MLP
from thunder_cg.tools.bench.goals import goals, growth
from thunder_cg.tools.bench.results import BenchmarkResults
from thunder_cg.tools.bench.variants import OURS


def test_goals_follow_from_the_rows(results: BenchmarkResults) -> None:
    found = {goal.name: (round(goal.found, 3), goal.met) for goal in goals(results)}
    assert found == {
        f"end to end over the hand-made graph, {MLP}": (1.1, True),
        f"host time over the hand-made graph, {MLP}": (21.0, False),
        f"end to end, p99 over p50, {MLP}": (1.05, True),
        "host time over the hand-made graph, per parameter": (0.5, False),
        f"capture over an uncaptured call, at worst: {MLP}": (4.0, False),
        f"analysis over the rest of the compilation, at worst: {MLP}": (0.05, True),
    }


def test_the_tape_is_no_measure_of_a_capture(results: BenchmarkResults) -> None:
    results.environment["backend"] = "tape"
    assert not any(goal.name.startswith("capture") for goal in goals(results))


def test_growth_needs_two_sizes_with_the_hand_made_graph(results: BenchmarkResults) -> None:
    assert growth(results, "parameter") == pytest.approx(0.5)
    assert growth(results, "layer") is None
    results.points = [p for p in results.points if p.variant == OURS or p.size == 2]
    assert growth(results, "parameter") is None
