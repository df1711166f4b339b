"""Measures steps on several ranks: all variants of a case in turns, in one process for each rank and GPU.

Only ratios within one run count, not milliseconds.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial, wraps
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_cg.compat.torch_compile import dynamo_recompile_limit, keep_cublas_workspaces, optimize_ddp
from thunder_cg.compat.tracing import faster_tracing
from thunder_cg.runtime.ranks.agreement import Round
from thunder_cg.runtime.ranks.same_options import SameOptions
from thunder_cg.tools.bench.accuracy import bits
from thunder_cg.tools.bench.measure import ROUNDS, Contender, Samples, subject
from thunder_cg.tools.bench.parallel import COLLECTIVES_EAGER, TENSOR, RankSubject, prepare
from thunder_cg.tools.bench.rank_cases import RankCase
from thunder_cg.tools.bench.variants import GRAPHED_STEP, OURS, REDUCE_OVERHEAD, THUNDER, Prepared
from thunder_cg.tools.measuring import free_memory, frozen_objects, new_segments, p99
from thunder_cg.tools.turns import Turns
from thunder_cg.tools.workers import Supervisor, failure_text
from thunder_cg.verify.compare import same_bits

TURN_TIMEOUT = 90.0  # seconds after which a turn counts as hung; it takes about as many as `TURN_SECONDS`, twice
_VARIANT = ": "  # in what is reported, before the variant
_WITH_THUNDERS_KERNELS = (COLLECTIVES_EAGER, OURS, GRAPHED_STEP)  # and graphs


@dataclass(slots=True)
class RankRow:
    """One variant of one case on all ranks; where ranks differ, the number is the largest.

    Attributes:
        back_to_back_ms: per step of many, with one synchronization at the end; median of the turns.
        host_ms: until a step returns, the GPU idle when it begins; median.
        skew_p99_ms: between the first and the last rank's end of a step, each after a synchronization; p99.
        reserved_mb: the peak of the caching allocator in the first calls above what the model takes, 1e6 bytes, in
            `new_segments`.
        first_calls_s: preparation and the first calls: compilation, warm-up, capture. All variants of Thunder trace
            with `faster_tracing`.
        agreement_s: of these, what `thunder_cg` asks other ranks, with the time that a rank is there before them.
        steps: synchronized steps measured.
        bits: for thunder_cg, whether loss and gradients equal those of plain Thunder, as in `BenchmarkRow`.
        captured: for thunder_cg, the headline of its report.
        failure: why the variant did not run, "" if it did.
    """

    case: str
    variant: str
    back_to_back_ms: float = 0.0
    host_ms: float = 0.0
    skew_p99_ms: float = 0.0
    reserved_mb: float = 0.0
    first_calls_s: float = 0.0
    agreement_s: float = 0.0
    steps: int = 0
    bits: str = ""
    captured: str = ""
    failure: str = ""


@contextmanager
def _asking() -> Iterator[list[float]]:
    """Yields the seconds of each time that `thunder_cg` asks other ranks inside."""
    seconds: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        return call

    with patch.object(Round, "ask", timed(Round.ask)), patch.object(SameOptions, "check", timed(SameOptions.check)):
        yield seconds


@dataclass(slots=True)
class _RankSamples(Samples):
    agreement: float = 0.0  # as in `RankRow`
    bits: str = ""


def _contender(name: str, template: RankSubject, samples: _RankSamples) -> Contender:
    """The variant on this rank, prepared."""
    torch.manual_seed(dist.get_rank())
    # Parts of a DDP module, which Dynamo compiles apart by default, do not go together with reduce-overhead.
    with optimize_ddp(name != REDUCE_OVERHEAD), faster_tracing(), _asking() as asked, new_segments(template.device):
        own = replace(template, model=copy.deepcopy(template.model))
        contender = Contender(name, partial(prepare, name, own), template.device, samples)
    samples.agreement = sum(asked)
    return contender


def measure_case(
    case: RankCase, names: Sequence[str], steps: int, supervisor: Supervisor, turns: Turns
) -> list[RankRow]:
    """The rows of a case. To be called on each rank; each has a group, and reports to its supervisor.

    Args:
        turns: between those who measure other cases on this machine at the same time.
    """
    # What ranks say to each other stays out of NCCL's streams. They wait long where others have their turns.
    control = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert control is not None
    try:
        with dynamo_recompile_limit(64):
            return _Measurement(case, names, steps, supervisor, turns, control).run()
    finally:
        torch.compiler.reset()
        free_memory(case.device)


def under_way(stage: str, names: Sequence[str]) -> str | None:
    """The variant that a stage which `measure_case` reported is about."""
    return next((name for name in names if stage.endswith(f"{_VARIANT}{name}")), None)


class _Measurement:
    """All variants of a case on this rank. One that fails on any rank is left out on all from there on."""

    def __init__(
        self,
        case: RankCase,
        names: Sequence[str],
        steps: int,
        supervisor: Supervisor,
        turns: Turns,
        control: dist.ProcessGroup,
    ) -> None:
        self._case, self._names, self._steps = case, names, steps
        self._supervisor, self._turns, self._control = supervisor, turns, control
        self._template = _template(case)
        self._contenders: dict[str, Contender] = {}
        self._rows = {name: RankRow(case.name, name) for name in names}
        self._expected: list[list[Tensor]] = []  # of plain Thunder

    def run(self) -> list[RankRow]:
        # Inductor frees all cuBLAS workspaces when it records a graph, but graphs of other variants write to theirs.
        self._prepare([name for name in self._names if name == REDUCE_OVERHEAD])
        with keep_cublas_workspaces():
            self._prepare([name for name in self._names if name != REDUCE_OVERHEAD])
            self._expected.clear()
            with _on_all_ranks(self._turns.alone(), self._control), frozen_objects():
                for turn in range(ROUNDS):
                    for name in [*self._contenders]:
                        self._begin(f"turn {turn + 1} of {ROUNDS}{_VARIANT}{name}", TURN_TIMEOUT)
                        self._take_turn(name)
            self._supervisor.report(f"{self._case.name}: ending", ticks=0)  # which has no time-out
            for name, contender in self._contenders.items():
                _fill(self._rows[name], contender, self._control)
        return [*self._rows.values()]

    def _begin(self, stage: str, timeout: float = math.inf) -> None:
        self._stage = stage
        self._supervisor.report(f"{self._case.name}: {stage}", timeout=timeout)

    def _prepare(self, names: Sequence[str]) -> None:
        for name in names:
            self._begin(f"preparing{_VARIANT}{name}")
            with _on_all_ranks(self._turns.at_work(), self._control):
                self._try(name, partial(self._prepare_one, name))

    def _prepare_one(self, name: str) -> None:
        samples = _RankSamples()
        self._contenders[name] = contender = _contender(name, self._template, samples)
        samples.bits = _bits(contender, self._expected, self._control)

    def _take_turn(self, name: str) -> None:
        contender = self._contenders[name]
        if self._try(name, contender.warm_up):
            slowest = max(_everyone(contender.seconds, self._control))  # all ranks make as many steps
            contender.turn(self._steps, slowest, partial(dist.barrier, group=self._control))

    def _try(self, name: str, work: Callable[[], None]) -> bool:
        """Does something with a variant; leaves it out if that fails."""

        def said(failure: str) -> None:  # at once: the GPU of another rank may wait for this one for ever
            self._supervisor.report(f"{failure}, {self._stage}", ticks=0, timeout=TURN_TIMEOUT)

        self._rows[name].failure = failure = _failure(work, self._control, said)
        if failure:
            self._contenders.pop(name, None)
        return not failure


@contextmanager
def _on_all_ranks(turn: AbstractContextManager[None], control: dist.ProcessGroup) -> Iterator[None]:
    """A turn that the first rank takes for all."""
    with turn if dist.get_rank() == 0 else nullcontext():
        dist.barrier(group=control)
        yield
        dist.barrier(group=control)


def _failure(work: Callable[[], None], control: dist.ProcessGroup, said: Callable[[str], None]) -> str:
    """Does something on each rank. Returns which rank failed, and why; "" if none did. That rank tells ``said``."""
    failure = ""
    try:
        work()
    except Exception as error:
        said(failure := failure_text(error))
    return next((f"rank {i}: {each}" for i, each in enumerate(_everyone(failure, control)) if each), "")


def _template(case: RankCase) -> RankSubject:
    """The same model on each rank and, unless they compute together, other inputs."""
    made = subject(case.case, case.device)
    shift = 0 if case.parallel == TENSOR else dist.get_rank()
    inputs = tuple(t.roll(shift, -1).contiguous() for t in made.inputs)
    return RankSubject(case.case, made.model, inputs, case.parallel)


def _everyone(value: Any, control: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value, group=control)
    return found


def _bits(contender: Contender, expected: list[list[Tensor]], control: dist.ProcessGroup) -> str:
    """Compares with plain Thunder, whose results it keeps in `expected`. To be called on each rank."""
    results = partial(_results, contender.prepared)
    if contender.name == THUNDER:
        expected += [results(), results()]
    if contender.name not in _WITH_THUNDERS_KERNELS or not expected:
        return ""
    return bits(results(), expected, results, _same, lambda is_same: all(_everyone(is_same, control)))


def _results(prepared: Prepared) -> list[Tensor]:
    """The loss or the output of one more step, and its gradients on this rank."""
    found = [prepared.step(), *(p.grad for p in prepared.parameters if p.grad is not None)]
    return [tensor.detach().clone() for tensor in found]


def _same(found: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(found) == len(other) and all(map(same_bits, found, other))


def _fill(row: RankRow, contender: Contender, control: dist.ProcessGroup) -> None:
    ranks: list[_RankSamples] = _everyone(contender.samples, control)
    row.back_to_back_ms = max(median(rank.back_to_back) for rank in ranks) * 1e3
    row.host_ms = max(median(rank.host) for rank in ranks) * 1e3
    ends = zip(*(rank.ends for rank in ranks), strict=True)
    row.skew_p99_ms = p99([(max(each) - min(each)) * 1e3 for each in ends])
    row.reserved_mb = max(rank.reserved for rank in ranks)
    row.first_calls_s = max(rank.prepare + sum(rank.first_calls) for rank in ranks)
    row.agreement_s = max(rank.agreement for rank in ranks)
    row.steps = len(contender.samples.ends)
    said = {rank.bits for rank in ranks}
    row.bits = next((word for word in ("different", "other kernels", "thunder varies", "same") if word in said), "")
    row.failure = contender.why_never_replayed()
    if contender.name in _WITH_THUNDERS_KERNELS:
        row.captured = contender.headline()
