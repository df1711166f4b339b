"""The goals of the package, and whether the measured rows reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import linear_regression

from thunder_cg.tools.bench.cases import GPT, GPT_TRAINING, LARGE_GPT_TRAINING, MLP, SMALL_GPT
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.results import BenchmarkResults
from thunder_cg.tools.bench.variants import FLOOR, FLOOR_OF_THUNDER, GRAPHED_STEP, OURS, OURS_FUSED, THUNDER


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that should be at most `limit`, in `unit`: "x" for a ratio, "us" for microseconds."""

    name: str
    limit: float
    found: float
    unit: str

    @property
    def met(self) -> bool:
        return self.found <= self.limit


def goals(results: BenchmarkResults) -> list[Goal]:
    """The goals whose rows were all measured."""
    rows = {(row.case, row.variant): row for row in results.rows if not row.failure}
    return [*_times(rows), *_growth(results), *_costs(rows, results.environment["backend"])]


def growth(results: BenchmarkResults, unit: str) -> float | None:
    """Host time of thunder_cg above the hand-made graph, microseconds per layer, parameter or input: a fitted slope.

    None if fewer than two sizes were measured.
    """
    times = {(p.size, p.variant): p.host_p50 for p in results.points if p.unit == unit and not p.failure}
    over = {
        size: time - times[size, FLOOR] for (size, v), time in times.items() if v == OURS and (size, FLOOR) in times
    }
    return linear_regression([*over], [*over.values()]).slope if len(over) > 1 else None


Rows = dict[tuple[str, str], BenchmarkRow]


def _times(rows: Rows) -> Iterator[Goal]:
    yield from _over_floor(rows, "end to end", MLP, 1.20, lambda row: row.end_to_end_p50)
    for case in (SMALL_GPT, GPT):
        yield from _over_floor(rows, "end to end", case, 1.10, lambda row: row.end_to_end_p50)
    for case, limit in ((MLP, 20.0), (SMALL_GPT, 30.0), (GPT, 30.0)):
        if (case, OURS) in rows and (case, FLOOR) in rows:
            found = rows[case, OURS].host_p50 - rows[case, FLOOR].host_p50
            yield Goal(f"host time over the hand-made graph, {case}", limit, found, "us")
    for case in (GPT_TRAINING, LARGE_GPT_TRAINING):
        yield from _over_floor(rows, "back to back", case, 1.15, lambda row: row.back_to_back)
        # Thunder's kernels are not those of eager PyTorch. A graph of the same kernels shows what capturing can reach.
        # With Inductor's kernels, the comparison is with the graph of eager kernels.
        for variant, floor in ((OURS, FLOOR_OF_THUNDER), (OURS_FUSED, FLOOR)):
            if (case, variant) in rows and (case, floor) in rows:
                ratio = rows[case, variant].back_to_back / rows[case, floor].back_to_back
                yield Goal(f"back to back, {variant} over {floor}, {case}", 1.15, ratio, "x")
    for (case, variant), row in rows.items():
        if variant == GRAPHED_STEP and (case, FLOOR_OF_THUNDER) in rows:
            ratio = row.back_to_back / rows[case, FLOOR_OF_THUNDER].back_to_back
            yield Goal(f"back to back, {variant} over {FLOOR_OF_THUNDER}, {case}", 1.03, ratio, "x")
    for case in (MLP, SMALL_GPT, GPT):
        if (case, OURS) in rows:
            row = rows[case, OURS]
            yield Goal(f"end to end, p99 over p50, {case}", 1.1, row.end_to_end_p99 / row.end_to_end_p50, "x")


def _over_floor(rows: Rows, what: str, case: str, limit: float, of: Callable[[BenchmarkRow], float]) -> Iterator[Goal]:
    if (case, OURS) in rows and (case, FLOOR) in rows:
        yield Goal(f"{what} over the hand-made graph, {case}", limit, of(rows[case, OURS]) / of(rows[case, FLOOR]), "x")


def _growth(results: BenchmarkResults) -> Iterator[Goal]:
    for unit, limit in (("parameter", 0.1), ("layer", 0.01)):
        found = growth(results, unit)
        if found is not None:
            yield Goal(f"host time over the hand-made graph, per {unit}", limit, found, "us")


def _costs(rows: Rows, backend: str) -> Iterator[Goal]:
    """The cost of capture and of analysis, each in its worst case. The tape says nothing about a capture on a GPU."""
    ours = [row for (_, variant), row in rows.items() if variant == OURS]
    captures = [
        (row.capture_ms * 1e3 / rows[row.case, THUNDER].end_to_end_p50, row.case)
        for row in ours
        if backend == "cuda" and (row.case, THUNDER) in rows
    ]
    if captures:
        found, case = max(captures)
        yield Goal(f"capture over an uncaptured call, at worst: {case}", 3.0, found, "x")
    analyses = [(row.analysis_ms / (row.compile_s * 1e3 - row.analysis_ms), row.case) for row in ours]
    if analyses:
        found, case = max(analyses)
        yield Goal(f"analysis over the rest of the compilation, at worst: {case}", 0.05, found, "x")
