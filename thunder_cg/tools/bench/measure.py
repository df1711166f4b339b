"""Measures all variants of a case in one process, in turns, so that all of them see the same machine.

Only ratios within one run count, not microseconds.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from statistics import median

import torch

from thunder_cg.compat.torch_compile import dynamo_recompile_limit, forget_dynamic_sizes, keep_cublas_workspaces
from thunder_cg.progress import Progress
from thunder_cg.report.programs import locate
from thunder_cg.report.report import explain
from thunder_cg.runtime.recording import Recording
from thunder_cg.step import GraphedStep
from thunder_cg.tools.bench import accuracy
from thunder_cg.tools.bench.cases import BenchmarkCase
from thunder_cg.tools.bench.variants import OURS, REDUCE_OVERHEAD, THUNDER, VARIANTS, Prepared, Subject, is_of
from thunder_cg.tools.measuring import (
    free_cublas_workspaces,
    free_memory,
    frozen_objects,
    memory_peaks,
    new_inductor_cache,
    new_segments,
    p99,
    quiet_collector,
    synchronize,
)
from thunder_cg.tools.workers import failure_text, working_time

ROUNDS = 5  # turns of each variant
TURN_SECONDS = 1.0  # after which a turn of slow calls ends, but not before FEWEST_CALLS
FEWEST_CALLS = 10
EVERY_VARIANT = "every variant"
FIRST_CALLS = 6  # compile, warm up, capture, and reach the steady state
LATER_CALLS_SECONDS = 60.0  # after which `BenchmarkCase.later_calls` end
CAPTURES = 5


@dataclass(slots=True)
class BenchmarkRow:
    """One variant of one case.

    Attributes:
        host_p50, host_p99: microseconds until a call returns; the GPU is idle when it begins.
        end_to_end_p50, end_to_end_p99: microseconds until the GPU has finished the call.
        back_to_back: microseconds per call of many with one synchronization at the end; `per_second` is its inverse.
        samples: synchronised calls measured, in `ROUNDS` turns.
        first_calls_ms: the first three calls, synchronized. The first call compiles; thunder_cg captures in the second.
        prepare_s: seconds before the first call, where `make_graphed_callables` and the hand-made graph capture.
        compile_s: preparation and the first call, seconds of `working_time`, with no compiled kernels on the disk.
        capture_ms: the time of a call that captures, less that of a call that does not, milliseconds. For thunder_cg it
            is the median of `CAPTURES` after all turns, because other processes may compile beside the second call; for
            other variants it is the second call.
        analysis_ms: the part of the compilation that the hooks of thunder_cg took, milliseconds.
        allocated_mb, reserved_mb: peaks above the model in the first calls, 1e6 bytes, in `new_segments`. Workspaces of
            cuBLAS count if the variant is measured alone: else those of earlier variants serve it, if it has no graph.
        error: see `accuracy.relative_error`, against `reference`: "float64", or "eager" in the case's own dtype.
        bits: for thunder_cg, whether results equal those of plain Thunder: "same", "different", "thunder varies" if two
            calls of plain Thunder differ, or "other kernels" if they are those of the same compiled function without
            graphs: Inductor, which compiles Thunder's cross entropy, has timed its kernels anew and taken others.
        captured: for thunder_cg, the headline of its report.
        failure: why the variant did not run, "" if it did.
    """

    case: str
    variant: str
    host_p50: float = 0.0
    host_p99: float = 0.0
    end_to_end_p50: float = 0.0
    end_to_end_p99: float = 0.0
    back_to_back: float = 0.0
    per_second: float = 0.0
    samples: int = 0
    prepare_s: float = 0.0
    compile_s: float = 0.0
    capture_ms: float = 0.0
    analysis_ms: float = 0.0
    first_calls_ms: list[float] = field(default_factory=list)
    allocated_mb: float = 0.0
    reserved_mb: float = 0.0
    error: float | None = None
    reference: str = ""
    bits: str = ""
    captured: str = ""
    failure: str = ""


@dataclass(slots=True)
class Samples:
    """What was measured of one variant in this process, in seconds and 1e6 bytes; see `BenchmarkRow`.

    Attributes:
        ends: of synchronized calls, by a clock that all processes of the machine share.
        back_to_back: of each turn.
    """

    prepare: float = 0.0
    first_calls: list[float] = field(default_factory=list)
    allocated: float = 0.0
    reserved: float = 0.0
    host: list[float] = field(default_factory=list)
    end_to_end: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    back_to_back: list[float] = field(default_factory=list)


class Contender:
    """One variant of a case, prepared and called until it reached its steady state, and its samples in this process."""

    def __init__(
        self, name: str, prepare: Callable[[], Prepared], device: torch.device, samples: Samples, later_calls: int = 0
    ) -> None:
        self.name, self.samples, self._device = name, samples, device
        forget_dynamic_sizes()  # else sizes that varied in another variant are dynamic from the start
        with memory_peaks(device) as memory, new_inductor_cache():
            start = working_time()
            self.prepared = prepare()
            synchronize(device)
            samples.prepare = working_time() - start
            samples.first_calls = [self.call(working_time)[1] for _ in range(FIRST_CALLS)]
        samples.allocated, samples.reserved = memory.allocated, memory.reserved
        end = working_time() + LATER_CALLS_SECONDS
        later = [self.call()[1] for _ in takewhile(lambda _: working_time() < end, range(later_calls))]
        self.seconds = min([*samples.first_calls, *later][-3:])

    def call(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Seconds until a call returned, and until the GPU had finished it."""
        start = clock()
        self.prepared.step()
        returned = clock()
        synchronize(self._device)
        return returned - start, clock() - start

    def warm_up(self) -> None:
        """Calls before a turn: after those of other variants, the first ones are slower."""
        for _ in range(3):
            self.call()

    def turn(self, most: int, slowest: float, meet: Callable[[], None] = lambda: None) -> None:
        """Measures calls back to back, then as many synchronized ones.

        Args:
            most: so many, or less if the ``slowest`` rank needs many seconds for each; see `TURN_SECONDS`.
            meet: has the ranks wait for each other, before each of the two.
        """
        samples, calls = self.samples, min(most, max(FEWEST_CALLS, int(TURN_SECONDS / slowest)))
        meet()
        with quiet_collector():
            start = time.perf_counter()
            for _ in range(calls):
                self.prepared.step()
            synchronize(self._device)
            samples.back_to_back.append((time.perf_counter() - start) / calls)
            meet()
            for _ in range(calls):
                host, end_to_end = self.call()
                samples.ends.append(time.perf_counter())
                samples.host.append(host)
                samples.end_to_end.append(end_to_end)

    def headline(self) -> str:
        """That of the report of what Thunder has compiled."""
        return str(explain(self.prepared.compiled)).splitlines()[0].partition(": ")[2]

    def why_never_replayed(self) -> str:
        """Why no call of a step was a graph, so that its time is that of something else; "" if one was."""
        step = self.prepared.compiled
        if not isinstance(step, GraphedStep) or step.replays:
            return ""
        return f"0 of {step.calls} calls replayed: {step.in_python.most_common(1)[0][0]}"


def of_subject(name: str, subject: Subject) -> Contender:
    """The variant, prepared. It may change the model."""
    torch.manual_seed(0)
    return Contender(name, partial(VARIANTS[name], subject), subject.device, Samples(), subject.case.later_calls)


def _fill(row: BenchmarkRow, contender: Contender) -> None:
    """After all turns."""
    samples, prepared = contender.samples, contender.prepared
    row.allocated_mb, row.reserved_mb, row.prepare_s = samples.allocated, samples.reserved, samples.prepare
    row.first_calls_ms = [t * 1e3 for t in samples.first_calls[:3]]
    row.compile_s = samples.prepare + samples.first_calls[0]
    row.failure = contender.why_never_replayed()
    host, end_to_end = ([t * 1e6 for t in each] for each in (samples.host, samples.end_to_end))
    row.samples = len(host)
    row.host_p50, row.host_p99 = median(host), p99(host)
    row.end_to_end_p50, row.end_to_end_p99 = median(end_to_end), p99(end_to_end)
    row.back_to_back = median(samples.back_to_back) * 1e6
    row.per_second = 1e6 / row.back_to_back
    times = row.first_calls_ms[1:2]
    if prepared.transform is not None:
        row.analysis_ms, row.captured = prepared.transform.seconds * 1e3, contender.headline()
        times = captures(contender)
    elif isinstance(prepared.compiled, GraphedStep):
        row.captured = "; ".join(map(str.strip, str(explain(prepared.compiled)).splitlines()))
    row.capture_ms = max(0.0, median(times) - row.end_to_end_p50 / 1e3)


def captures(contender: Contender) -> list[float]:
    """Milliseconds of calls that capture, because their recordings were dropped before."""
    pairs = {located.program.pair for located in locate(contender.prepared.compiled).programs}
    times: list[float] = []
    dropped: list[Recording] = []  # freed after the measurement
    with quiet_collector():
        for _ in range(CAPTURES):
            for pair in pairs:
                dropped += pair.recordings
                for recording in pair.recordings:
                    pair.drop(recording)
            times.append(contender.call()[1] * 1e3)
    return times


def measure_case(
    case: BenchmarkCase,
    device: torch.device,
    names: Sequence[str],
    calls: int,
    progress: Progress,
    compare: bool = True,
    ready: Callable[[], None] = lambda: None,
) -> list[BenchmarkRow]:
    """The rows of all variants in `names`, which take turns. A variant that fails has a row with the reason.

    Args:
        calls: in a turn, at most; see `TURN_SECONDS`.
        progress: moves on by `ticks(names)`.
        compare: fill in `error` and `bits`.
        ready: called once all variants are prepared, before anything is timed.
    """
    try:
        # All variants that use Dynamo share one code object. Past the limit, Dynamo would run it eagerly.
        with dynamo_recompile_limit(64):
            return _measure_variants(case, device, names, calls, progress, compare, ready)
    finally:
        torch.compiler.reset()  # the next case must not reuse compiled code
        with suppress(RuntimeError):  # after a CUDA error, which the rows report, no CUDA call works
            free_memory(device)


def ticks(names: Sequence[str]) -> int:
    """By how much `measure_case` moves the progress on."""
    return len(names) * (1 + ROUNDS)


def _measure_variants(
    case: BenchmarkCase,
    device: torch.device,
    names: Sequence[str],
    calls: int,
    progress: Progress,
    compare: bool,
    ready: Callable[[], None],
) -> list[BenchmarkRow]:
    progress.tick(f"{case.name}: begins", ticks(names) - ticks(names := [name for name in names if is_of(case, name)]))
    try:
        template = subject(case, device)
        # A whole step changes the parameters, so no two calls do the same.
        accuracy_check = _AccuracyCheck(template) if compare and not case.steps else None
    except Exception as error:
        progress.tick(f"{case.name}: failed", ticks(names))
        return [BenchmarkRow(case.name, EVERY_VARIANT, failure=failure_text(error))]
    contenders: dict[str, Contender] = {}
    rows: dict[str, BenchmarkRow] = {}

    def prepare(some: Sequence[str]) -> None:
        for name in some:
            progress.tick(f"{case.name}: preparing {name}")
            try:
                if len(names) == 1:
                    free_cublas_workspaces(device)
                with new_segments(device):
                    own = Subject(case, copy.deepcopy(template.model), template.inputs)
                    contender, row = of_subject(name, own), BenchmarkRow(case.name, name)
                if accuracy_check is not None:
                    accuracy_check.fill(row, contender, own)
                contenders[name], rows[name] = contender, row
            except Exception as error:
                rows[name] = BenchmarkRow(case.name, name, failure=failure_text(error))

    # Inductor frees all cuBLAS workspaces when it records a graph, but graphs of other variants write to theirs.
    prepare([name for name in names if name == REDUCE_OVERHEAD])
    with keep_cublas_workspaces():
        prepare([name for name in names if name != REDUCE_OVERHEAD])
        ready()
        with frozen_objects():
            _take_turns(case, [contenders[name] for name in names if name in contenders], rows, calls, progress)
    return [rows[name] for name in names]


def _take_turns(
    case: BenchmarkCase, contenders: list[Contender], rows: dict[str, BenchmarkRow], calls: int, progress: Progress
) -> None:
    """Fills in the rows of the contenders that could be prepared."""
    for round in range(ROUNDS):
        for contender in [*contenders]:
            progress.tick(f"{case.name}: turn {round + 1} of {ROUNDS}, {contender.name}")
            try:
                contender.warm_up()
                contender.turn(calls, contender.seconds)
            except Exception as error:
                contenders.remove(contender)
                rows[contender.name] = BenchmarkRow(case.name, contender.name, failure=failure_text(error))
        progress.tick(f"{case.name}: turn {round + 1} of {ROUNDS}", len(rows) - len(contenders))
    for contender in contenders:
        _fill(rows[contender.name], contender)


def subject(case: BenchmarkCase, device: torch.device) -> Subject:
    """The case's model, made from a fixed seed, and its inputs."""
    torch.manual_seed(0)
    with torch.device(device):
        model = case.model()
    # Holes that the construction leaves would serve eager calls, and no graph, and nobody would count them.
    model.to("cpu", case.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    inputs = (t.to(device, case.dtype if t.is_floating_point() else t.dtype) for t in case.inputs())
    return Subject(case, model.to(device), tuple(inputs))


class _AccuracyCheck:
    """Fills in `error` and `bits`. It keeps the results of plain Thunder, which is prepared before thunder_cg."""

    def __init__(self, template: Subject) -> None:
        self._name = "float64" if template.case.exact else "eager"
        self._exact = accuracy.reference(template)
        self._thunder: list[accuracy.StepResults] = []

    def fill(self, row: BenchmarkRow, contender: Contender, subject: Subject) -> None:
        def results() -> accuracy.StepResults:
            return accuracy.step_results(contender.prepared.step, subject)

        found = results()
        row.reference = self._name
        try:
            row.error = accuracy.relative_error(found, self._exact)
        except ValueError as error:
            row.reference = f"{self._name}: {error}"
        if row.variant == THUNDER:
            self._thunder = [found, results()]
        elif row.variant == OURS and self._thunder:
            row.bits = accuracy.bits(found, self._thunder, results, accuracy.same)
            self._thunder = []
