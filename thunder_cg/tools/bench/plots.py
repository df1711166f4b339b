"""The results of the benchmark as pictures: SVG files, drawn with matplotlib.

The background is transparent, and all colours have contrast on white and on a dark page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from thunder_cg.files import MARK, refuse_foreign, replace
from thunder_cg.tools.bench.models import optional
from thunder_cg.tools.bench.results import BenchmarkResults, ScalingPoint
from thunder_cg.tools.bench.variants import EAGER, FLOOR, OURS, OURS_FUSED, REDUCE_OVERHEAD, THUNDER, THUNDER_OWN

NAMES = ("end_to_end.svg", "host_time.svg")

TEXT = "#737b85"
COLOURS = {
    EAGER: TEXT,
    THUNDER: "#8b6fc0",
    THUNDER_OWN: "#c0587e",
    REDUCE_OVERHEAD: "#3f8fc4",
    OURS: "#e8590c",
    OURS_FUSED: "#e8590c",  # hatched
    FLOOR: "#3d9970",
}
BARS = (THUNDER, REDUCE_OVERHEAD, OURS, OURS_FUSED)  # eager is the line at 1
OWN = (OURS, OURS_FUSED)
LINES = {THUNDER: "s", THUNDER_OWN: "^", OURS: "o", FLOOR: "D"}  # with their markers
WIDTH = 8.6  # inches; a browser shows 826 pixels, about the width of a README
STYLE = {
    "svg.hashsalt": MARK,  # the same results give the same file
    "svg.fonttype": "none",  # text, not outlines: a third of the bytes
    "font.size": 8.5,
    "axes.facecolor": "none",
    "hatch.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), TEXT
    ),
}


@dataclass(frozen=True, slots=True)
class Bar:
    """How many times as fast as eager a variant is, 0 where that is unknown. The label is the number, or why not."""

    variant: str
    speed: float
    label: str


@dataclass(frozen=True, slots=True)
class BarGroup:
    """The bars of one case."""

    title: str
    bars: tuple[Bar, ...]


def bar_groups(results: BenchmarkResults) -> dict[str, list[BarGroup]]:
    """One group of bars for each case but whole steps, by the title of the plot: inference or training."""
    rows = {(row.case, row.variant): row for row in results.rows}
    shown = [variant for variant in BARS if any(row.variant == variant for row in results.rows)]
    panels: dict[str, list[BarGroup]] = {}
    for case in dict.fromkeys(row.case for row in results.rows if "whole step" not in row.case) if shown else ():
        eager = rows.get((case, EAGER))
        eager_time = eager.end_to_end_p50 if eager and not eager.failure else 0.0
        bars = []
        for variant in shown:
            row = rows.get((case, variant))
            if row is None or row.failure:
                reason = f"fails: {row.failure.partition(':')[0]}" if row else "not run"
                bars.append(Bar(variant, 0.0, reason))
            elif not eager_time:
                bars.append(Bar(variant, 0.0, f"{_time(row.end_to_end_p50)}; no time of eager"))
            else:
                speed = eager_time / row.end_to_end_p50
                bars.append(Bar(variant, speed, f"{speed:.1f}×" if speed >= 1 else f"{speed:.2f}×"))
        title = f"{case} (eager {_time(eager_time)})" if eager_time else case
        panels.setdefault("Training" if is_training(case) else "Inference", []).append(BarGroup(title, tuple(bars)))
    return dict(sorted(panels.items()))


def is_training(case: str) -> bool:
    """Whether a case of this name has a backward."""
    return "training" in case or "whole step" in case


def gaps(points: list[ScalingPoint]) -> list[str]:
    """Why variants of a scaling series lack points: one line for each reason."""
    sizes = sorted({point.size for point in points})
    found: dict[str, list[str]] = {}
    for variant in dict.fromkeys(point.variant for point in points):
        own = {point.size: point.failure.partition(":")[0] for point in points if point.variant == variant}
        missing = [size for size in sizes if size not in own]
        if missing:
            found.setdefault(f"not run at {', '.join(map(str, missing))}", []).append(variant)
        for reason in dict.fromkeys(filter(None, own.values())):
            failed = [size for size in sizes if own.get(size) == reason]
            found.setdefault(f"fails at {', '.join(map(str, failed))}: {reason}", []).append(variant)
    return [f"{', '.join(variants)}:\n{reason}" for reason, variants in found.items()]


def _time(microseconds: float) -> str:
    return f"{microseconds:,.0f} µs" if microseconds < 1000 else f"{microseconds / 1000:.3g} ms"


# -------------------------------------------------------------------------------------------------------------- drawing


def write_plots(results: BenchmarkResults, folder: Path) -> list[Path]:
    """Writes `end_to_end.svg` and `host_time.svg`, each if there are numbers for it. Returns the written files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: a file of that name is none of this tool's.
    """
    figure = partial(optional("matplotlib.figure").Figure, layout="constrained", facecolor="none")
    written = []
    with optional("matplotlib").rc_context(STYLE):
        for name, draw in zip(NAMES, (_bars, _lines)):
            drawn = draw(results, figure)
            if drawn is not None:
                refuse_foreign(folder / name)
                text = StringIO()
                drawn.savefig(text, format="svg", metadata={"Title": f"{MARK} bench", "Date": None})
                replace(folder / name, text.getvalue())
                written.append(folder / name)
    return written


def _bars(results: BenchmarkResults, figure: Callable[..., Any]) -> Any:
    """Speed of each variant over eager, one group of bars for each case; None without a case."""
    panels = bar_groups(results)
    if not panels:
        return None
    groups = max(map(len, panels.values()))
    count = len(next(iter(panels.values()))[0].bars)
    fastest = max(bar.speed for panel in panels.values() for group in panel for bar in group.bars)
    fig = figure(figsize=(WIDTH, 1 + groups * (count + 1.6) * 0.145))
    all_axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    drawn: dict[str, Any] = {}
    for axes, (title, panel) in zip(all_axes, panels.items()):
        for number, group in enumerate(panel):
            top = number * (count + 1.6)
            beside = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(group.title, (0, top), size=8, in_layout=False, **beside)
            for place, bar in enumerate(group.bars, 1):
                drawn[bar.variant] = axes.barh(top + place, bar.speed or math.nan, **_fill(bar.variant))
                weight = "bold" if bar.speed and bar.variant in OWN else "normal"
                style = "normal" if bar.speed else "italic"
                end = max(bar.speed, 1.0)  # right of the line of eager
                axes.annotate(bar.label, (end, top + place), weight=weight, style=style, **beside)
            drawn[EAGER] = axes.vlines(1, top + 0.5, top + count + 0.5, color=COLOURS[EAGER], linestyle=(0, (3, 2)))
        axes.set_title(title, loc="left", weight="bold")
        axes.set_xlim(0, max(1.0, fastest) * 1.15)
        axes.set_ylim(groups * (count + 1.6) - 1, -0.7)
        axes.set_yticks([])
        axes.set_xlabel("times as fast as eager; longer is faster")
    names = [name for name in (EAGER, *BARS) if name in drawn]
    _legend(fig, [drawn[name] for name in names], names)
    fig.supxlabel(_source(results, "a synchronised call, end to end, median"), fontsize="medium", color=TEXT)
    return fig


def _fill(variant: str) -> dict[str, Any]:
    """Ours is thicker than the others, and hatched with fusions."""
    colour = COLOURS[variant]
    if variant == OURS_FUSED:
        return {"height": 0.85, "facecolor": "none", "edgecolor": colour, "hatch": "//////", "linewidth": 1}
    return {"height": 0.9 if variant == OURS else 0.65, "color": colour}


def _lines(results: BenchmarkResults, figure: Callable[..., Any]) -> Any:
    """Host time against size, one plot for each scaling series; None without one."""
    points = [point for point in results.points if point.variant in LINES]
    units = [*dict.fromkeys(point.unit for point in points)]
    if not units:
        return None
    fig = figure(figsize=(WIDTH, 3.6))
    drawn: dict[str, Any] = {}
    for axes, unit in zip(fig.subplots(1, len(units), sharey=True, squeeze=False)[0], units):
        series = [point for point in points if point.unit == unit]
        for variant, marker in LINES.items():
            own = sorted((p.size, p.host_p50) for p in series if p.variant == variant and not p.failure)
            if own:
                ours = variant == OURS
                (drawn[variant],) = axes.plot(
                    *zip(*own),
                    color=COLOURS[variant],
                    marker=marker,
                    markersize=5 if ours else 3.5,
                    linewidth=2.5 if ours else 1.2,
                    zorder=3 if ours else 2,
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(axis="y", alpha=0.3, color=TEXT, linewidth=0.6)
        axes.set_xlabel("\n".join([f"number of {unit}s", *gaps(series)]))
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("µs; lower is better")
    names = [name for name in LINES if name in drawn]
    _legend(fig, [drawn[name] for name in names], names)
    fig.supxlabel(_source(results, "host time of a call, median"), fontsize="medium", color=TEXT)
    return fig


def _legend(fig: Any, handles: list[Any], names: list[str]) -> None:
    """The legend, above the plots, with ours in bold."""
    legend = fig.legend(handles, names, loc="outside upper left", ncols=len(names), frameon=False)
    for name, text in zip(names, legend.get_texts()):
        text.set_weight("bold" if name in OWN else "normal")


def _source(results: BenchmarkResults, what: str) -> str:
    """What was measured, and on what."""
    found = results.environment
    torch = f"torch {found['torch']}" if "torch" in found else ""
    return ", ".join(filter(None, (what, found.get("device"), torch, found.get("date"))))
