"""The plan of a trace as a picture: a box for each region and each run of eager ops, a line for values that cross.

All boxes run one after the other: graphs are launched on the current stream of their device, and eager ops launch their
kernels there, too. Collectives that are waited for later run on a stream of their process group. They have a column for
each group, beside the boxes from their start to their wait.

The picture is SVG that needs no style sheet: it takes the text colour of the page, so that light and dark pages both
read well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from thunder_cg.report import text, units

if TYPE_CHECKING:
    from thunder_cg.report.collectives import CollectiveReport
    from thunder_cg.report.crossings import CrossingReport
    from thunder_cg.report.report import RegionReport, TraceReport

CAPTURED, EAGER, OTHER = "rgba(46, 160, 67, 0.22)", "rgba(248, 81, 73, 0.25)", "rgba(128, 128, 128, 0.10)"
MOST_BOXES = 40  # of a larger plan, the first ones

# In pixels.
_WIDTH, _HEIGHT, _GAP = 520, 44, 26  # of a box, and below it
_MARGIN, _LANE, _MOST_LANES = 10, 14, 12
_CHARACTERS = 84  # of small text in a box
_COLUMN, _HEAD = 200, 22  # the width of a column for collectives with the gap to its right, and the height of its name
COMMUNICATION = "rgba(56, 139, 253, 0.22)"


@dataclass(frozen=True, slots=True)
class _Box:
    title: str
    colour: str
    ops: frozenset[int]  # indices


@dataclass(frozen=True, slots=True)
class _Communication:
    """Collectives of one group, beside the boxes from the first one's start to the last one's wait."""

    start: int
    end: int
    collectives: tuple[CollectiveReport, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """All values that go from one box to another."""

    start: int
    end: int
    values: tuple[CrossingReport, ...]

    @property
    def said(self) -> str:
        nbytes = sum(value.nbytes for value in self.values)
        return units.count(len(self.values), "value") + (f", {units.size(nbytes)}" if nbytes else "")


def render(trace: TraceReport, *, saves: bool) -> str:
    """The picture; "" for a plan with one step and nothing beside the step. ``saves`` if a backward follows."""
    boxes = _boxes(trace, saves)
    columns = _columns(trace.collectives, boxes)
    if len(boxes) < 4 and not columns:  # what comes in, one step, and the results
        return ""
    lines = _lines(trace.crossings, boxes)
    note = f"<p>{_caption(bool(columns))}</p>"
    if len(boxes) > MOST_BOXES:
        note += f"<p>The picture has the first {MOST_BOXES} of {len(boxes):,} steps.</p>"
        boxes = boxes[:MOST_BOXES]
        lines = [line for line in lines if line.end < MOST_BOXES]
    lanes = _lanes(lines)
    left, head = _COLUMN * len(columns), _HEAD if columns else 0
    width = left + 2 * _MARGIN + _WIDTH + _LANE * (1 + max(lanes.values(), default=-1))
    height = head + 2 * _MARGIN + len(boxes) * (_HEIGHT + _GAP) - _GAP
    beside = "".join(_column(i, group, parts, len(boxes)) for i, (group, parts) in enumerate(columns.items()))
    beside += f'<text x="{left + _MARGIN}" y="{_MARGIN + 10}" font-size="12">current stream</text>' if columns else ""
    parts = [_box(at, box, [line for line in lines if line.end == at], boxes) for at, box in enumerate(boxes)]
    parts += [_line(line, lanes.get(line)) for line in lines]
    return (
        f'{note}<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'style="max-width: 100%; min-width: {24 + 9 * len(columns)}em" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" fill="currentColor">'
        f"<title>{escape(text.title(trace))}: the plan</title>{beside}"
        f'<g transform="translate({left}, {head})">{"".join(parts)}</g></svg>'
    )


def colour_of(region: RegionReport) -> str:
    """Green with a graph, red if it stays eager, and grey if it has no graph up to now, as in a plan."""
    return EAGER if region.failure is not None else CAPTURED if region.captures else OTHER


def _boxes(trace: TraceReport, saves: bool) -> list[_Box]:
    """What comes in, the steps in their order, and the results."""
    regions = {region.name: region for region in trace.regions}
    boxes = [_Box("inputs", OTHER, frozenset())]
    work = [op for op in trace.ops if op.verdict != "bookkeeping"]
    for name, group in groupby(work, key=lambda op: op.region):
        ops = list(group)
        if name is None:
            names = ", ".join(dict.fromkeys(op.name for op in ops))
            title, colour = f"{names}: eager", EAGER
        else:
            region = regions[name]
            title = f"{name}: {units.count(len(ops), 'op')} on {region.device}"
            title, colour = title + ", runs eagerly" * (region.failure is not None), colour_of(region)
        boxes.append(_Box(title, colour, frozenset(op.index for op in ops)))
    returned = frozenset(op.index for op in trace.ops if op.verdict == "bookkeeping")
    results = "results, and what is saved for the backward" if saves else "results"
    return [*boxes, _Box("gradients" if trace.kind == "backward" else results, OTHER, returned)]


def _lines(crossings: Sequence[CrossingReport], boxes: Sequence[_Box]) -> list[_Line]:
    box_of = {index: at for at, box in enumerate(boxes) for index in box.ops}
    lines: dict[tuple[int, int], list[CrossingReport]] = {}
    for value in crossings:
        start = 0 if value.made_by is None else box_of[value.made_by]
        for end in dict.fromkeys(box_of[index] for index in value.used_by):
            if end != start:
                lines.setdefault((start, end), []).append(value)
    return [_Line(start, end, tuple(values)) for (start, end), values in sorted(lines.items())]


def _columns(collectives: Sequence[CollectiveReport], boxes: Sequence[_Box]) -> dict[str, list[_Communication]]:
    """By group, the collectives that do not wait for themselves. Those that are in flight together are one box."""
    box_of = {index: at for at, box in enumerate(boxes) for index in box.ops}
    columns: dict[str, list[_Communication]] = {}
    for each in collectives:
        if each.issued_by is None or each.waited_by is None:
            continue
        now = _Communication(box_of[each.issued_by], box_of[each.waited_by], (each,))
        column = columns.setdefault(each.group, [])
        if column and now.start <= column[-1].end:
            last = column.pop()
            now = _Communication(last.start, max(last.end, now.end), (*last.collectives, each))
        column.append(now)
    return columns


def _caption(beside: bool) -> str:
    said = "The steps run one after the other, with their copies in and out: on a GPU, on its current stream."
    if not beside:
        return f"{said} Nothing runs beside them."
    own = "on their process group's own stream (NCCL) or threads (gloo)"
    return f"{said} Collectives on the left run beside them until they are waited for, {own}."


def _column(at: int, group: str, parts: Sequence[_Communication], most: int) -> str:
    x, width = _MARGIN + at * _COLUMN, _COLUMN - 2 * _MARGIN
    drawn = [f'<text x="{x}" y="{_MARGIN + 10}" font-size="12">{escape(_short(f"group {group}", 28))}</text>']
    for part in parts:
        if part.start >= most:
            continue
        top = _HEAD + _top(part.start)
        height = _HEAD + _top(min(part.end, most - 1)) + _HEIGHT - top
        kinds = Counter(each.name for each in part.collectives)
        said = ", ".join(f"{number} {name}" for name, number in kinds.items())
        nbytes = units.size(sum(each.nbytes for each in part.collectives))
        small = f"{nbytes}; {sum(each.overlaps for each in part.collectives)} can overlap"
        drawn.append(
            f'<g><title>{escape(f"{said}: {small} with compute")}</title><rect x="{x}" y="{top}" width="{width}" '
            f'height="{height}" rx="5" fill="{COMMUNICATION}" stroke="currentColor" stroke-opacity="0.35"/>'
            f'<text x="{x + 8}" y="{top + 18}" font-size="12">{escape(_short(said, 28))}</text>'
            f'<text x="{x + 8}" y="{top + 35}" font-size="11" opacity="0.8">{escape(small)}</text>'
            f'<path d="M{x + width},{top + 22}h{2 * _MARGIN}" stroke="currentColor" stroke-dasharray="3" '
            f'stroke-opacity="0.6"/></g>'
        )
    return "".join(drawn)


def _lanes(lines: Sequence[_Line]) -> dict[_Line, int]:
    """For each line that passes boxes, a lane to the right of them. Short lines are close to the boxes."""
    taken: list[list[_Line]] = []
    lanes = {}
    for line in sorted(lines, key=lambda line: line.end - line.start):
        if line.end == line.start + 1:
            continue
        free = (i for i, others in enumerate(taken) if all(line.start >= o.end or line.end <= o.start for o in others))
        lane = next(free, len(taken))
        if lane == len(taken) and len(taken) < _MOST_LANES:
            taken.append([])
        lane = min(lane, len(taken) - 1)
        taken[lane].append(line)
        lanes[line] = lane
    return lanes


def _box(at: int, box: _Box, incoming: Sequence[_Line], boxes: Sequence[_Box]) -> str:
    """A box says where its values come from, so that no text stands beside a line."""
    top = _top(at)
    gets = "; ".join(f"{line.said} from {_short(boxes[line.start].title.split(':')[0], 24)}" for line in incoming)
    names = "\n".join(f"{value.name}: {value.kind}" for line in incoming for value in line.values)
    hover = f"<title>{escape(box.title)}{escape(chr(10) + names if names else '')}</title>"
    small = f'<text x="{_MARGIN + 10}" y="{top + 35}" font-size="11" opacity="0.8">{escape(_short(gets))}</text>'
    return (
        f'<g>{hover}<rect x="{_MARGIN}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="{box.colour}" '
        f'stroke="currentColor" stroke-opacity="0.35"/><text x="{_MARGIN + 10}" y="{top + 18}" font-size="13" '
        f'font-weight="bold">{escape(_short(box.title, 62))}</text>{small if gets else ""}</g>'
    )


def _line(line: _Line, lane: int | None) -> str:
    style = 'fill="none" stroke="currentColor" stroke-opacity="0.6"'
    if lane is None:
        x, y = _MARGIN + _WIDTH // 2, _top(line.end)
        path = f"M{x},{_top(line.start) + _HEIGHT}V{y - 5}"
        head = f"M{x},{y}l-4,-7h8z"
    else:
        right = _MARGIN + _WIDTH
        x, start, y = right + _LANE * (lane + 1), _top(line.start) + _HEIGHT - 10, _top(line.end) + 10
        path = f"M{right},{start}H{x - 5}q5,0 5,5V{y - 5}q0,5 -5,5H{right + 6}"
        head = f"M{right},{y}l7,-4v8z"
    return f'<g><title>{escape(line.said)}</title><path d="{path}" {style}/><path d="{head}" opacity="0.7"/></g>'


def _top(at: int) -> int:
    return _MARGIN + at * (_HEIGHT + _GAP)


def _short(said: str, most: int = _CHARACTERS) -> str:
    return said if len(said) <= most else f"{said[: most - 1].rstrip()}…"
