"""Random training loops with their step graphed: what a user can see is what the plain loop shows, bit for bit.

Nightly, and before a release, take more of them (1,000 take about 10 minutes of one core)::

    pytest tests/programs/test_random_steps.py --programs 1000 -rP
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import strategies
import torch
from support import same
from torch.optim import Optimizer
from training import Training, run, trainings

from thunder_cg import graphed_step
from thunder_cg.step.calls import _Ran

CI = 3


def graphed(fn: Any, model: torch.nn.Module, optimizer: Optimizer) -> Any:
    return graphed_step(fn, modules=[model], optimizers=[optimizer], backend="tape")


def agree(training: Training, folder: Path) -> Any:
    expected, _ = run(training, folder, lambda fn, *_: fn)
    found, step = run(training, folder, graphed)
    try:
        same(found, expected)
    except AssertionError as error:
        raise AssertionError(f"{training}\n{error}") from error
    return step


@pytest.mark.filterwarnings("ignore")
def test_random_steps(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    asked, counts = pytestconfig.getoption("--programs"), Counter[str]()
    start = 0 if asked is None else random.SystemRandom().randrange(1 << 32)

    def check(training: Training) -> None:
        step = agree(training, tmp_path)
        counts.update(loops=1, captures=step.captures, replays=step.replays)

    strategies.run(trainings, check, CI if asked is None else asked, start, shrinks=asked is not None)
    print(f"seed {start}: {dict(counts)}")
    assert counts["captures"] > counts["loops"] / 4 and counts["replays"] > counts["loops"], counts


@pytest.mark.filterwarnings("ignore")
def test_a_function_that_is_not_found_makes_a_random_step_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "opt.zero_grad()",
        'functions["count"]()',
        "out = model(x); loss = cross_entropy(out, y)",
        "loss.backward()",
        "return loss",
    )
    counts = Training("SGD(model.parameters(), lr=0.1)", lines, (((), "x, y"),) * 9)
    assert agree(counts, tmp_path).replays
    monkeypatch.setattr(_Ran, "functions", lambda *_: [])
    with pytest.raises(AssertionError, match="functions"):
        agree(counts, tmp_path)
