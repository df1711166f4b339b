"""`explain(fn)`: the decisions of the analysis and the counts of the runtime, as frozen records.

Everything here was decided or counted elsewhere; a report is a copy made at one moment, which later calls don't change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from thunder_cg.analysis.partition import Eager, Plan
from thunder_cg.report import html, text
from thunder_cg.report.programs import Located, Outside, locate, source
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.region import RuntimeRegion


@dataclass(frozen=True, slots=True)
class OpReport:
    """One op of a trace and its verdict.

    Attributes:
        index: its position in the trace as Thunder handed it over; the rows of a trace are in the plan's order.
        verdict: "capture", "eager", or "bookkeeping" (unpacking, returning), which is no work.
        reason: a word for the verdict; detail: what made it so; fix: what would change it, "" if nothing has to.
        line, source: "file.py:12" in the user's source and the text there. Thunder's grad transform loses some: then
            "near file.py:11", the line that made an input of the op, or None where that is not known either.
        region: the name of the region that it is in, None if it is eager.
        fused: names of the ops inside a fusion.
    """

    index: int
    name: str
    executor: str | None
    verdict: Literal["capture", "eager", "bookkeeping"]
    reason: str
    detail: str
    fix: str
    line: str | None
    source: str | None
    region: str | None
    fused: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One region: what it is, and what it did so far.

    Attributes:
        split: why it ended where it did, "" if nothing follows it.
        bytes_in, bytes_out: bytes copied for one replay, into the graph's memory and out of it (of the last capture).
        failure: why it runs eagerly: it could not be captured or, if it is `quarantined`, its graph did not do what its
            ops do; None if it is captured.
        verified: how many replays were compared with an eager run, which is `verify=`.
        remark: what that found besides: ops that are not deterministic, or why a replay could not be compared.
    """

    name: str
    device: str
    ops: int
    split: str
    captures: int
    replays: int
    eager_runs: int
    bytes_in: int
    bytes_out: int
    failure: str | None
    quarantined: bool = False
    verified: int = 0
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class TraceReport:
    """One trace of one cache entry.

    Attributes:
        function: what it was traced from; entry: the number of the cache entry, from 0; kind: "forward" or "backward".
        ops: in the order in which the plan runs them.
        calls: how often it ran, `eager_calls` of them without graphs: warm-ups, and fallbacks with their reasons.
        fast_path_calls: calls that went around Thunder's dispatch; `no_fast_path` says why others did not.
        remark: what the user should know besides.
        arena_bytes: size of the arenas with its recordings. A backward shares its forward's, and several programs may
            share one, so they don't add up.
    """

    function: str
    entry: int
    kind: str
    ops: tuple[OpReport, ...]
    regions: tuple[RegionReport, ...]
    calls: int
    eager_calls: int
    fallbacks: Mapping[str, int]
    arena_bytes: int
    fast_path_calls: int = 0
    no_fast_path: str | None = None
    remark: str | None = None

    @property
    def counts(self) -> Counter[str]:
        """Ops by verdict."""
        return Counter(op.verdict for op in self.ops)


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """What became of a compiled function. `print` it, leave it as a notebook cell's last line, or take `to_dict()`.

    Attributes:
        traces: one for every forward and every backward that Thunder compiled with the transform.
        outside: what Thunder does not support in the graphs of Dynamo, so that Inductor runs it (thunderfx only).
    """

    traces: tuple[TraceReport, ...]
    outside: tuple[Outside, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The whole report as dicts, lists, strings, numbers and None, ready for `json.dumps`."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    def __str__(self) -> str:
        return text.render(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html.render(self)


def explain(fn: Any) -> Report:
    """Says what of `fn` is captured, what stays eager and why, and what calling it has cost so far.

    Args:
        fn: what `thunder.jit`, `thunder.compile` or `thunderfx` returned, compiled with `cudagraph_transform()`.

    Returns:
        a `Report` with one entry per trace, none if `fn` was not called yet: Thunder compiles at the first call.

    Raises:
        NotCompiledError: `fn` is not compiled by Thunder, or not with `cudagraph_transform()`.
    """
    found = locate(fn)
    return Report(tuple(map(_trace, found.programs)), found.outside)


def _trace(located: Located) -> TraceReport:
    program = located.program
    return TraceReport(
        function=located.function,
        entry=located.entry,
        kind=program.kind,
        ops=_ops(program),
        regions=tuple(map(_region, program.regions)),
        calls=program.calls,
        eager_calls=program.eager_calls,
        fast_path_calls=program.fast_path_calls,
        no_fast_path=program.no_fast_path,
        remark=program.remark,
        fallbacks=dict(program.fallbacks),
        arena_bytes=program.arena_bytes(),
    )


def _ops(program: Program) -> tuple[OpReport, ...]:
    regions = {index: region.name for region in program.regions for index in region.planned.ops}
    return tuple(_op(program, index, regions.get(index)) for index in _order(program.plan))


def _order(plan: Plan) -> list[int]:
    """Positions of all ops, in the order in which the plan runs them."""
    return [index for step in plan.steps for index in ((step.op,) if isinstance(step, Eager) else step.ops)]


def _op(program: Program, index: int, region: str | None) -> OpReport:
    op, verdict = program.ops.ops[index], program.plan.verdicts[index]
    origin = program.ops.origin(op)
    return OpReport(
        index=op.index,
        name=op.name,
        executor=op.executor,
        verdict="bookkeeping" if op.bookkeeping else "capture" if verdict.capture else "eager",
        reason=verdict.reason.value,
        detail=verdict.detail,
        fix=verdict.fix,
        line=program.ops.line(op),
        source=source(origin) if origin is not None else None,
        region=region,
        fused=tuple(sub.name for sub in op.subs) if op.is_fusion else (),
    )


def _region(region: RuntimeRegion) -> RegionReport:
    stats = region.stats
    return RegionReport(
        name=region.name,
        device=region.planned.device,
        ops=len(region.planned.ops),
        split=region.planned.split,
        captures=stats.captures,
        replays=stats.replays,
        eager_runs=stats.eager_runs,
        bytes_in=stats.bytes_in,
        bytes_out=stats.bytes_out,
        failure=region.failure,
        quarantined=region.disagreement is not None,
        verified=stats.verified,
        remark=region.remark,
    )


def _plain(value: Any) -> Any:
    """Tuples as lists, so that what is written as JSON and read again is equal."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
