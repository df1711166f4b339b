"""One row: a model through Thunder without and with graphs, compared bit for bit, then timed."""

from __future__ import annotations

import copy
import gc
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import thunder
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from thunder_cg.report.report import Report, TraceReport, explain
from thunder_cg.tools.bench.measure import reason
from thunder_cg.tools.demo import same_bits
from thunder_cg.tools.suite.models import LEARNING_RATE, Entry
from thunder_cg.transform import cudagraph_transform

FORWARD, TRAINING = "forward", "training"
MODES = (FORWARD, TRAINING)
STEPS = 5  # one warms up, one captures, and the others replay, all but one of them around Thunder's dispatch
ROUNDS = 5  # turns that both sides get
TURN_SECONDS = 0.5  # a turn of slow steps has fewer of them
SEED = 7
JIT, FX = "thunder.jit", "thunderfx"
NOWHERE, BACKWARD, EVERYWHERE = "nowhere", "in the backward", "everywhere"

EAGER = "eager in Thunder's trace"
INDUCTOR = "left to Inductor by thunderfx"
BREAK = "graph break of Dynamo"
NOT_REPLAYED = "region that did not replay"


@dataclass(frozen=True, slots=True)
class Outside:
    """What is not in a graph, how often, and why.

    Attributes:
        kind: `EAGER`, `INDUCTOR`, `BREAK` or `NOT_REPLAYED`.
    """

    kind: str
    what: str
    count: int
    why: str


@dataclass(slots=True)
class Row:
    """One model in one mode.

    Attributes:
        path: how Thunder takes the model: `JIT`, or `FX` where that fails, and then `not_jit` says how.
        ops: all of the last step, forward and backward; `captured` of them are in graphs.
        graphs: what Dynamo and thunderfx's splits made of the model: functions that Thunder compiled.
        regions: of these functions, `replayed` of them in the last step. One each way is the fewest.
        outside: what is not in a graph.
        agrees: "yes", or "yes: " and with which settings; or "no: " and what first differed from uncaptured Thunder; or
            "Thunder varies: " and what first differed between two runs of uncaptured Thunder, so that there is nothing
            to compare with.
        thunder_us, captured_us: medians of a synchronised step, uncaptured and captured, microseconds; 0 where not
            measured.
        failure: why there is no such row, "" if there is.
    """

    model: str
    package: str
    mode: str
    path: str = ""
    not_jit: str = ""
    ops: int = 0
    captured: int = 0
    graphs: int = 0
    regions: int = 0
    replayed: int = 0
    outside: list[Outside] = field(default_factory=list)
    agrees: str = ""
    thunder_us: float = 0.0
    captured_us: float = 0.0
    failure: str = ""


class Side:
    """One copy of the model, compiled, and its steps.

    Args:
        deterministic: where steps use kernels that give the same bits twice: see Note [Deterministic].
    """

    def __init__(
        self,
        entry: Entry,
        mode: str,
        device: torch.device,
        path: str,
        transforms: Sequence[Any],
        deterministic: str = NOWHERE,
    ) -> None:
        self.trains = mode == TRAINING
        self._deterministic = deterministic
        model = made(entry, self.trains, device)
        if path == JIT:
            self.compiled: Any = thunder.jit(model, transforms=[*transforms])
            self.module: nn.Module = self.compiled
        else:
            from thunder.dynamo import thunderfx  # it is slow to import

            self.compiled = thunderfx(model, transforms=[*transforms])
            self.module = model
        self._sgd = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)

    def run(self, batch: Any) -> tuple[Any, Tensor | None]:
        """The output; in training, the loss as well, and gradients on the parameters."""
        with _deterministic(self._deterministic == EVERYWHERE):
            if not self.trains:
                with torch.no_grad():
                    return batch.call(self.compiled), None
            self._sgd.zero_grad()
            output = batch.call(self.compiled)
            loss = batch.loss(output)
            with _deterministic(self._deterministic != NOWHERE):
                loss.backward()
            return output, loss.detach()

    def results(self, batch: Any, seed: int) -> dict[str, Tensor]:
        """All that a step from this seed computes, by name."""
        torch.manual_seed(seed)
        output, loss = self.run(batch)
        found = {f"output {i}": t.detach() for i, t in enumerate(tree_leaves(_plain(output))) if isinstance(t, Tensor)}
        if not found:
            raise TypeError(f"a {type(output).__name__} came back, in which torch.utils._pytree finds no tensor")
        if loss is not None:
            found["loss"] = loss
            found |= {f"gradient of {n}": p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        return found | {f"buffer {n}": b for n, b in self.module.named_buffers()}

    def build_fast_paths(self) -> None:
        """Changes the weights by the gradients."""
        if self.trains:
            self._sgd.step()


def made(entry: Entry, trains: bool, device: torch.device) -> nn.Module:
    """The model, the same at each call: float32 and tiny on a CPU, bfloat16 and real on a GPU."""
    torch.manual_seed(SEED)
    small = device.type == "cpu"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if small else torch.bfloat16)
    try:
        with device:
            return entry.make(small).train(trains).to(device)
    finally:
        torch.set_default_dtype(before)


def batches(entry: Entry, mode: str, device: torch.device) -> Iterator[Any]:
    """Fresh inputs without end, all of one shape, the same ones at each call."""
    generator = torch.Generator().manual_seed(SEED)
    while True:
        with _seeded(int(torch.randint(2**31, (), generator=generator))):
            batch = entry.batch(device.type == "cpu", mode == TRAINING)
        yield _to(batch, device)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def _to(batch: Any, device: torch.device) -> Any:
    """On the device, as new tensors; floating point in the dtype of the model."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floats = value.is_floating_point() and device.type == "cuda"
        return value.to(device, torch.bfloat16 if floats else value.dtype, copy=True)

    return type(batch)(tree_map(moved, batch.args), tree_map(moved, batch.kwargs), moved(batch.labels))


def _plain(output: Any) -> Any:
    """An output that is a mapping, as a dict: packages register their own kinds with pytree or do not."""
    return {**output} if hasattr(output, "keys") else output


# ---------------------------------------------------------------------------------------------------------- the steps


def measure(
    entry: Entry,
    mode: str,
    device: torch.device,
    calls: int,
    ready: Callable[[Row], None] = lambda row: None,
    begins: Callable[[str], None] = lambda stage: None,
) -> Row:
    """The row of a model.

    Args:
        calls: synchronised steps in a turn, at most; on a CPU nothing is timed.
        ready: called before the timing, which nothing else on the machine should disturb, with what is known by then.
        begins: told what comes next, so that somebody knows in what a process died.
    """
    row = Row(entry.name, entry.package, mode)
    backend = "cuda" if device.type == "cuda" else "tape"
    try:
        row.path, row.not_jit = _path(entry, mode, device, begins)
        begins("with graphs")
        transforms = [cudagraph_transform(backend=backend)]
        pair = _Pair(entry, row, device, transforms, NOWHERE)
        difference = pair.difference()
        _fill(row, pair.reports, pair.breaks)
        row.agrees = _judged(entry, row, device, transforms, difference)
        if device.type == "cuda":
            batch = pair.settle()
            ready(copy.deepcopy(row))
            row.thunder_us, row.captured_us = pair.times(batch, calls)
    except Exception as error:
        row.failure = reason(error)
    return row


def _judged(entry: Entry, row: Row, device: torch.device, transforms: list[Any], difference: str) -> str:
    """`Row.agrees`, for what first differed. Where Thunder varies by itself, kernels that do not vary tell."""
    if not difference:
        return "yes"
    first = varies = _Pair(entry, row, device, [], NOWHERE).difference()
    for where in (BACKWARD, EVERYWHERE):
        if not varies:
            break
        try:
            difference = _Pair(entry, row, device, transforms, where).difference()
            if not difference:
                return f"yes: with deterministic algorithms {where}"
            varies = _Pair(entry, row, device, [], where).difference()
        except Exception:
            continue  # Thunder, or what Inductor has of the model, does not run so
        finally:
            _free(device)
    return f"Thunder varies: {first}" if varies else f"no: {difference}"


class ThunderError(Exception):
    """Uncaptured Thunder cannot run the model."""


def _path(entry: Entry, mode: str, device: torch.device, begins: Callable[[str], None]) -> tuple[str, str]:
    """How uncaptured Thunder runs the model, and why not through `thunder.jit` if it does not."""
    failures: list[str] = []
    for path in (JIT, FX):
        begins(f"in uncaptured {path}")
        try:
            Side(entry, mode, device, path, []).results(next(batches(entry, mode, device)), SEED)
            return path, "".join(failures)
        except Exception as error:
            failures.append(reason(error)[:140])
        finally:
            _forget(device)
    raise ThunderError(f"uncaptured, {JIT}: {failures[0]}; {FX}: {failures[1]}")


class _Pair:
    """Uncaptured Thunder beside a copy with other transforms, from the same weights on the same inputs."""

    def __init__(self, entry: Entry, row: Row, device: torch.device, transforms: list[Any], deterministic: str) -> None:
        self._sides = [Side(entry, row.mode, device, row.path, given, deterministic) for given in ([], transforms)]
        self._batches = [batches(entry, row.mode, device) for _ in self._sides]
        self._device = device
        self._explains = bool(transforms)
        self.reports: list[Report] = []  # before the last step and after it
        self.breaks: Counter[str] = Counter()

    def difference(self) -> str:
        """What first differs in a few steps, "" if nothing does."""
        plain, other = self._sides
        first = ""
        for step in range(STEPS):
            mine, others = (next(each) for each in self._batches)
            expected = plain.results(mine, SEED + step)
            if step == STEPS - 1:
                self._report()
            with _breaks() as breaks:
                found = other.results(others, SEED + step)
            self.breaks += breaks
            first = first or _first_difference(expected, found, step)
            plain.build_fast_paths()
            other.build_fast_paths()
        self._report()
        return first

    def _report(self) -> None:
        if self._explains:
            self.reports.append(explain(self._sides[1].compiled))

    def settle(self) -> Any:
        """Lets both run; returns the batch that they ran on."""
        batch = next(self._batches[0])
        for side in self._sides:
            for _ in range(STEPS):
                side.run(batch)
        torch.cuda.synchronize(self._device)
        _free(self._device)  # others have to fit beside it while it waits
        return batch

    def times(self, batch: Any, calls: int) -> tuple[float, float]:
        """Medians of synchronised steps, microseconds, of the two sides in turns."""
        samples: list[list[float]] = [[] for _ in self._sides]
        gc.collect()
        gc.disable()
        try:
            for _ in range(ROUNDS):
                for side, times in zip(self._sides, samples):
                    for _ in range(3):
                        side.run(batch)
                    torch.cuda.synchronize(self._device)
                    end = time.perf_counter() + TURN_SECONDS
                    for _ in range(calls):
                        start = time.perf_counter()
                        if start > end:
                            break
                        side.run(batch)
                        torch.cuda.synchronize(self._device)
                        times.append((time.perf_counter() - start) * 1e6)
        finally:
            gc.enable()
        return median(samples[0]), median(samples[1])


def _first_difference(expected: dict[str, Tensor], found: dict[str, Tensor], step: int) -> str:
    for name in expected.keys() | found.keys():
        if name not in expected or name not in found:
            return f"{name} of step {step} is only there {'with' if name in found else 'without'} graphs"
    for name, a in expected.items():
        b = found[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} of step {step} is {b.dtype} {tuple(b.shape)}, not {a.dtype} {tuple(a.shape)}"
        if not same_bits(a, b):
            return f"{name} of step {step}, by up to {float((a.double() - b.double()).abs().max()):.3g}"
    return ""


@contextmanager
def _breaks() -> Iterator[Counter[str]]:
    """What Dynamo could not trace meanwhile; its name for that depends on torch's version."""
    kinds = [torch._dynamo.utils.counters[name] for name in ("graph_break", "unimplemented")]
    for kind in kinds:
        kind.clear()
    found: Counter[str] = Counter()
    yield found
    for kind in kinds:
        found |= kind


# Note [Deterministic]
# Some kernels add in no fixed order, most of them in backwards. PyTorch's switch for that is guarded by Dynamo: some
# models that thunderfx compiles without it fail in Thunder with it, and what Inductor compiled without it refuses to
# run its backward with it. So a model is first run as it is, and where uncaptured Thunder then varies by itself, with
# the switch on for the backward alone, and else for all of the step.


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.deterministic = before[1]


def _forget(device: torch.device) -> None:
    """What Dynamo compiled, and memory."""
    torch._dynamo.reset()
    _free(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------- what became of it


def _fill(row: Row, reports: Sequence[Report], breaks: Counter[str]) -> None:
    """Counts what ran between the two reports: traces that earlier steps alone used are of no interest."""
    before, after = reports
    earlier = {_key(trace): trace for trace in before.traces}
    # Calls of a trace without regions are not counted: nothing of ours is in it.
    ran = [t for t in after.traces if not t.regions or t.calls > getattr(earlier.get(_key(t)), "calls", 0)]
    if not ran:
        raise RuntimeError("Thunder compiled nothing of the model, or nothing of it ran in the last step")
    left = Counter(_target(part.reason) for part in after.outside)
    row.captured = sum(trace.counts["capture"] for trace in ran)
    row.ops = row.captured + sum(trace.counts["eager"] for trace in ran) + left.total()
    row.graphs = len({trace.function for trace in ran})
    row.regions = sum(len(trace.regions) for trace in ran)
    lazy = [why for trace in ran for why in _not_replayed(earlier.get(_key(trace)), trace)]
    row.replayed = row.regions - len(lazy)
    eager = Counter((op.name, op.reason) for trace in ran for op in trace.ops if op.verdict == "eager")
    row.outside = [
        *(Outside(EAGER, name, count, why) for (name, why), count in eager.items()),
        *(Outside(INDUCTOR, what, count, why) for (what, why), count in left.items()),
        *(
            Outside(BREAK, why.splitlines()[0], count, why.partition("Hint:")[0].strip())
            for why, count in breaks.items()
        ),
        *(Outside(NOT_REPLAYED, "region", count, why) for why, count in Counter(lazy).items()),
    ]


def _key(trace: TraceReport) -> tuple[str, int, str]:
    return trace.function, trace.entry, trace.kind


def _not_replayed(before: TraceReport | None, after: TraceReport) -> Iterator[str]:
    """Why, for each region that did not replay since."""
    earlier = {region.name: region.replays for region in before.regions} if before else {}
    for region in after.regions:
        if region.replays <= earlier.get(region.name, 0):
            why = "; ".join(after.fallbacks) or "its trace ran without graphs"
            yield region.failure or why


_NODE = re.compile(r"(?P<before>.*?)node with name: \S+ and target: (?P<target><[^>]*>|[\w.]+)(?P<after>.*)", re.DOTALL)


def _target(split: str) -> tuple[str, str]:
    """The operator that thunderfx gave away, and why, of its "node with name: x and target: f only has ..."."""
    found = _NODE.match(split)
    if found is None:
        return "a part of the graph", split.strip()
    words = found["target"].strip("<>").split()
    name = next((b for a, b in pairwise(words) if a in ("method", "function")), words[0])
    return name, f"{found['before']}it{found['after']}".strip().rstrip(".")
