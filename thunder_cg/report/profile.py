"""What `profile(fn, *inputs)` measures: what each region and each eager op of a call takes, and what a region saves.

Note [What is timed]
    The traces that a call runs are rebuilt with a mark of the backend's timer after each region and each eager op: once
    as they are, and once with the regions' ops in the place of the regions, in the same order. Both run on the same
    inputs, each backward after its forward. They go around the fast paths, so what these save besides is not seen. The
    time between two marks counts for what is between them: on a GPU that is also time in which the GPU waits for the
    host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import thunder
import torch

from thunder_cg.analysis.ops import Op, gradients_in
from thunder_cg.analysis.partition import Region
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.compiled import computation_and_inputs
from thunder_cg.compat.tensors import is_inexact, tree_map_only
from thunder_cg.executor import executor
from thunder_cg.report.programs import failed_calls, jitted_parts, locate, that_counts
from thunder_cg.report.state import state_kept
from thunder_cg.runtime.backend import Timer
from thunder_cg.runtime.compilation import compile_failures, set_compile_failures
from thunder_cg.runtime.counts import Counts
from thunder_cg.runtime.functions import unused
from thunder_cg.runtime.program import Program, program_of
from thunder_cg.runtime.recording import Recording
from thunder_cg.runtime.tensors import copy_all, flat

_WARM_UPS, _CALLS = 4, 20  # a backward for another layout of gradients takes three calls until it replays
_SECONDS = 10.0  # after which no more calls are made, if there were a few
_FEW = 3

Timed = Op | str  # what ends at a mark: an eager op, or a region by its name


@dataclass(frozen=True, slots=True)
class Times:
    """What was measured of one program, in microseconds."""

    regions: dict[str, float] = field(default_factory=dict)  # by name
    eager_regions: dict[str, float] = field(default_factory=dict)  # with the region's ops in its place
    copies: dict[str, float] = field(default_factory=dict)  # of as many bytes as a replay copies
    ops: dict[int, float] = field(default_factory=dict)  # eager ones, by index


def measure(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Times]:
    """The times of a call of a compiled function, by the identity of its programs. See `Report.profile`."""
    locate(fn, "profile")  # raises, before anything is called
    times: dict[int, Times] = {}
    with _uncounted(fn), state_kept(fn, (args, kwargs)):
        for jitted, part_args, part_kwargs in _calls_of_parts(fn, args, kwargs):
            entry, inputs = computation_and_inputs(jitted, part_args, part_kwargs)
            forward = program_of(entry.computation_traces)
            if forward is not None:
                backward = program_of(entry.backward_traces) if entry.backward_fn else None
                times |= _timed(entry, inputs, forward, backward)
    return times


@contextmanager
def _uncounted(fn: Any) -> Iterator[None]:
    """Inside, calls of ``fn`` do not count in its report: these are not the user's."""
    counting = that_counts(fn)
    of_function = counting.counts if counting is not None else None
    counts = {id(each.program): deepcopy(each.program.counts) for each in locate(fn).programs}
    replays = {each: each.replays for each in _recordings(fn)}
    calls = {part: (thunder.compile_stats(part).calls, failed_calls(part)) for part in jitted_parts(fn)}
    raised = {part: compile_failures(thunder.compile_stats(part)) for part in calls}
    try:
        yield
    finally:
        if counting is not None:
            counting.counts = of_function
        for each in locate(fn).programs:
            each.program.counts.restore(counts.get(id(each.program), Counts()))
        for recording in _recordings(fn):
            recording.replays = replays.get(recording, 0)
        for part in jitted_parts(fn):
            statistics = thunder.compile_stats(part)
            statistics.calls, failed = calls.get(part, (0, 0))
            set_compile_failures(statistics, raised.get(part, (0, None)))
            statistics.cache_misses -= failed_calls(part) - failed


def _recordings(fn: Any) -> set[Recording]:
    return {recording for each in locate(fn).programs for recording, _ in each.program.recorded()}


def _calls_of_parts(fn: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The functions of Thunder's that a call of ``fn`` calls, with their arguments. Dynamo has them call by call."""
    fn(*args, **kwargs)  # compiles
    parts = [*jitted_parts(fn)]
    if parts == [fn]:
        yield fn, args, kwargs
        return
    calls: dict[int, tuple[Any, Any, Any]] = {}

    def without_history(tensor: torch.Tensor) -> torch.Tensor:  # so that no memory pool stays alive for it
        return tensor if tensor.is_leaf else tensor.detach().requires_grad_()

    def seen(part: Any, args: Any, kwargs: Any) -> None:
        calls.setdefault(id(part), (part, *tree_map_only(torch.Tensor, without_history, (args, kwargs))))

    hooks = [part.register_forward_pre_hook(seen, with_kwargs=True) for part in parts]
    try:
        fn(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    yield from calls.values()


def _timed(entry: Any, inputs: Sequence[Any], forward: Program, backward: Program | None) -> dict[int, Times]:
    """The times of a forward and its backward, by the identity of their programs."""
    programs = [program for program in (forward, backward) if program is not None]
    times = {id(program): Times() for program in programs}
    for as_planned in (True, False):
        traces = entry.computation_traces[-1], *entry.backward_traces[-1:]
        runs = [_Run.of(program, trace, as_planned) for program, trace in zip(programs, traces)]
        began = time.perf_counter()
        for call in range(_WARM_UPS + _CALLS):
            if call >= _WARM_UPS + _FEW and time.perf_counter() - began > _SECONDS:
                break
            if call == _WARM_UPS:
                for each in runs:
                    each.timer.runs()
            _call(*runs, inputs=inputs)
        for each in runs:
            each.add_to(times[id(each.program)], as_planned)
    for program in programs:
        _time_copies(program, times[id(program)])
    return times


def _call(run: _Run, back: _Run | None = None, *, inputs: Sequence[Any]) -> None:
    """One forward, and its backward, which alone owns what was saved, so that it can free that on the way."""
    result = run(*inputs)
    if back is not None:
        data, (tensors, others) = result
        gradients, saved = [*_gradients(data["flat_output"], back.program)], [list(tensors), others]
        del result, data, tensors, others
        back(saved, gradients)


def _gradients(results: Sequence[Any], backward: Program) -> Iterator[torch.Tensor | None]:
    """Ones, laid out as in the last call of the user's, since another layout would drop what that has captured."""
    known = [*backward.layouts()][-1:]
    layouts = [known[0].get(name) for name in gradients_in(backward.ops.ops)] if known else []
    for value, layout in zip(results, layouts if len(layouts) == len(results) else [None] * len(results)):
        if not is_inexact(value):
            yield None
        elif layout and layout[0] == value.shape:
            gradient = torch.empty_strided(*layout[:2], dtype=value.dtype, device=value.device)
            flat(gradient).fill_(1)
            yield gradient
        else:
            yield torch.ones_like(value)


@dataclass(slots=True)
class _Run:
    """A trace with marks, and the timer that they are of."""

    program: Program
    function: Callable[..., Any]
    marks: list[Timed]
    timer: Timer

    @classmethod
    def of(cls, program: Program, trace: Any, as_planned: bool) -> _Run:
        """As the plan says, or with each region's ops in its place."""
        # With regions on several devices, only what the first one does is timed.
        device = next((region.device for region in program.regions), torch.device(program.backend.device_type))
        timer = program.backend.timer(device)
        marks: list[Timed] = []
        new = compat.from_trace(trace)
        name = unused("profile_mark", set(trace.names))
        with compat.tracectx(new):
            new.bound_symbols = []
            for symbol, ends in _as_planned(program, trace) if as_planned else _without_regions(program):
                new.bound_symbols.append(symbol)
                if ends is not None:
                    marks.append(ends)
                    new.bound_symbols.append(executor.bind(name, timer.mark, (), None, has_effect=True))
            new = compat.del_last_used(new)
        return cls(program, compat.transform_to_torch_types(new).python_callable(), marks, timer)

    def __call__(self, *args: Any) -> Any:
        self.timer.start()
        return self.function(*args)

    def add_to(self, times: Times, as_planned: bool) -> None:
        """The median of each mark's times."""
        calls = self.timer.runs()
        for position, timed in enumerate(self.marks):
            took = median(call[position] for call in calls)
            if isinstance(timed, str):
                (times.regions if as_planned else times.eager_regions)[timed] = took
            elif as_planned:
                times.ops[timed.index] = took


def _as_planned(program: Program, trace: Any) -> Iterator[tuple[Any, Timed | None]]:
    """The symbols of the emitted trace, and what ends after each one."""
    eager = {_key(op.symbol): op for op in program.ops.ops if not op.bookkeeping}
    regions = {region.name for region in program.regions}
    for symbol in trace.bound_symbols:
        if symbol.sym.id is compat.PrimIDs.DEL:
            continue
        if (name := symbol.sym.name) in regions or name.startswith("cudagraph_begin"):
            yield symbol, name
        else:
            yield symbol, eager.get(_key(symbol))


def _without_regions(program: Program) -> Iterator[tuple[Any, Timed | None]]:
    """The ops in the order of the plan, and what ends after each one."""
    names = (region.name for region in program.regions)
    for step in program.plan.steps:
        *first, last = [program.ops.ops[index] for index in step.ops]
        yield from ((op.symbol, None) for op in first)
        if isinstance(step, Region):
            yield last.symbol, next(names)
        else:
            yield last.symbol, None if last.bookkeeping else last


def _key(symbol: Any) -> tuple[Any, ...]:
    return symbol.sym.name, *(proxy.name for proxy in (*symbol.flat_proxy_outs, *symbol.flat_proxy_args))


def _time_copies(program: Program, times: Times) -> None:
    """What it takes to copy as many bytes as a replay of each region copies in and out."""
    for region in program.regions:
        timer = program.backend.timer(region.device)
        sizes = [size for size in (region.stats.bytes_in, region.stats.bytes_out) if size]
        memory = [torch.empty(size, dtype=torch.uint8, device=region.device) for size in sizes]
        copies = [torch.empty_like(each) for each in memory]
        for _ in range(_CALLS if memory else 0):
            timer.start()
            for target, source in zip(copies, memory):
                copy_all([target], [source])
            timer.mark()
        runs = timer.runs()
        times.copies[region.name] = median(run[0] for run in runs) if runs else 0.0
