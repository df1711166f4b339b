"""`explain(step)` names all lines at once that do what no replay does, not one in each run."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import thunder
import torch
from torch import nn

from thunder_cg import explain, graphed_step
from thunder_cg.report import MemoryReport, StepReport
from thunder_cg.report.step_lines import unreplayed

ROWS = iter([torch.ones(2, 4)] * 8)
times: list[float] = []


def reads_and_prints(net: nn.Module) -> torch.Tensor:
    x = next(ROWS)
    if random.random() > 2:
        x = x + 1
    loss = net(x).sum()
    times.append(time.time() * float(loss))
    print(loss.item(), loss.detach().numpy(), float("inf"))
    return loss


def prints(x: torch.Tensor) -> torch.Tensor:
    print(float(3))
    return x.sin() * 2


def test_lines_of_a_step_that_do_what_no_replay_does(transform, backend, device) -> None:
    first = reads_and_prints.__code__.co_firstlineno
    said = {int(place.partition(":")[2]) - first: what for place, what in unreplayed(reads_and_prints).items()}
    assert said == {
        1: ("next()",),
        2: ("random()",),
        5: ("time()", "float() of a tensor"),
        6: ("print()", "item()", "numpy()", "float() of a tensor"),
    }
    assert unreplayed(partial(reads_and_prints, None)) == {} and unreplayed(torch.sin) == {}

    net = thunder.jit(nn.Linear(4, 4).to(device), transforms=[transform()])
    step = graphed_step(lambda: reads_and_prints(net), backend=backend)
    assert "What no replay does" not in str(explain(step)), "only the step's own lines are looked at"
    report = explain(graphed_step(reads_and_prints, backend=backend))
    assert f"What no replay does:\n  next() at test_step_lines.py:{first + 1}\n  random() at" in str(report)


def test_a_step_that_replays_names_what_it_prints(backend, device, tmp_path) -> None:
    step = graphed_step(prints, backend=backend)
    for _ in range(4):
        step(torch.ones(3, device=device))
    report = explain(step)
    line = f"\nWhat no replay does:\n  print() at test_step_lines.py:{prints.__code__.co_firstlineno + 1}\n"
    assert report.replays and line in str(report)
    assert "What no replay does" not in str(replace(report, unreplayed={"train.py:3": ("float() of a tensor",)}))
    report.save(tmp_path / "step.json")
    assert StepReport.load(tmp_path / "step.json") == report


def test_both_values_of_a_change_are_whole(backend, device) -> None:
    step = graphed_step(lambda x: x * 2, backend=backend)
    for size in (6, 6, 3):
        step(torch.ones(size, 8, device=device))
    assert "from (6, 8) to (3, 8)" in str(explain(step))


def test_a_page_breaks_lines_and_nothing_else_does(tmp_path: Path) -> None:
    reason = f"x changed from 1 to 2 (see a.py:3), in each step; {'write it in place ' * 9}now"
    report = StepReport("step", 3, 0, 0, {reason: 3}, MemoryReport())
    page = report._repr_html_()
    assert f'<div style="margin-left: min(6ch, 25%)">{"write it in place " * 9}now</div>' in page
    assert [line for line in str(report).splitlines() if "in place" in line] == [f"      {'write it in place ' * 9}now"]
    report.save(tmp_path / "step.txt")
    assert max(map(len, (tmp_path / "step.txt").read_text().splitlines())) <= 80
