"""Random programs under random call patterns: what a user can see is what uncaptured Thunder shows, bit for bit.

What counts as an example is a pattern: some calls, backwards, optimizer steps and interferences, of which ten or so run
one after another on each program that is compiled. Each commit takes the same few. Nightly, and before a release, take
others and more of them, on a machine with ``N`` cores, and with and without a GPU (10,000 take about 100 minutes of one
core; what fails prints its seed and a script that shows it)::

    pytest tests/programs --programs 10000 -n N -rP
"""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Mismatch, check, reproduction
from language import Backward, Call, Example, Gene, Variant, program
from operators import Operators
from strategies import examples, run
from support import fast_path_calls, replays

from thunder_cg import cudagraph_transform
from thunder_cg.runtime.outputs import Outputs, _Copy
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.tape import TapeGraph

# Programs are compared with Thunder, whose gradients of some are wrong.
pytestmark = pytest.mark.filterwarnings("ignore:Thunder computes another gradient")

PARTS = 4  # which run in parallel
CI = 96  # patterns, at least, if nobody asks for more
PATTERNS = 12, 20  # least and most for a program


@pytest.fixture(scope="module")
def operators() -> Iterator[Operators]:
    made = Operators()
    yield made
    made.close()


@pytest.mark.nightly_after(1)
@pytest.mark.usefixtures("deterministic", "each_leaves_alone")
@pytest.mark.parametrize("part", range(PARTS))
def test_programs(
    part: int, operators: Operators, device: str, transform: Callable[..., Any], pytestconfig: pytest.Config
) -> None:
    asked = pytestconfig.getoption("--programs")
    start = part if asked is None else random.SystemRandom().randrange(1 << 32)
    wanted = max(1, (CI if asked is None else asked) // PARTS // PATTERNS[0])  # programs
    counts: Counter[str] = Counter()

    def agrees(example: Example) -> None:
        try:
            pair = check(example, operators, device, transform(deny=example.deny))
        except Mismatch as error:
            print(error)  # after an error of the device, hypothesis can make no example again, and only says so
            raise
        counts.update(pair.counts)
        counts["programs"] += 1
        counts["without a call"] += not pair.counts["calls"]
        counts["replays"] += replays(pair.graphed.module)
        counts["around the dispatch"] += fast_path_calls(pair.graphed.module)

    run(examples(operators.eager, *PATTERNS), agrees, wanted, start, shrinks=asked is not None)
    print(f"seed {start}: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    least = 5 if device == "cpu" else 3  # on a GPU, Thunder's own assertions end more of them
    assert counts["patterns"] >= least * wanted and counts["replays"] > counts["calls"] / 4
    assert counts["without a call"] <= max(2, wanted // 3), "most of what is generated ought to run"


def forgets_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    init = RegionGraph.__init__
    monkeypatch.setattr(RegionGraph, "__init__", lambda self, copied, written, *rest: init(self, copied, (), *rest))


def draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = TapeGraph.replay

    def without_drawing(*args: Any) -> None:
        with torch.random.fork_rng(devices=()):
            replay(*args)

    monkeypatch.setattr(TapeGraph, "replay", without_drawing)


def hands_out_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = _Copy.allocate

    def allocate(self: _Copy, results: list[Any]) -> torch.Tensor:
        copy(self, results)
        results[self.result] = self.source
        return torch.empty_like(self.source)

    monkeypatch.setattr(Outputs, "allocate", lambda self, results: [allocate(c, results) for c in self._copies])


def example(operators: Operators, *lines: str) -> Example:
    """These lines, called often enough to replay, and to go around Thunder's dispatch."""
    body = program(1, [Gene(line) for line in lines], range(len(lines)), operators.eager)
    return Example(body, (Variant(),), ((*(Call(seed=i) for i in range(5)), Backward()),))


@pytest.mark.parametrize("plant", [forgets_writes, draws_nothing, hands_out_the_arena])
@pytest.mark.nightly_after(2)
def test_planted_bugs_are_found(
    plant: Callable[..., None], operators: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = example(operators, "{a}.mul_({k})", "{r} = torch.rand_like({a})", "{r} = torch.tanh({a})")
    check(planted, operators, "cpu", cudagraph_transform(backend="tape"))
    plant(monkeypatch)
    with pytest.raises(Mismatch, match=r"class Module\(nn\.Module\)"):
        check(planted, operators, "cpu", cudagraph_transform(backend="tape", debug=True))


@pytest.mark.nightly
def test_reproduction_is_a_script(operators: Operators, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = example(operators, "{a}.mul_({k})", "{r} = ops.note({a})", "{r} = torch.tanh({a})")
    script = tmp_path / "reproduction.py"
    script.write_text(reproduction(shown, "cpu"), encoding="utf-8")
    tests = Path(__file__).parents[1]
    paths = [*map(str, (tests.parent, tests / "programs")), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(TapeGraph, "replay", lambda *args: None)
    with pytest.raises(Mismatch):
        runpy.run_path(str(script), run_name="__main__")
