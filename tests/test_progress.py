"""A bar on a terminal, lines in a file; and one line of a terminal that says what a long first call is busy with."""

from __future__ import annotations

import io
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from models import mlp
from support import on_threads
from torch import nn

import thunder_cg
from thunder_cg import cudagraph_transform, progress
from thunder_cg.dynamo import compiler
from thunder_cg.progress import Progress, Stage
from thunder_cg.tools.arguments import interruptible


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        super().isatty()  # raises if the stream is closed
        return True

    def lines(self) -> list[str]:
        """What the line has shown, without what is shown twice in a row; "" where it was erased."""
        found = [text.rstrip() for text in self.getvalue().split("\r")[1::2]]
        return [text for text, before in zip(found, ["", *found]) if text != before]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 3
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A clock whose `now` the test moves."""
    found = SimpleNamespace(now=100.0)
    read = lambda: found.now  # noqa: E731
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=read, monotonic=read, sleep=time.sleep))
    monkeypatch.setattr(progress, "EVERY", 0.001)
    yield found
    wait_for(lambda: progress._line._thread is None)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> Terminal:
    """Standard error, which somebody looks at."""
    for name in ("TQDM_DISABLE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))  # pytest changes `sys.stderr` itself
    return found


# ------------------------------------------------------------------------------------------------------------- the bar


def test_progress_draws_a_bar_on_a_terminal_and_writes_lines_elsewhere() -> None:
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        progress = Progress(4, stream)
        progress.tick("a: turn 1")
        progress.tick("a: turn 2")
        progress.tick("c", 0)  # nothing is shown
        progress.tick("b", 2)
        progress.show("d")
        progress.clear()
    assert f"[{'#' * 12}{' ' * 12}] 2/4" in terminal.getvalue() and "\n" not in terminal.getvalue()
    assert [line.split(" ", 2)[2] for line in plain.getvalue().splitlines()] == ["a: turn 1", "b", "d"]


def test_bar_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps would leave its first part behind."""
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    progress = Progress(4, terminal)
    progress.tick("a long stage " * 9)
    progress.clear()
    _, bar, _, blank, end = terminal.getvalue().split("\r")
    assert len(bar) == len(blank) == 59 and "1/4" in bar
    assert not blank.strip() and not end


def test_an_interrupted_command_removes_its_bar(terminal: Terminal) -> None:
    def interrupted(argv: object) -> int:
        Progress(4).tick("a")
        raise KeyboardInterrupt

    assert interruptible(interrupted, []) == 130
    bar, rest = terminal.lines()
    assert "1/4" in bar and not rest


# -------------------------------------------------------------------------------------------------------------- stages


def test_a_stage_is_shown_after_two_seconds_and_removed_at_its_end(terminal: Terminal, clock: SimpleNamespace) -> None:
    with Stage(lambda: "compiling"):
        clock.now += 1.9
        time.sleep(0.01)  # the thread looks several times
        assert terminal.getvalue() == ""
        clock.now += 0.2
        wait_for(lambda: terminal.lines() == ["compiling, 2 s"])
        with Stage(lambda: "capturing", began=clock.now - 1):
            assert terminal.lines()[-1] == "capturing, 1 s"
        clock.now += 9
        wait_for(lambda: terminal.lines()[-1] == "compiling, 11 s")
    assert terminal.lines() == ["compiling, 2 s", "capturing, 1 s", "compiling, 11 s", ""]
    assert "\n" not in terminal.getvalue() and terminal.getvalue().endswith("\r")


def test_a_stage_ends_when_its_body_raises(terminal: Terminal, clock: SimpleNamespace) -> None:
    with pytest.raises(KeyboardInterrupt), Stage(lambda: "compiling"), Stage(lambda: "capturing", clock.now - 3):
        raise KeyboardInterrupt
    assert terminal.lines() == ["capturing, 3 s", ""]


@pytest.mark.parametrize(
    "hide",
    [
        lambda patch: patch.setattr(progress.sys, "stderr", io.StringIO()),
        lambda patch: patch.setattr(progress.sys, "stderr", None),
        lambda patch: progress.sys.stderr.close(),
        lambda patch: patch.setenv("TERM", "dumb"),
        lambda patch: patch.setenv("TQDM_DISABLE", "1"),
        lambda patch: patch.setenv("RANK", "1"),
        lambda patch: patch.setenv("LOCAL_RANK", "1"),
        lambda patch: patch.setattr(multiprocessing, "parent_process", object),
    ],
    ids=["no terminal", "no stderr", "closed", "dumb", "switched off", "rank", "local rank", "child process"],
)
def test_nothing_is_shown_where_nobody_looks(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, hide: Callable[[pytest.MonkeyPatch], None]
) -> None:
    hide(monkeypatch)
    with Stage(lambda: "compiling", began=0.0):
        assert progress._line._thread is None and not progress.is_shown(0.0)
    streams = [each for each in (terminal, progress.sys.stderr) if each is not None and not each.closed]
    assert [each.getvalue() for each in streams] == [""] * len(streams)


def test_a_stream_that_is_closed_meanwhile_breaks_nothing(terminal: Terminal, clock: SimpleNamespace) -> None:
    with Stage(lambda: "compiling", began=clock.now - 3):
        assert terminal.lines() == ["compiling, 3 s"]
        terminal.close()
        clock.now += 1
        time.sleep(0.01)
        assert progress._line._thread is not None and progress._line._thread.is_alive()


def test_a_process_without_another_thread_shows_what_it_can(
    terminal: Terminal, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with Stage(lambda: "capturing", began=clock.now - 3):
        pass
    assert terminal.lines() == ["capturing, 3 s", ""]
    monkeypatch.undo()
    progress._line._thread = None


def test_stages_of_several_threads(terminal: Terminal, clock: SimpleNamespace) -> None:
    def call(name: str) -> None:
        for _ in range(50):
            with Stage(lambda: name, began=clock.now - 3), Stage(lambda: f"{name}{name}"):
                pass

    on_threads(*(partial(call, name) for name in "abc"))
    assert {text.partition(",")[0] for text in terminal.lines()} == {"", *"abc", *(2 * name for name in "abc")}
    assert terminal.lines()[-1] == "" and not progress._line._stages


def test_a_stage_is_shown_behind_the_bar_of_a_tool(terminal: Terminal, clock: SimpleNamespace) -> None:
    bar = Progress(2)
    bar.tick("training")
    before = terminal.lines()[-1]
    with Stage(lambda: "compiling", began=clock.now - 3):
        assert terminal.lines()[-1] == before.replace("training", "compiling, 3 s") != before
    assert terminal.lines()[-1] == before
    bar.clear()
    with Stage(lambda: "compiling", began=clock.now - 3):
        assert terminal.lines()[-2:] == ["", "compiling, 3 s"]


# --------------------------------------------------------------------------------------------------------- first calls


@pytest.fixture
def at_once(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(progress, "AFTER", -1e9)
    return terminal


class Slow(nn.Sequential):
    """Is traced and transformed for so long that the terminal is written to meanwhile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().forward(x)


class SlowTransform(thunder.core.transform_common.Transform):
    def transform_trace_post_optimization(self, computation_trace: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return computation_trace


def texts(terminal: Terminal) -> list[str]:
    """What was shown since the last time, without seconds, in the order in which it was first shown."""
    found = dict.fromkeys(line.rpartition(", ")[0] for line in terminal.lines())
    terminal.seek(0)
    terminal.truncate()
    return [*filter(None, found)]


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_what_first_calls_show(at_once: Terminal, is_module: bool) -> None:
    def calls_slow(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    model = Slow(*mlp(1))
    name = "Slow" if is_module else calls_slow.__qualname__
    jfn = thunder.jit(
        model if is_module else calls_slow, transforms=[cudagraph_transform(backend="tape"), SlowTransform()]
    )
    first, second, third = ([texts(at_once) for _ in [jfn(torch.ones(2, 16)).sum().backward()]].pop() for _ in range(3))
    both = ("forward", "backward")
    assert first == [
        f"compiling {name}: Thunder traces it",
        f"compiling {name}: Thunder transforms the trace",
        *(f"warming up {name}, {kind}: region 1 of 1, 0 MiB" for kind in both),
    ]
    assert second == [f"capturing {name}, {kind}: region 1 of 1, 0 MiB" for kind in both]
    assert third == []
    with pytest.raises(RuntimeError, match="shape"):
        jfn(torch.ones(2, 3))
    assert f"compiling {name}: Thunder traces it" in texts(at_once)
    assert not progress._line._stages


@pytest.mark.filterwarnings("ignore:The 'symbolic values' cache option")
def test_calls_after_the_first_ones_do_not_look_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    monkeypatch.setattr(progress, "terminal", lambda: looks.append(""))
    model, transforms = nn.Sequential(nn.Tanh(), nn.ReLU()), [cudagraph_transform(backend="tape")]
    fast = thunder.jit(model, transforms=transforms)
    slow = thunder.jit(model, transforms=transforms, cache="symbolic values")  # each call takes Thunder's dispatch
    function = thunder.jit(lambda x: torch.relu(torch.tanh(x)), transforms=transforms)
    for compiled in (fast, slow, function):
        for call in range(4):
            looks.clear()
            compiled(torch.ones(4))
            assert call == 1 or bool(looks) == (call == 0), (compiled, call)  # the second one may capture


def test_what_a_step_shows(at_once: Terminal) -> None:
    weight = torch.ones(3, requires_grad=True)

    def train_step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = (weight * x).sum()
        loss.backward()
        return loss

    step = thunder_cg.graphed_step(train_step, backend="tape")
    for _ in range(3):
        step(torch.ones(3))
    assert step.captures == 1 and texts(at_once) == ["capturing the step train_step"]


def test_what_a_plan_shows(at_once: Terminal) -> None:
    thunder_cg.plan(nn.Tanh(), torch.ones(3))
    assert texts(at_once)[0] == "compiling Tanh: Thunder traces it"


def test_what_a_graph_of_dynamo_shows(at_once: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    monkeypatch.setattr(compiler.ThunderCompiler, "__call__", lambda *args: said.extend(texts(at_once)))
    monkeypatch.setattr(compiler.Compiler, "_name_parts", lambda *_: None)
    compiler.Compiler()(torch.fx.symbolic_trace(nn.Tanh()))
    assert said == ["splitting a graph of Dynamo's"] and not progress._line._stages
