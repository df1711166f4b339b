"""`explain(fn)`: the decisions of the analysis and the counts of the runtime, as frozen records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from typing import Any, Literal, overload

from thunder_cg.analysis.classify import shown, unmatched
from thunder_cg.analysis.ops import Op
from thunder_cg.analysis.partition import Region
from thunder_cg.compat.compiled import changed_since_compiled, original_module
from thunder_cg.compat.dynamo_records import Recompilation, RecompileLimit
from thunder_cg.compat.thunder import ThunderModule, bound_functions
from thunder_cg.errors import OptionError
from thunder_cg.kernels.fusion import Fusion
from thunder_cg.report import differences, html, markdown, text
from thunder_cg.report.breaks import GraphBreak
from thunder_cg.report.causes import CauseReport, causes
from thunder_cg.report.collectives import CollectiveReport, collectives
from thunder_cg.report.crossings import CrossingReport, crossings
from thunder_cg.report.differences import Differences
from thunder_cg.report.entries import ChangeReport, InputReport, changes, inputs
from thunder_cg.report.files import FunctionReport
from thunder_cg.report.memory import MemoryReport
from thunder_cg.report.profile import Times, measure
from thunder_cg.report.programs import Found, Located, NewSizes, Outside, jitted_parts, locate
from thunder_cg.report.step import StepReport
from thunder_cg.runtime.compilation import changed_part
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.region import RuntimeRegion
from thunder_cg.runtime.skip_reasons import HELD_ELSEWHERE, IN_STEP
from thunder_cg.step import GraphedStep


@dataclass(frozen=True, slots=True)
class OpReport:
    """One op of a trace and its verdict."""

    index: int  # position in the trace as Thunder handed it over; the rows of a trace are in the plan's order
    name: str
    executor: str | None
    verdict: Literal["capture", "eager", "bookkeeping"]  # bookkeeping, such as unpacking and returning, is no work
    reason: str  # a word for the verdict
    detail: str  # what made it so
    fix: str  # what would change it, "" if nothing has to
    # "file.py:12" in the user's source and the text there. Thunder's grad transform loses some: then "near file.py:11",
    # the line that made an input of the op, or None where that is not known either.
    line: str | None
    source: str | None
    region: str | None  # the name of the region that it is in, None if it is eager
    fused: tuple[str, ...]  # names of the ops inside a fusion
    microseconds: float | None = None  # that it takes in one call, if it is eager and was measured


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One region: what it is, and what it did so far."""

    name: str
    device: str
    ops: int
    split: str  # why it ended where it did, "" if nothing follows it
    captures: int
    replays: int  # with the first one, which ends each capture
    eager_runs: int
    bytes_in: int  # bytes copied for one replay into the graph's memory (of the last capture)
    bytes_out: int  # and out of it
    # Why it runs eagerly: it could not be captured; its graph did not do what its ops do, if it is quarantined; it does
    # not pay, if it is deselected. None if it is captured.
    failure: str | None
    fix: str = ""  # what would change that; "" if the next call may do better
    quarantined: bool = False
    deselected: bool = False  # whether the failure is that it does not pay, and `select="measured"` leaves it eager
    verified: int = 0  # how many replays were compared with an eager run, which is `verify=`
    capture_seconds: float = 0.0  # of all captures, on the host
    # Where they were measured, of one call, in microseconds: the region, its ops run eagerly, what its copies take of
    # it, and the eager ops between it and the next region.
    microseconds: float | None = None
    eager_microseconds: float | None = None
    copy_microseconds: float | None = None
    split_microseconds: float | None = None
    remark: str | None = None  # what that found besides: ops that are not deterministic, why a replay was not compared

    @property
    def pays(self) -> bool | None:
        """Whether it takes less time than its ops run eagerly; None if that was not measured."""
        if self.microseconds is None or self.eager_microseconds is None:
            return None
        return self.microseconds < self.eager_microseconds


@dataclass(frozen=True, slots=True)
class TraceReport:
    """One trace of one version that Thunder has compiled: one of its cache entries."""

    function: str  # what it was traced from
    entry: int  # the number of the compiled version, from 0
    kind: str  # "forward" or "backward"
    ops: tuple[OpReport, ...]  # in the order in which the plan runs them
    regions: tuple[RegionReport, ...]
    calls: int  # how often it ran
    eager_calls: int  # how often without graphs: warm-ups, and fallbacks
    fallbacks: Mapping[str, int]  # by their reasons
    # Size of the memory pools with its graphs. Traces share pools, so these do not add up: `Report.memory.pools` does.
    arena_bytes: int
    fast_path_calls: int = 0  # calls that were checked in C++, and did not go through Thunder's dispatch in Python
    no_fast_path: str | None = None  # why others did not, or why theirs is not the shortest
    warm_ups: int = 0  # of the calls without graphs: the first one with each layout of inputs
    warm_up_seconds: float = 0.0  # that they took on the host, with what fusions compile in their first run
    remark: str | None = None  # what the user should know besides
    collectives: tuple[CollectiveReport, ...] = ()  # in the order in which the plan runs them
    crossings: tuple[CrossingReport, ...] = ()  # values that go from one step of the plan to another
    fixes: Mapping[str, str] = field(default_factory=dict)  # what would change a reason of the fallbacks, where known
    awaiting_capture: int = 0  # layouts of inputs that were warmed up, and are captured when they come again
    inputs: tuple[InputReport, ...] = ()  # of a forward
    training: bool | None = None  # the module's mode when it was compiled; None for functions and Dynamo's graphs
    grad: bool = False  # whether gradients were enabled when it was compiled
    autocast: str | None = None  # the dtype of the autocast that was active when it was compiled
    compile_seconds: float = 0.0  # that Thunder took for the version, forward and backward

    @property
    def capture_seconds(self) -> float:
        """That all captures took."""
        return sum(region.capture_seconds for region in self.regions)

    @property
    def captures(self) -> int:
        """Calls that captured graphs, and then ran them."""
        return max((region.captures for region in self.regions), default=0)

    @property
    def replays(self) -> int:
        """Calls that replayed a graph that an earlier call captured."""
        return max((region.replays - region.captures for region in self.regions), default=0)

    @property
    def is_in_steps(self) -> bool:
        """Whether all calls of a forward ran inside of graphed steps, whose graphs hold what it does."""
        held = sum(self.fallbacks.get(each.problem, 0) for each in HELD_ELSEWHERE)
        return IN_STEP.problem in self.fallbacks and self.calls == held

    @property
    def counts(self) -> Counter[str]:
        """Ops by verdict."""
        return Counter(op.verdict for op in self.ops)


@dataclass(frozen=True, slots=True, repr=False)
class Report(FunctionReport):
    """What became of a compiled function. `print` it, leave it as a notebook cell's last line, `save` it to a file, or
    take `to_dict()`. `differences` compares it with an earlier one, which `load` reads from a file. `profile` adds
    times, and `dump_dot` draws the graph of a region, as long as the function exists."""

    traces: tuple[TraceReport, ...]  # one for every forward and every backward that Thunder compiled with the transform
    outside: tuple[Outside, ...] = ()  # what Thunder does not support, so that Inductor runs it (thunderfx only)
    joined: tuple[Outside, ...] = ()  # likewise, but what Inductor made of it is an operator of a trace
    causes: tuple[CauseReport, ...] = ()  # of eager ops, the most expensive first
    changes: tuple[ChangeReport, ...] = ()  # because of which calls compile, warm up or capture anew
    compile_failures: int = 0  # calls in which Thunder raised while it compiled
    compile_failure: str | None = None  # what it raised last, where, and what to try; None if each was an interruption
    # Names in the options allow= and deny= that no operator of the traces has: the option, the name, what to write.
    unmatched: tuple[tuple[str, str, str | None], ...] = ()
    clock: str | None = None  # the backend whose clock measured the times in it; None if none did
    breaks: tuple[GraphBreak, ...] = ()  # where Dynamo ended a graph and began another one (thunderfx only)
    calls: int = 0  # of the function, or of all of Dynamo's graphs, as Thunder counts
    memory: MemoryReport = field(default_factory=MemoryReport)  # the ledger
    limits: tuple[RecompileLimit, ...] = ()  # functions that Dynamo compiles no more (thunderfx only)
    new_sizes: tuple[
        NewSizes, ...
    ] = ()  # calls of graphs that PyTorch ran, as sizes were new too often (thunderfx only)
    python_calls: int = 0  # in which no graph of Dynamo's ran, so that Thunder did nothing, at least (thunderfx only)
    is_of_dynamo: bool = False  # whether Dynamo reads the Python (thunderfx only)
    uncached: bool = False  # whether Thunder compiles each call anew, and the traces are those of the last one
    differs: tuple[str, ...] = ()  # what Thunder computes otherwise than PyTorch, or loses, with and without graphs
    recompilations: tuple[Recompilation, ...] = ()  # what Dynamo compiled more than once, and why (thunderfx only)
    note: str = ""  # of a plan: that nothing was run, and which devices stand for which

    _title = "CUDA graphs"

    def profile(self, /, *args: Any, **kwargs: Any) -> Report:
        """The report with times, measured in calls of the function with these arguments: :func:`thunder_cg.profile`.

        Raises:
            CudagraphError: the report was loaded from a file, or its function is gone.
        """
        return profile(self._function_for("profile"), *args, **kwargs)

    def differences(self, before: Any) -> Differences:
        """What a change did, given the report of the same function from before the change.

        Raises:
            OptionError: ``before`` is no `Report`.
        """
        if not isinstance(before, Report):
            fix = "pass explain(fn) from before the change, or Report.load(file)"
            raise OptionError("before", type(before), "a Report", fix, "differences")
        return differences.between(before, self)

    def _text(self) -> str:
        return text.render(self)

    def _markdown(self) -> str:
        return markdown.render(self)

    def _repr_html_(self) -> str:
        return html.render(self)


@overload
def explain(fn: GraphedStep) -> StepReport: ...
@overload
def explain(fn: Any) -> Report: ...
def explain(fn: Any) -> Report | StepReport:
    """Says what of `fn` is captured, what stays eager and why, and what calling it has cost so far.

    Args:
        fn: what `thunder.jit`, `thunder.compile` or `thunderfx` returned, compiled with `cudagraph_transform()`; or a
            step of `graphed_step()`.

    Returns:
        a `Report` with one entry per trace, none if `fn` was not called yet: Thunder compiles at the first call. Of a
        step, a `StepReport`; the modules in it have reports of their own.

    Raises:
        NotCompiledError: `fn` is not compiled by Thunder, or not with `cudagraph_transform()`.
    """
    if isinstance(fn, GraphedStep):
        return StepReport.of(fn).about(fn)
    return report(fn)


def report(fn: Any, times: Mapping[int, Times] | None = None) -> Report:
    """The report of a function, with times by the identity of programs if they were measured."""
    found = locate(fn)
    traces = tuple(_trace(each, (times or {}).get(id(each.program), Times())) for each in found.programs)
    programs = [located.program for located in found.programs]
    made = Report(
        traces=traces,
        joined=tuple(each for each in found.outside if not each.cost),
        causes=causes(programs, {key: each.ops for key, each in times.items()} if times is not None else None),
        clock=programs[0].backend.name if times and programs else None,
        changes=changes(found.programs, found.recompilations),
        memory=MemoryReport.of(found.programs),
        unmatched=_unmatched(programs),
        differs=(
            *dict.fromkeys(said for program in programs for said in program.compilation.differs),
            *(said for jitted in jitted_parts(fn) for said in _set_too_late(jitted)),
        ),
        **{each.name: getattr(found, each.name) for each in fields(Found) if each.name not in ("programs", "outside")},
        outside=tuple(each for each in found.outside if each.cost),
    )
    return made.about(fn)


def _set_too_late(jitted: Any) -> Iterator[str]:
    """What was set on a compiled module, or replaced in its model, which no call sees."""
    if isinstance(jitted, ThunderModule):
        found, name = changed_since_compiled(jitted), type(original_module(jitted)).__name__
        for attribute in found["attributes"]:
            yield (
                f"{name}.{attribute} was set on the compiled module, whose calls do not see it, or raise; take it back "
                f"with del, and set it on the model before thunder.jit compiles it, or write to its tensors in place"
            )
        for part in found["parts"]:
            yield changed_part(name, part)


def profile(fn: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Times a call of a compiled function: `explain` with what each region and each eager op takes, in microseconds.

    Each region is timed as a replay and with its ops run eagerly, each eager op as it runs. The report then ranks root
    causes by time, and names regions that take longer than their ops. On CUDA the times are those of CUDA events on the
    device's current stream, medians of up to 20 calls; on the tape they are the host's.

    The function is called about 50 times, forward and, if an input or a parameter requires grad, backward, with ones
    for gradients. Nothing is accumulated in ``.grad``. Inputs, buffers of the module and generators are as before
    afterwards; other tensors that the function writes, and what an operator keeps by itself, are not. With collectives,
    all ranks have to call it. The report does not count these calls.

    Args:
        fn: what `thunder.jit`, `thunder.compile` or `thunderfx` returned, compiled with `cudagraph_transform()`.
        args, kwargs: of the call to time.

    Raises:
        NotCompiledError: `fn` is not compiled by Thunder, or not with `cudagraph_transform()`.
    """
    return report(fn, measure(fn, args, kwargs))


def _unmatched(programs: Sequence[Program]) -> tuple[tuple[str, str, str | None], ...]:
    names = {option: {n for p in programs for n in getattr(p.options, option)} for option in ("allow", "deny")}
    split = {name: parts for program in programs for name, parts in program.split_operators.items()}
    missing = unmatched(names, (program.ops for program in programs), split)
    return tuple((option, shown(name), instead) for option, name, instead in missing)


def _trace(located: Located, times: Times) -> TraceReport:
    program = located.program
    later = f"later calls take {located.successor}, which is for more sizes or numbers" if located.successor else None
    return TraceReport(
        function=located.function,
        entry=located.entry,
        kind=program.kind,
        ops=_ops(program, times),
        regions=tuple(_region(program, region, times) for region in program.regions),
        calls=program.counts.calls,
        eager_calls=program.counts.eager_calls,
        warm_ups=program.counts.warm_ups,
        warm_up_seconds=program.counts.warm_up_seconds,
        fast_path_calls=program.counts.fast_path_calls,
        no_fast_path=program.no_fast_path,
        remark="; ".join(filter(None, [program.counts.remark, later])) or None,
        fallbacks=dict(program.counts.fallbacks),
        arena_bytes=sum(arena.nbytes() for arena in program.pair.arenas()),
        collectives=(*collectives(program),),
        crossings=(*crossings(program),),
        fixes={reason: fix for reason, fix in program.fixes.items() if reason in program.counts.fallbacks},
        awaiting_capture=program.awaiting_capture if located.successor is None else 0,
        inputs=(*inputs(program),) if program.kind == "forward" else (),
        training=program.compilation.training,
        grad=program.compilation.grad,
        autocast=program.compilation.autocast,
        compile_seconds=program.compilation.seconds,
    )


def _ops(program: Program, times: Times) -> tuple[OpReport, ...]:
    """All ops, in the order in which the plan runs them."""
    regions = {index: region.name for region in program.regions for index in region.planned.ops}
    order = [index for step in program.plan.steps for index in step.ops]
    return tuple(_op(program, index, regions.get(index), times.ops.get(index)) for index in order)


def _op(program: Program, index: int, region: str | None, microseconds: float | None) -> OpReport:
    op, verdict = program.ops.ops[index], program.plan.verdicts[index]
    return OpReport(
        index=op.index,
        name=op.name,
        executor=op.executor,
        verdict="bookkeeping" if op.bookkeeping else "capture" if verdict.capture else "eager",
        reason=verdict.reason.value,
        detail="; ".join([verdict.detail, *_failures(op)]),
        fix=verdict.fix,
        line=program.ops.line(op),
        source=program.ops.source(op),
        region=region,
        fused=tuple(sub.name for sub in op.subs) if op.is_fusion else (),
        microseconds=microseconds,
    )


def _failures(op: Op) -> list[str]:
    """What the fuser could not do."""
    functions = bound_functions(op.symbol).values() if op.is_fusion else ()
    failures = [fn.failure for fn in functions if isinstance(fn, Fusion) and fn.failure is not None]
    return [f"Inductor cannot compile it, so it runs op by op: {failure}" for failure in failures]


def _region(program: Program, region: RuntimeRegion, times: Times) -> RegionReport:
    return RegionReport(
        name=region.name,
        device=region.planned.device,
        ops=len(region.planned.ops),
        split=region.planned.split,
        failure=region.failure and region.failure.problem,
        fix=region.failure.fix if region.failure else "",
        quarantined=region.disagreement is not None,
        deselected=region.is_deselected,
        remark=region.remark,
        microseconds=times.regions.get(region.name) if not region.is_deselected else None,
        eager_microseconds=times.eager_regions.get(region.name),
        copy_microseconds=times.copies.get(region.name),
        split_microseconds=_split(program, region, times),
        **asdict(region.stats),
    )


def _split(program: Program, region: RuntimeRegion, times: Times) -> float | None:
    """The time of the eager ops between a region and the next one."""
    steps = program.plan.steps
    at = next(i for i, step in enumerate(steps) if step is region.planned)
    between = takewhile(lambda step: not isinstance(step, Region), steps[at + 1 :])
    times_between = [times.ops[index] for step in between for index in step.ops if index in times.ops]
    return sum(times_between) if times_between else None
