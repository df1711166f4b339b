"""What `logging` says under "thunder_cg": a line for each event, a warning for each cause, and silence else."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import thunder
import torch
from models import mlp
from support import replays
from torch import nn

from thunder_cg import __main__, cudagraph_transform, explain, plan, thunderfx
from thunder_cg.fastpath import undefined
from thunder_cg.runtime import backends, call, program, region, skip_reasons
from thunder_cg.runtime.tape import TapePool


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A function that returns the lines since its last call, with their levels."""
    caplog.set_level(logging.INFO, "thunder_cg")

    def since() -> list[tuple[str, str]]:
        found = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("thunder_cg")]
        caplog.clear()
        return found

    return since


def compiled(fn: Any, **options: Any) -> Any:
    return thunder.jit(fn, transforms=[cudagraph_transform(**{"backend": "tape", **options})])


def test_without_a_handler_warnings_alone_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert logging.getLogger("thunder_cg").handlers == []
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    jfn = compiled(lambda x: torch.sin(torch.cos(x)) * x.sum().item())
    for _ in range(3):
        jfn(torch.ones(3))
    (said,) = capsys.readouterr().err.splitlines()
    assert "Tensor.item at test_logging.py" in said and said.endswith("as a number has no gradient")
    with __main__._without_log():
        compiled(lambda x: x * x.sum().item())(torch.ones(3))
    assert capsys.readouterr().err == ""


def test_a_derivative_has_the_line_of_its_operator(lines: Any) -> None:
    """Thunder loses it."""
    compiled(lambda x: torch.sin(torch.cos(x).cpu()) * 2)(torch.ones(3, requires_grad=True))
    forward, backward = (said for level, said in lines() if level == "WARNING")
    assert ": Tensor.cpu at test_logging.py:" in forward and ": cpu_vjp at test_logging.py:" in backward


def test_a_line_for_each_compile_capture_and_drop_and_no_warning(lines: Any) -> None:
    jmodel = compiled(mlp(1).requires_grad_(False), max_recordings=1)
    for i in range(3):
        jmodel(torch.ones(2, 16))
        said = lines()
        assert len(said) == (2, 1, 0)[i] and {level for level, _ in said} <= {"INFO"}
        if i == 0:
            assert "Sequential, forward: compiled: 1 region with 2 of 2 ops, planned in " in said[0][1]
        elif i == 1:
            assert said[0][1].startswith("Sequential, forward, call 2: captured region 1 of 1, 0.")
    other = torch.ones(16, 2).t()
    jmodel(other), jmodel(other)
    _, (level, capture), (_, drop) = lines()
    assert (
        drop == "Sequential, forward: graphs are dropped: max_recordings=1, and it saves the fewest launches per byte"
    )
    assert level == "INFO" and capture.startswith("Sequential, forward, call 5: captured region 1 of 1, ")


def test_progress_of_long_first_calls(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 2
        return torch.cos(y * y.sum().item()).exp()

    jfn, x = compiled(pieces), torch.ones(2**18)
    clock = SimpleNamespace(perf_counter=partial(next, itertools.count(10.0, 1.2)))
    for module in (call, program, region):
        monkeypatch.setattr(module, "time", clock)
    said = [text for _ in range(3) for _ in [jfn(x)] for _, text in lines() if " so far, " in text]
    assert [text.partition("pieces, forward, ")[2].partition(" so far, ")[0] for text in said] == [
        "call 1: warmed up region 1 of 2, 1.2 s",  # the clock is read once in a region that warms up, or is captured,
        "call 1: warmed up region 2 of 2, 2.4 s",
        "call 2: captured region 1 of 2, 3.6 s",  # and twice by its capture
        "call 2: captured region 2 of 2, 7.2 s",
    ]
    assert said[-1].endswith(" so far, memory pools hold 6.0 MiB")


def test_a_warning_for_each_eager_operator_that_is_a_cause(lines: Any) -> None:
    def reads(x):
        y = torch.sin(x) * 2
        return y * y.sum().item() + torch.cos(y).exp()

    jfn = compiled(reads)
    for shape in (3, 4):
        jfn(torch.ones(shape))
    warned = [text for level, text in lines() if level == "WARNING"]
    (text,) = warned
    assert "reads, forward: Tensor.item at test_logging.py:" in text and "is eager: " in text
    assert text.endswith("as a number has no gradient")
    compiled(lambda x: torch.sin(torch.cos(x)).exp(), deny=["sin"])(torch.ones(3))
    assert {level for level, _ in lines()} == {"INFO"}, "what the user denies, and what is alone, is no cause"


def test_what_is_eager_because_of_another_operator_has_no_warning(lines: Any) -> None:
    def moves(x):
        y = torch.tanh(torch.sin(x)).cpu() * 2
        return torch.cos(y.to(x.device)) + 1

    plan(moves, torch.ones(3, device="meta"))
    (text,) = (text for level, text in lines() if level == "WARNING")
    assert "Tensor.cpu at test_logging.py" in text


def test_an_operator_at_many_lines_is_one_warning(lines: Any) -> None:
    def reads(x, is_larger):
        y = torch.sin(x) * 2
        y = y * y.sum().item() + torch.cos(y)
        y = y * y.sum().item() + torch.cos(y)
        y = y * y.sum().item() + torch.cos(y)
        y = y * y.sum().item() + torch.cos(y)
        return y * y.sum().item() + torch.cos(y) if is_larger else y

    jfn, line = compiled(reads), reads.__code__.co_firstlineno
    jfn(torch.ones(3), False)
    ((_, text),) = (said for said in lines() if said[0] == "WARNING")
    at = ", ".join(f"at test_logging.py:{line + i}" for i in (2, 3, 4))
    assert f"Tensor.item {at} and 1 more is eager: " in text
    jfn(torch.ones(3), True)
    ((_, text),) = (said for said in lines() if said[0] == "WARNING")
    assert f"Tensor.item at test_logging.py:{line + 6} is eager: " in text, "what is new"


def test_a_fallback_is_a_line_and_its_cause_one_warning(lines: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    jmodel, x = compiled(model), torch.ones(1, 2)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    for i in range(2):
        with hooks:
            jmodel(x).sum().backward()
        forward, backward = [line for line in lines() if ": eager: " in line[1]]
        assert forward[0] == ("WARNING" if i == 0 else "INFO") and "saved-tensor hooks are active" in forward[1]
        assert "; at test_logging.py:" in forward[1]
        assert forward[1].endswith(f", {skip_reasons.HOOKS.fix}")
        assert backward == (
            "INFO",
            f"Sequential, backward, call {i + 1}: eager: the forward of this backward ran eagerly",
        )


def test_a_capture_that_fails_warns_with_the_fix(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Any, fn: Any, args: Any, *rest: Any) -> Any:
        raise RuntimeError("no memory for graphs")

    monkeypatch.setattr(TapePool, "capture", capture)
    jfn = compiled(lambda x: torch.sin(torch.cos(x)))
    for _ in range(6):
        jfn(torch.ones(3))
    said = [(level, text) for level, text in lines() if "could not be captured" in text]
    assert [level for level, _ in said] == ["INFO", "INFO", "WARNING", "INFO", "INFO"], "the first two may pass"
    fix = "deny=[...] leaves the operator eager and the rest captured"
    assert said[2][1].endswith(f"no memory for graphs; {fix}")
    first, why, change, *_ = str(explain(jfn)).splitlines()
    assert first.startswith("CUDA graphs: 0 of 6 calls replayed") and not why.endswith("will capture")
    assert sum(map(int, re.findall(r"(\d+) (?:x|warm-up)", why))) == 6, "each call"
    assert change == f"To change that CUDAGraph1 could not be captured: {fix}"


def test_an_operator_that_fails_without_graphs_too_is_no_reason_to_deny_it(lines: Any) -> None:
    jfn, weight = compiled(lambda i, w: torch.index_select(w, 0, i) * 2), torch.ones(3, 2)
    jfn(torch.tensor([0, 1]), weight)
    with pytest.raises(IndexError) as raised:
        jfn(torch.tensor([0, 9]), weight)
    assert not hasattr(raised.value, "__notes__") or "fails without CUDA graphs, too" in raised.value.__notes__[0]
    assert not [text for level, text in lines() if level == "WARNING" or "deny=" in text]
    for _ in range(2):
        jfn(torch.tensor([0, 2]), weight)
    assert replays(jfn) == 2 and not explain(jfn).traces[0].fallbacks


def test_the_tape_instead_of_a_gpu(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backends._warn_of_the_tape.cache_clear()
    cudagraph_transform()
    cudagraph_transform()
    ((level, text),) = lines()
    assert level == "WARNING" and 'backend="auto" takes the tape' in text and text.endswith("if that is meant")
    backends._warn_of_the_tape.cache_clear()
    cudagraph_transform(backend="tape")
    assert lines() == []


def test_a_number_that_only_python_gets(lines: Any) -> None:
    """Thunder drops the read, so a list of such numbers stays as it was when the function was traced."""
    seen: list[Any] = []

    def logs(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(torch.cos(x))
        seen.append(y.sum().item())
        return y * 2

    jfn = compiled(logs)
    for _ in range(3):
        jfn(torch.ones(3))
    said, changed = (said for level, said in lines() if level == "WARNING")
    line = logs.__code__.co_firstlineno + 2
    assert f"list.append at test_logging.py:{line} changes a container" in changed
    assert f"Tensor.item at test_logging.py:{line} reads a number that no operator uses" in said and len(seen) == 1
    assert said.endswith("to log a value, return the tensor and read it outside of the compiled function")
    compiled(lambda x: torch.sin(x) * x.sum().item())(torch.ones(3))
    assert "no operator uses" not in str(lines())


@pytest.mark.parametrize("in_dynamo", [False, True])
def test_anomaly_detection_that_raises_in_thunders_backward(caplog, monkeypatch, in_dynamo):
    monkeypatch.setattr(undefined, "_warn_of_anomaly_detection", undefined._warn_of_anomaly_detection.__wrapped__)
    x = torch.ones(2, requires_grad=True)
    call_ = thunderfx(wave, backend="tape") if in_dynamo else compiled(wave)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = call_(x).sum()
        with nullcontext() if in_dynamo else pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
            loss.backward()
    assert ("pass check_nan=False, or compile with thunder_cg.thunderfx" in caplog.text) is not in_dynamo
    with torch.autograd.set_detect_anomaly(True, check_nan=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call_(x).sum().backward()


def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def test_a_graph_break_has_its_line_and_the_change_once(lines: Any) -> None:
    def prints(x: torch.Tensor) -> torch.Tensor:
        x = torch.sin(x) * 2
        print("halfway", tuple(x.shape))
        return torch.cos(x) + 1

    def calls_prints(x: torch.Tensor) -> torch.Tensor:
        return prints(x * 3) - 1  # Dynamo ends a graph here, too

    line = prints.__code__.co_firstlineno + 2
    called = f", called from test_logging.py:{line + 4}"
    for function, callers in ((prints, ""), (calls_prints, called)):
        torch._dynamo.reset()
        compiled_fn = thunderfx(function, backend="tape")
        for size in (2, 2, 3, 4):
            compiled_fn(torch.ones(size))
        (said,) = (text for level, text in lines() if level == "WARNING")
        assert f"graph 0: graph break at test_logging.py:{line}{callers}: print(); print after the call, or" in said
        assert str(explain(compiled_fn)).count(": print()\n") == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_thunderfx_warns_if_dynamo_leaves_all_to_python(lines: Any, is_first: bool) -> None:
    def halving(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            if x.sum() > 1:
                x = x / 2
        return x

    def halving_later(x: torch.Tensor) -> torch.Tensor:
        return halving(torch.sin(x) * 8)

    torch._dynamo.reset()
    compiled_fn = thunderfx(halving if is_first else halving_later, backend="tape")
    for _ in range(5):
        compiled_fn(torch.ones(2, 3))
    said = [text for level, text in lines() if level == "WARNING"]
    ends = "all of the first 3 calls ran without Thunder, in plain Python or in Inductor; print(thunder_cg.explain("
    assert [ends in text for text in said] == [is_first]
    assert is_first or "graph 0: graph break at test_logging.py:" in said[0]
