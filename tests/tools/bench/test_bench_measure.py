"""A tiny case is measured under every variant, and a variant that fails has a row with the reason."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from thunder_cg.progress import Progress
from thunder_cg.report.programs import locate
from thunder_cg.tools.bench import measure
from thunder_cg.tools.bench.cases import BenchmarkCase
from thunder_cg.tools.bench.measure import (
    CAPTURES,
    EVERY_VARIANT,
    ROUNDS,
    BenchmarkRow,
    measure_case,
    of_subject,
    subject,
    ticks,
)
from thunder_cg.tools.bench.models import Mlp, MlpWithItem, optional
from thunder_cg.tools.bench.report import table
from thunder_cg.tools.bench.variants import (
    EAGER,
    FLOOR,
    GRAPHED_CALLABLES,
    GRAPHED_STEP,
    ON_CPU,
    OURS,
    THUNDER,
    VARIANTS,
    Prepared,
    Subject,
)

CPU = torch.device("cpu")


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)).square().sum()


class ReadsItsInput(Loss):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


def tiny(name: str = "tiny", trains: bool = False, model: Any = None, **more: Any) -> BenchmarkCase:
    model = model or (Loss if trains else lambda: Mlp(1, 4))
    return BenchmarkCase(name, model, lambda: (torch.ones(2, 4),), trains, torch.float32, **more)


def measured(case: BenchmarkCase, names: Any = ON_CPU, device: torch.device = CPU) -> dict[str, BenchmarkRow]:
    progress = Progress(ticks(names), io.StringIO())
    return {row.variant: row for row in measure_case(case, device, names, calls=2, progress=progress)}


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_a_case_is_measured_under_every_variant(trains: bool) -> None:
    rows = measured(tiny(trains=trains))
    assert [*rows] == [EAGER, THUNDER, OURS]
    for row in rows.values():
        assert row.failure == ""
        assert 0 < row.host_p50 <= row.end_to_end_p50 <= row.end_to_end_p99 and row.host_p50 <= row.host_p99
        assert row.back_to_back > 0 and row.per_second == pytest.approx(1e6 / row.back_to_back)
        assert row.samples == 2 * ROUNDS and len(row.first_calls_ms) == 3 and row.compile_s > 0
        assert row.reference == "float64" and row.error is not None and 0 <= row.error < 1e-5
    assert rows[OURS].bits == "same" and rows[OURS].analysis_ms > 0
    assert "ops eager" in rows[OURS].captured
    assert rows[THUNDER].bits == rows[THUNDER].captured == ""


@pytest.mark.parametrize(("wrong", "said"), [(THUNDER, "other kernels"), (OURS, "different")])
@pytest.mark.nightly_after(1)
def test_bits_that_differ(wrong: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where plain Thunder is compiled to other kernels, graphs are right; where two calls with graphs differ, not."""
    right, calls = VARIANTS[wrong], itertools.count()

    def off(subject: Subject) -> Prepared:
        prepared = right(subject)
        return replace(prepared, step=lambda: prepared.step() + (next(calls) if wrong == OURS else 1))

    monkeypatch.setitem(VARIANTS, wrong, off)
    assert measured(tiny(trains=True))[OURS].bits == said


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:graphed_step.step. runs in Python")
def test_a_step_that_is_never_replayed_has_no_time() -> None:
    row = measured(tiny(trains=True, model=ReadsItsInput, steps=True), [GRAPHED_STEP])[GRAPHED_STEP]
    assert row.failure.startswith("0 of ") and "host" in row.failure, row.failure
    assert row.failure in table([row])


@pytest.mark.nightly
def test_a_case_whose_sizes_differ_has_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setitem(VARIANTS, EAGER, lambda subject: Prepared(lambda: calls.append(None)))
    of_subject(EAGER, subject(tiny(later_calls=5), CPU))
    assert len(calls) == measure.FIRST_CALLS + 5
    monkeypatch.setattr(measure, "LATER_CALLS_SECONDS", 0.0)
    of_subject(EAGER, subject(tiny(later_calls=5), CPU))
    assert len(calls) == 2 * measure.FIRST_CALLS + 5


def test_captures_are_timed_when_nothing_else_runs() -> None:
    contender = of_subject(OURS, subject(tiny(trains=True), CPU))

    def captures() -> list[int]:
        programs = [located.program for located in locate(contender.prepared.compiled).programs]
        return [region.stats.captures for program in programs for region in program.regions]

    assert captures() == [1, 1]
    times = measure.captures(contender)
    assert captures() == [1 + CAPTURES] * 2 and len(times) == CAPTURES and min(times) > 0


@pytest.mark.nightly
def test_a_case_that_is_not_exact_is_compared_with_eager() -> None:
    row = measured(tiny(exact=False), [EAGER])[EAGER]
    assert (row.reference, row.error) == ("eager", 0.0)


@pytest.mark.nightly
def test_a_variant_that_cannot_be_prepared_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject) -> Prepared:
        raise RuntimeError("no such thing\nwith details")

    monkeypatch.setitem(VARIANTS, THUNDER, broken)
    rows = measured(tiny())
    assert rows[THUNDER] == BenchmarkRow("tiny", THUNDER, failure="RuntimeError: no such thing")
    assert rows[EAGER].failure == rows[OURS].failure == ""


@pytest.mark.nightly
def test_a_variant_that_breaks_later_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(range(10))

    def step() -> torch.Tensor:
        next(left)
        return torch.ones(2, 4)

    monkeypatch.setitem(VARIANTS, THUNDER, lambda subject: Prepared(step))
    rows = measured(tiny(), [EAGER, THUNDER])
    assert rows[THUNDER].failure == "StopIteration" and rows[EAGER].samples == 2 * ROUNDS


def test_a_model_that_cannot_be_made_is_one_row() -> None:
    rows = measured(tiny(model=lambda: optional("no_such_package.part")))
    (row,) = rows.values()
    assert row.variant == EVERY_VARIANT
    assert "no_such_package is not installed; pip install no_such_package, or" in row.failure
    assert row.failure in table([row])


@on_gpu
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_every_variant_runs_on_a_gpu(trains: bool) -> None:
    rows = measured(tiny(trains=trains), [*VARIANTS], torch.device("cuda"))
    assert [row for row in rows.values() if row.failure or row.error is None or row.error > 1e-3] == []
    assert rows[OURS].bits == "same"
    assert rows[FLOOR].host_p50 < rows[THUNDER].host_p50


@on_gpu
def test_a_capture_that_fails_leaves_the_process_as_it_was() -> None:
    names, cuda = [GRAPHED_CALLABLES, FLOOR], torch.device("cuda")
    stream = torch.cuda.current_stream()
    for row in measured(tiny(model=lambda: MlpWithItem(2, 4)), names, cuda).values():
        assert "captur" in row.failure
    assert torch.cuda.current_stream() == stream
    torch.rand(1, device="cuda")
    assert not any(row.failure for row in measured(tiny(), names, cuda).values())


@pytest.mark.nightly
def test_slow_calls_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.0)
    progress = Progress(1, io.StringIO())
    (row,) = measure_case(tiny(), CPU, [EAGER], calls=50, progress=progress)
    assert row.samples == ROUNDS * measure.FEWEST_CALLS
