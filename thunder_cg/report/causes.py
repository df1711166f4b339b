"""Root causes of eager ops and splits over all traces of a function, ranked by what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def causes(
    programs: Iterable[Program], times: Mapping[int, Mapping[int, float]] | None = None
) -> tuple[CauseReport, ...]:
    """The root causes in these programs, the most expensive first.

    Args:
        times: by the identity of programs, the microseconds of eager ops, if they were measured.
    """
    alike: dict[tuple[str, str], list[RootCause]] = {}
    took: dict[tuple[str, str], float] = {}
    for program in programs:
        for cause in root_causes(program.ops, program.plan, program.aliasing):
            key = cause.name, cause.place
            alike.setdefault(key, []).append(cause)
            if (measured := (times or {}).get(id(program))) is not None:
                took[key] = took.get(key, 0.0) + sum(measured.get(index, 0.0) for index in cause.ops)
    reports = [
        CauseReport(
            name=first.name,
            place=first.place,
            source=first.source,
            eager_ops=sum(each.eager_ops for each in (first, *others)),
            added_regions=sum(each.added_regions for each in (first, *others)),
            reason=first.reason,
            detail=first.detail,
            fix=first.fix,
            microseconds=took.get(key),
        )
        for key, (first, *others) in alike.items()
    ]
    return tuple(sorted(reports, key=lambda c: (c.microseconds or 0.0, c.added_regions, c.eager_ops), reverse=True))
