"""Root causes of eager ops and splits over all traces of a function, ranked by what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thunder_cg.analysis.causes import RootCause, root_causes
from thunder_cg.runtime.program import Program


@dataclass(frozen=True, slots=True)
class CauseReport:
    """What keeps ops eager and cuts regions: an operator at one line of the user's code.

    Attributes:
        name: of the operator.
        place: "at model.py:38".
        source: the text of that line.
        eager_ops: how many ops are eager because of it, those that it leaves alone between eager ones included.
        added_regions: how many fewer regions there would be without it.
        reason, detail, fix: of the operator's verdict.
        microseconds: that its eager ops take in one call, where they were measured.
    """

    name: str
    place: str
    source: str | None
    eager_ops: int
    added_regions: int
    reason: str
    detail: str
    fix: str
    microseconds: float | None = None


def causes(programs: Iterable[Program]) -> tuple[CauseReport, ...]:
    """The root causes in these programs, the most expensive first."""
    alike: dict[tuple[str, str], list[RootCause]] = {}
    for program in programs:
        for cause in root_causes(program.ops, program.plan, program.aliasing):
            alike.setdefault((cause.name, cause.place), []).append(cause)
    found = [
        CauseReport(
            name=first.name,
            place=first.place,
            source=first.source,
            eager_ops=sum(each.eager_ops for each in (first, *others)),
            added_regions=sum(each.added_regions for each in (first, *others)),
            reason=first.reason,
            detail=first.detail,
            fix=first.fix,
        )
        for first, *others in alike.values()
    ]
    return tuple(sorted(found, key=lambda cause: (cause.added_regions, cause.eager_ops), reverse=True))
