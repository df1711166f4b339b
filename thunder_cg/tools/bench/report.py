"""The results of the benchmark as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import linear_regression

from thunder_cg.report.markdown import table as markdown_table
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.results import BenchmarkResults
from thunder_cg.tools.bench.variants import FLOOR, OURS

_HEADER = (
    *("variant", "host p50 / p99, µs", "end to end p50 / p99, µs", "back to back, µs", "calls per s", "compile s"),
    *("capture ms", "peak MB", "reserved MB", "relative error", "bits"),
)


def table(rows: Sequence[BenchmarkRow]) -> str:
    """The rows of cases as Markdown, one table per case."""
    return "\n".join(line for case in dict.fromkeys(row.case for row in rows) for line in _case(case, rows))


def _case(case: str, rows: Sequence[BenchmarkRow]) -> Iterator[str]:
    own = [row for row in rows if row.case == case]
    compared = next((row.reference for row in own if row.reference), "")
    yield f"\n**{case}**" + (f" (errors against {compared})" if compared else "") + "\n"
    yield markdown_table(_HEADER, map(_cells, own))
    for row in own:
        if row.captured:
            analysis = f"; its analysis took {row.analysis_ms:.1f} ms" if row.analysis_ms else ""  # a step has none
            yield f"\n{row.variant}: {row.captured}{analysis}"


def _cells(row: BenchmarkRow) -> tuple[str, ...]:
    if row.failure:
        return (row.variant, row.failure.replace("|", "/"), *("",) * (len(_HEADER) - 2))
    return (
        row.variant,
        f"{row.host_p50:,.0f} / {row.host_p99:,.0f}",
        f"{row.end_to_end_p50:,.0f} / {row.end_to_end_p99:,.0f}",
        f"{row.back_to_back:,.0f}",
        f"{row.per_second:,.0f}",
        f"{row.compile_s:.1f}",
        f"{row.capture_ms:.1f}",
        f"{row.allocated_mb:,.0f}",
        f"{row.reserved_mb:,.0f}",
        "" if row.error is None else f"{row.error:.1e}",
        row.bits,
    )


def scaling_tables(results: BenchmarkResults) -> str:
    """Host time by size, one table per scaling series, and the slope of thunder_cg above the hand-made graph."""
    return "\n".join(
        line for unit in dict.fromkeys(p.unit for p in results.points) for line in _scaling_table(unit, results)
    )


def _scaling_table(unit: str, results: BenchmarkResults) -> Iterator[str]:
    points = [p for p in results.points if p.unit == unit]
    sizes = sorted({p.size for p in points})
    yield f"\n**Host time, p50 in µs, by number of {unit}s**\n"
    times = {(p.variant, p.size): "failed" if p.failure else f"{p.host_p50:,.0f}" for p in points}
    variants = dict.fromkeys(p.variant for p in points)
    rows = ([variant, *(times.get((variant, size), "") for size in sizes)] for variant in variants)
    yield markdown_table([f"{unit}s", *map(str, sizes)], rows)
    for point in points:
        if point.failure:
            yield f"\n{point.variant}, {point.size} {unit}s: {point.failure}"
    slope = growth(results, unit)
    if slope is not None:
        yield f"\nthunder_cg over the hand-made graph: {slope:+.3f} µs per {unit}"


def growth(results: BenchmarkResults, unit: str) -> float | None:
    """Host time of thunder_cg above the hand-made graph, microseconds per layer, parameter or input: a fitted slope.

    None if fewer than two sizes were measured.
    """
    times = {(p.size, p.variant): p.host_p50 for p in results.points if p.unit == unit and not p.failure}
    over = {
        size: time - times[size, FLOOR] for (size, v), time in times.items() if v == OURS and (size, FLOOR) in times
    }
    return linear_regression([*over], [*over.values()]).slope if len(over) > 1 else None
