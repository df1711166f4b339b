"""The benchmark: a tiny case goes through all of it, what does not run says why, and the goals follow from the rows."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thunder_cg import __main__ as command_line
from thunder_cg.report.programs import locate
from thunder_cg.tools.bench import accuracy, measure
from thunder_cg.tools.bench.accuracy import Outcome
from thunder_cg.tools.bench.cases import MLP, SMALL_GPT, SWEEPS, Case, cases
from thunder_cg.tools.bench.goals import Goal, goals, growth
from thunder_cg.tools.bench.measure import CAPTURES, EVERY_VARIANT, ROUNDS, Contender, Row, measure_case, subject, ticks
from thunder_cg.tools.bench.models import Mlp, MlpWithItem, optional
from thunder_cg.tools.bench.plots import write_plots
from thunder_cg.tools.bench.processes import Task
from thunder_cg.tools.bench.processes import measured as measured_in_processes
from thunder_cg.tools.bench.progress import Progress
from thunder_cg.tools.bench.report import goals_table, sweeps, table
from thunder_cg.tools.bench.results import Point, Results, environment, results_for
from thunder_cg.tools.bench.variants import (
    EAGER,
    FLOOR,
    GRAPHED_CALLABLES,
    ON_CPU,
    OURS,
    THUNDER,
    VARIANTS,
    Prepared,
    Subject,
    variants,
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


def tiny(name: str = "tiny", trains: bool = False, model: Any = None, **more: Any) -> Case:
    model = model or (Loss if trains else lambda: Mlp(1, 4))
    return Case(name, model, lambda: (torch.ones(2, 4),), trains, torch.float32, **more)


def measured(case: Case, names: Any = ON_CPU, device: torch.device = CPU) -> dict[str, Row]:
    progress = Progress(ticks(names), io.StringIO())
    return {row.variant: row for row in measure_case(case, device, names, calls=2, progress=progress)}


@pytest.fixture
def results() -> Results:
    """Of a made-up machine with a GPU."""
    rows = [
        Row(MLP, THUNDER, 400.0, 500.0, 500.0, 600.0, 450.0, compile_s=9.0),
        Row(MLP, OURS, 25.0, 30.0, 110.0, 115.5, 105.0, compile_s=10.5, capture_ms=2.0, analysis_ms=500.0),
        Row(MLP, FLOOR, 4.0, 5.0, 100.0, 101.0, 100.0),
        Row(SMALL_GPT, OURS, failure="RuntimeError: no"),
        Row(SMALL_GPT, FLOOR, 20.0, 30.0, 300.0, 310.0, 300.0),
    ]
    points = [Point("parameter", n, v, t) for n in (2, 10, 100) for v, t in ((OURS, 30.0 + 0.5 * n), (FLOOR, 5.0))]
    return Results({"device": "a GPU", "backend": "cuda"}, rows, points)


# ------------------------------------------------------------------------------------------------------------ measuring


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


def test_captures_are_timed_when_nothing_else_runs() -> None:
    contender = Contender(OURS, subject(tiny(trains=True), CPU))
    contender.turn(2)

    def captures() -> list[int]:
        programs = [located.program for located in locate(contender.prepared.compiled).programs]
        return [region.stats.captures for program in programs for region in program.regions]

    assert captures() == [1, 1]
    row = contender.finish()
    assert captures() == [1 + CAPTURES] * 2 and row.capture_ms > 0


def test_a_case_that_is_not_exact_is_compared_with_eager() -> None:
    row = measured(tiny(exact=False), [EAGER])[EAGER]
    assert (row.reference, row.error) == ("eager", 0.0)


def test_a_variant_that_cannot_be_prepared_is_a_row_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject) -> Prepared:
        raise RuntimeError("no such thing\nwith details")

    monkeypatch.setitem(VARIANTS, THUNDER, broken)
    rows = measured(tiny())
    assert rows[THUNDER] == Row("tiny", THUNDER, failure="RuntimeError: no such thing")
    assert rows[EAGER].failure == rows[OURS].failure == ""


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


def test_slow_calls_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.0)
    progress = Progress(1, io.StringIO())
    (row,) = measure_case(tiny(), CPU, [EAGER], calls=50, progress=progress)
    assert row.samples == ROUNDS * measure.FEWEST_CALLS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_of_cases_differ(device: str) -> None:
    for quick in (False, True):
        names = [case.name for case in cases(torch.device(device), quick)]
        assert names and len({*names}) == len(names)
    assert variants(torch.device(device))[-1] == (FLOOR if device == "cuda" else OURS)


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.unit)
def test_sweeps_grow_what_they_say(sweep: Any) -> None:
    for size in (1, 7):
        case = sweep.case(size)
        model, inputs = case.model(), case.inputs()
        assert model(*inputs).isfinite().all()
        counted = {"parameter": len([*model.parameters()]), "input": len(inputs), "layer": getattr(model, "times", 0)}
        assert counted[sweep.unit] == size


# ------------------------------------------------------------------------------------------------------------- accuracy


def test_errors_are_relative_to_the_largest_value() -> None:
    exact = Outcome({"a": torch.tensor([100.0, 1.0])}, {"b": torch.tensor([2.0]), "c": torch.tensor([0.0])})
    found = Outcome({"a": torch.tensor([100.0, 2.0])}, {"b": torch.tensor([2.0]), "c": torch.tensor([0.1])})
    assert accuracy.relative_error(found, exact) == pytest.approx(0.05)
    assert accuracy.same(exact, exact) and not accuracy.same(found, exact)


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"a": torch.ones(3)}, r"a has the shape \(3,\), not \(2,\)"),
        ({"z": torch.ones(2)}, "only one of the two has a, z"),
    ],
)
def test_results_that_cannot_be_compared_say_why(outputs: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        accuracy.relative_error(Outcome(outputs, {}), Outcome({"a": torch.ones(2)}, {}))


# ------------------------------------------------------------------------------------------------------- goals, report


def test_goals_follow_from_the_rows(results: Results) -> None:
    found = {goal.name: (round(goal.found, 3), goal.met) for goal in goals(results)}
    assert found == {
        f"end to end over the hand-made graph, {MLP}": (1.1, True),
        f"host time over the hand-made graph, {MLP}": (21.0, False),
        f"end to end, p99 over p50, {MLP}": (1.05, True),
        "host time over the hand-made graph, per parameter": (0.5, False),
        f"capture over an uncaptured call, at worst: {MLP}": (4.0, False),
        f"analysis over the rest of the compilation, at worst: {MLP}": (0.05, True),
    }


def test_the_tape_is_no_measure_of_a_capture(results: Results) -> None:
    results.environment["backend"] = "tape"
    assert not any(goal.name.startswith("capture") for goal in goals(results))


def test_growth_needs_two_sizes_with_the_hand_made_graph(results: Results) -> None:
    assert growth(results, "parameter") == pytest.approx(0.5)
    assert growth(results, "layer") is None
    results.points = [p for p in results.points if p.variant == OURS or p.size == 2]
    assert growth(results, "parameter") is None


def test_tables(results: Results) -> None:
    text = table(results.rows)
    assert text.count("| variant |") == 2
    assert "| thunder_cg | 25 / 30 | 110 / 116 | 105 |" in text
    assert "| thunder_cg | RuntimeError: no |" in text
    assert "| thunder_cg | 31 | 35 | 80 |" in sweeps(results)
    assert "+0.500 us per parameter" in sweeps(results)
    goal = Goal("small", 1.1, 1.25, "x")
    assert "| small | 1.1 x | 1.25 x | NO |" in goals_table([goal])


def test_results_are_read_as_they_were_written_and_added_to(tmp_path: Path, results: Results) -> None:
    results.environment = environment(CPU)
    file = tmp_path / "new" / "results.json"
    results.write(file, [{"name": "goal"}])
    found = results_for(file, CPU)
    assert found == results
    found.add([Row(MLP, OURS, 1.0)])
    found.add_points([Point("parameter", 3, OURS, 1.0)])
    assert [(row.case, row.host_p50) for row in found.rows] == [(SMALL_GPT, 0.0), (SMALL_GPT, 20.0), (MLP, 1.0)]
    assert found.points == [Point("parameter", 3, OURS, 1.0)]


def test_results_from_elsewhere_are_refused(tmp_path: Path, results: Results) -> None:
    file = tmp_path / "results.json"
    results.write(file, [])
    with pytest.raises(ValueError, match=r"was measured with device a GPU, here it is .*; name another file"):
        results_for(file, CPU)
    file.write_text('{"rows": 1}')
    with pytest.raises(ValueError, match="does not hold results of this benchmark"):
        results_for(file, CPU)


def test_plots(tmp_path: Path, results: Results) -> None:
    pytest.importorskip("matplotlib")
    written = write_plots(results, tmp_path / "plots")
    assert [path.name for path in written] == ["end_to_end.svg", "host_time.svg"]
    assert all("<svg" in path.read_text() for path in written)
    assert write_plots(Results({}), tmp_path) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_a_bar_on_a_terminal_and_writes_lines_elsewhere() -> None:
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = Progress(4, stream)
        progress.tick("a: turn 1")
        progress.tick("a: turn 2")
        progress.tick("b", 2)
        progress.clear()
    assert f"[{'#' * 12}{' ' * 12}] 2/4" in terminal.getvalue() and "\n" not in terminal.getvalue()
    assert [line.split(" ", 2)[2] for line in plain.getvalue().splitlines()] == ["a: turn 1", "b"]


# --------------------------------------------------------------------------------------------------------- command line


def test_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    words = ["bench", "--device", "cpu", "--quick", "--calls", "1", "--json", str(file), "--only"]
    assert command_line.main([*words, "MLP, 4"]) == 0
    assert command_line.main([*words, "sweep over inputs"]) == 0
    printed = capsys.readouterr().out
    assert "**MLP, 4 layers** (errors against float64)" in printed and "by number of inputs" in printed
    content = json.loads(file.read_text())
    assert [row["variant"] for row in content["rows"]] == [*ON_CPU]
    assert {point["variant"] for point in content["sweep"]} == {THUNDER, OURS}
    assert content["environment"]["torch"] == torch.__version__


def test_cases_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    words = ["bench", "--device", "cpu", "--quick", "--calls", "1", "--jobs", "2", "--json", str(file), "--only"]
    assert command_line.main([*words, "sweep over inputs"]) == 0
    assert "by number of inputs" in capsys.readouterr().out
    points = json.loads(file.read_text())["sweep"]
    assert {(point["size"], point["variant"]) for point in points} == {(n, v) for n in (1, 5) for v in (THUNDER, OURS)}
    assert all(point["host_p50"] > 0 and not point["failure"] for point in points)


def _ends(how: str, progress: Progress, ready: Any) -> list[Row]:
    progress.tick("preparing what breaks")
    if how == "early":
        os.write(2, b"out of luck\n")
        os.abort()
    ready()
    progress.tick("timing what breaks")
    if how == "late":
        os._exit(3)
    return [Row(how, OURS, 1.0)]


def test_a_process_that_dies_is_a_row_that_says_when() -> None:
    tasks = [Task(how, 2, _ends, (how,)) for how in ("early", "late", "never")]
    rows = {task.name: rows for task, rows in measured_in_processes(tasks, 2, Progress(6, io.StringIO()))}
    assert rows["never"] == [Row("never", OURS, 1.0)]
    said, _, where = rows["early"][0].failure.partition(": File ")
    assert said == "the process ended with status -6, preparing what breaks: out of luck" and "in _ends" in where
    assert rows["late"][0].failure == "the process ended with status 3, timing what breaks"


def test_command_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["bench", "--device", "cpu", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "GPT decode, 2 layers" in listed and listed[-3:] == [sweep.name for sweep in SWEEPS]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "--only nothing: no case has that in its name; --list shows all"),
        (["--calls", "0"], "argument --calls: 0: give 1 or more"),
        (["--plots", "x"], "matplotlib is not installed; pip install matplotlib, or 'thunder-cg[bench]'"),
    ],
)
def test_command_refuses_at_once(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as left:
        command_line.main(["bench", "--device", "cpu", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err
