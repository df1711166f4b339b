"""Rows as text: a line for each row, and a Markdown table of all rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from thunder_cg.report.markdown import table
from thunder_cg.tools.results import origin
from thunder_cg.tools.suite.results import BREAK, EAGER, INDUCTOR, MODES, NOT_REPLAYED, NotCaptured, SuiteRow

_HEADER = ("model", *(text for mode in MODES for text in (mode, "same bits")), "not in a graph, and why")
_SAID = {
    EAGER: "eager",
    INDUCTOR: "thunderfx leaves to Inductor",
    BREAK: "Dynamo breaks the graph",
    NOT_REPLAYED: "did not replay",
}


def line(row: SuiteRow) -> str:
    """One row as a line of text."""
    if row.failure:
        return f"{row.model}, {row.mode}: {row.failure}"
    times = f"; {row.thunder_us:,.0f} -> {row.captured_us:,.0f} us" if row.captured_us else ""
    outside = f"; not in a graph: {_outside([row])}" if row.outside else ""
    return f"{row.model}, {row.mode}, {row.path}: {_captured(row)}{times}; same bits: {row.agrees}{outside}"


def markdown(rows: Sequence[SuiteRow], environment: Mapping[str, str]) -> str:
    """The table, and the machine and versions. Two dashes stand for a mode that was not measured."""
    by_model: dict[str, dict[str, SuiteRow]] = {}
    for row in rows:
        by_model.setdefault(row.model, {})[row.mode] = row
    lines = []
    for model, modes in by_model.items():
        mine = [modes[mode] for mode in MODES if mode in modes]
        cells = [cell for mode in MODES for cell in _cells(modes.get(mode))]
        lines.append((_name(model, mine), *cells, _outside(mine)))
    return "\n".join([table(_HEADER, lines), "", *_caption(environment, [row for row in rows if not row.failure])])


def _name(model: str, rows: Iterable[SuiteRow]) -> str:
    paths = [*dict.fromkeys(row.path for row in rows if row.path)]
    return f"{model} ({', '.join(path.removeprefix('thunder.') for path in paths)})" if paths else model


def _cells(row: SuiteRow | None) -> tuple[str, str]:
    if row is None:
        return "--", "--"
    if row.failure:
        return "fails", "--"
    times = f", {row.thunder_us / 1e3:,.2f} → **{row.captured_us / 1e3:,.2f}** ms" if row.captured_us else ""
    return _captured(row) + times, row.agrees.partition(":")[0]


def _captured(row: SuiteRow) -> str:
    regions = f"{row.regions} region" + ("" if row.regions == 1 else "s")
    return f"{row.captured:,} of {row.ops:,} ops, {regions}"


def _outside(rows: Sequence[SuiteRow]) -> str:
    """What a model's rows do not capture. An entry of several rows is listed once, with the largest number."""
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        merged: Counter[tuple[str, str, str]] = Counter()
        for part in row.outside:
            merged[part.kind, _short(part), _why(part)] += part.count
        counts |= {key: max(count, counts.get(key, 0)) for key, count in merged.items()}
    said: dict[tuple[str, str], list[str]] = {}
    for (kind, what, why), count in counts.items():
        said.setdefault((kind, why), []).append(f"{what} ×{count}" if count > 1 else what)
    parts = [f"{_SAID[kind]}{f' ({why})' if why else ''}: {', '.join(names)}" for (kind, why), names in said.items()]
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.failure:
            failed.setdefault(re.sub(" at 0x[0-9a-f]+", "", row.failure), []).append(row.mode)
    failures = [f"{' and '.join(modes)} fail{'s' * (len(modes) == 1)}: {text}" for text, modes in failed.items()]
    different = [f"{row.mode}: {row.agrees}" for row in rows if not row.agrees.startswith("yes") and row.agrees]
    return "; ".join([*parts, *failures, *different]).replace("|", "/").replace("\n", " ")


def _short(part: NotCaptured) -> str:
    """The name of an operator without its modules."""
    return f"`{part.what.rsplit('.', 1)[-1]}`" if part.kind in (EAGER, INDUCTOR) else part.what


def _why(part: NotCaptured) -> str:
    """The reason, unless the kind says it already."""
    return part.why if part.kind != INDUCTOR else ""


def _caption(environment: Mapping[str, str], rows: Sequence[SuiteRow]) -> Iterator[str]:
    timed = [row for row in rows if row.captured_us]
    on_gpu = environment.get("backend") != "tape"
    sizes = "bfloat16, real sizes" if on_gpu else "tiny sizes; the `tape` backend, whose times say nothing"
    rest = " What has no times here was compared, and not timed." if on_gpu and len(timed) < len(rows) else ""
    yield f"{origin(environment)}; {sizes}.{rest}"
