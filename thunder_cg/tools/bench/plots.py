"""BenchmarkResults as pictures: SVG files, drawn with matplotlib."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from thunder_cg.files import MARK, refuse_foreign, replace
from thunder_cg.tools.bench.models import optional
from thunder_cg.tools.bench.results import BenchmarkResults
from thunder_cg.tools.bench.variants import FLOOR, VARIANTS

NAMES = ("end_to_end.svg", "host_time.svg")


def write_plots(results: BenchmarkResults, folder: Path) -> list[Path]:
    """Writes `end_to_end.svg` and `host_time.svg`, each if there are numbers for it. Returns the written files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: a file of that name is none of this tool's.
    """
    figure = optional("matplotlib.figure").Figure
    written = []
    for name, drawn in zip(NAMES, (_bars(results, figure), _lines(results, figure))):
        if drawn is not None:
            refuse_foreign(folder / name)
            text = StringIO()
            drawn.savefig(text, format="svg", metadata={"Title": f"{MARK} bench"})
            replace(folder / name, text.getvalue())
            written.append(folder / name)
    return written


def _bars(results: BenchmarkResults, figure: Any) -> Any:
    """End-to-end time of each variant over that of the hand-made graph, for the cases that have one."""
    times = {(r.case, r.variant): r.end_to_end_p50 for r in results.rows if not r.failure}
    cases = [case for case, variant in times if variant == FLOOR]
    if not cases:
        return None
    shown = [v for v in VARIANTS if v != FLOOR]
    fig = figure(figsize=(10, 1.5 + 0.9 * len(cases)), layout="constrained")
    axes = fig.subplots()
    height = 0.8 / len(shown)
    for i, variant in enumerate(shown):
        bars = [
            (place + i * height, times[case, variant] / times[case, FLOOR])
            for place, case in enumerate(cases)
            if (case, variant) in times
        ]
        axes.barh([y for y, _ in bars], [ratio for _, ratio in bars], height, align="edge", label=variant)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_yticks([place + 0.4 for place in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel("time of a synchronised call, end to end (p50), over the hand-made graph")
    for formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatter("{x:g}")
    fig.legend(loc="outside upper center", ncols=4, fontsize="small")
    return fig


def _lines(results: BenchmarkResults, figure: Any) -> Any:
    """Host time against size, one plot per scaling series."""
    units = [*dict.fromkeys(point.unit for point in results.points)]
    if not units:
        return None
    fig = figure(figsize=(4.5 * len(units), 4), layout="constrained")
    for axes, unit in zip(fig.subplots(1, len(units), squeeze=False)[0], units):
        points = [p for p in results.points if p.unit == unit and not p.failure]
        for variant in dict.fromkeys(p.variant for p in points):
            own = [p for p in points if p.variant == variant]
            axes.plot([p.size for p in own], [p.host_p50 for p in own], marker="o", markersize=3, label=variant)
        axes.set_xlabel(f"{unit}s")
        axes.set_ylabel("host time of a call (p50), us")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(fontsize="small")
    return fig
