"""The command measures and writes; a process that dies is a row that says when."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from thunder_cg import __main__ as command_line
from thunder_cg.progress import Progress
from thunder_cg.tools.bench.cases import SCALING
from thunder_cg.tools.bench.measure import BenchmarkRow
from thunder_cg.tools.bench.run import BenchmarkTask, measure_in_processes
from thunder_cg.tools.bench.variants import ON_CPU, OURS, THUNDER


@pytest.mark.nightly
@pytest.mark.usefixtures("forked_workers")
def test_command_measures_and_adds_to_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First a case in this process, then a scaling series with each size in a process of its own."""
    file = tmp_path / "results.json"
    words = ["bench", "--device", "cpu", "--quick", "--calls", "1", "--json", str(file)]
    assert command_line.main([*words, "--only", "MLP, 4"]) == 0
    assert "**MLP, 4 layers** (errors against float64)" in capsys.readouterr().out
    assert command_line.main([*words, "--only", "scaling with inputs", "--jobs", "2"]) == 0
    assert "by number of inputs" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert [row["variant"] for row in content["rows"]] == [*ON_CPU]
    points = content["sweep"]
    assert {(point["size"], point["variant"]) for point in points} == {(n, v) for n in (1, 5) for v in (THUNDER, OURS)}
    assert all(point["host_p50"] > 0 and not point["failure"] for point in points)
    assert content["environment"]["torch"] == torch.__version__


def _ends(how: str, progress: Progress, ready: Any) -> list[BenchmarkRow]:
    progress.tick("preparing what breaks")
    if how == "early":
        os.write(2, b"out of luck\n")
        os.abort()
    ready()
    progress.tick("timing what breaks")
    if how == "late":
        os._exit(3)
    return [BenchmarkRow(how, OURS, 1.0)]


@pytest.mark.usefixtures("forked_workers")
def test_a_process_that_dies_is_a_row_that_says_when() -> None:
    tasks = [BenchmarkTask(how, 2, _ends, (how,)) for how in ("early", "late", "never")]
    rows = {task.name: rows for task, rows in measure_in_processes(tasks, 2, Progress(6, io.StringIO()))}
    assert rows["never"] == [BenchmarkRow("never", OURS, 1.0)]
    said, _, where = rows["early"][0].failure.partition(": File ")
    assert said == "the process ended with status -6, preparing what breaks: out of luck" and "in _ends" in where
    assert rows["late"][0].failure == "the process ended with status 3, timing what breaks"


def test_command_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["bench", "--device", "cpu", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "GPT decode, 2 layers" in listed and listed[-3:] == [series.name for series in SCALING]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "nothing"], "no case has 'nothing' in its name; --list shows all"),
        (["--only", "no such", "nothing"], "no case has 'no such' or 'nothing' in its name; --list shows all"),
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
