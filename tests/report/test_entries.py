"""What an entry of the cache was compiled for, what new shapes cost, and memory that is counted once."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
import thunder
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain, thunderfx
from thunder_cg.report import InputReport, Report, text, units


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.relu(self.linear(x)) + 1)


@pytest.fixture
def net(transform, device):
    return thunder.jit(Net().to(device), transforms=[transform()])


@pytest.fixture
def x(device) -> torch.Tensor:
    return torch.ones(2, 4, device=device, requires_grad=True)


def said_by(report: Report, start: str) -> list[str]:
    return [line.strip() for line in str(report).splitlines() if line.strip().startswith(start)]


def test_an_entry_says_what_it_was_compiled_for(net, x):
    other = torch.ones(4, 2, device=x.device).t().requires_grad_()
    for layout in (x, x, other):
        net(layout)
    net.eval()
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        net(x)
    report = explain(net)
    first, second = (trace for trace in report.traces if trace.kind == "forward")
    assert first.inputs == (InputReport("x", "float32", (2, 4), ((4, 1), (1, 2))),)
    assert second.inputs == (InputReport("x", "float32", (2, 4), ((4, 1),)),)
    assert (first.training, first.grad, first.autocast) == (True, True, None)
    assert (second.training, second.grad, second.autocast) == (False, False, "bfloat16")
    assert 0 < first.compile_seconds < 60 and first.capture_seconds > 0 == second.capture_seconds
    said = said_by(report, "for x")
    start = (
        "for x float32 (2, 4) with strides (4, 1) or (1, 2); train mode, gradients enabled, no autocast; compiled in "
    )
    assert said[0].startswith(start) and ", captures took " in said[0]
    assert "; eval mode, gradients disabled, autocast to bfloat16; compiled in" in said[1] and "took" not in said[1]
    assert said[0] in report._repr_html_()


def test_a_warm_up_in_which_fusions_compile_says_how_long_it_took(net, x):
    net(x).sum().backward()
    forward, backward = explain(net).traces
    assert 0 < forward.warm_up_seconds < 60 and 0 < backward.warm_up_seconds < 60
    assert "1 warm-up that took 17.9 s" in text.calls(replace(forward, warm_up_seconds=17.93))
    assert "took" not in text.calls(replace(forward, warm_up_seconds=0.3))


def test_the_next_call_captures_where_one_was_warmed_up(net, x):
    def said() -> str:
        (line,) = said_by(explain(net), "Not replayed")
        return line

    net(x).sum().backward()
    assert said() == "Not replayed: 2 warm-ups; the next call with inputs of the same shapes and strides will capture"
    net(x).sum().backward()
    assert said() == "Not replayed: 2 warm-ups; 2 captures"
    with torch.no_grad():
        net(x)
    assert said().endswith(
        "the next call of Net, compiled version 1, with inputs of the same shapes and strides will capture"
    )
    assert [trace.awaiting_capture for trace in explain(net).traces] == [0, 0, 1]
    with torch.no_grad():
        net(x)
    assert "captures" not in said().removesuffix("3 captures")


def test_new_shapes_have_advice_and_memory_is_counted_once(net, x):
    for size in (2, 3, 3):
        net(x.detach()[:1].expand(size, 4).contiguous())
    assert not explain(net).traces[0].fallbacks
    report = explain(net)
    (found,) = report.changes
    assert (found.function, found.kind, found.names, found.values) == ("Net", "shape", ("x",), 2) and found.seconds > 0
    said = (
        f"Net: 2 shapes of x so far ((2, 4), (3, 4)); each new shape compiles anew in Thunder ({found.seconds:.2f} s)"
    )
    assert said_by(report, said) and said in report._repr_html_()
    assert "drop_last=True" in said_by(report, said)[0]
    for size in (2, 2, 3):
        net(x.detach()[:1].expand(size, 4).contiguous())
    assert explain(net).changes and not said_by(explain(net), "Net: 2 shapes"), "it has graphs for both"
    held = [trace.arena_bytes for trace in report.traces]
    assert report.memory.pools == max(held) > 0 and sum(held) > report.memory.pools  # all entries share one arena
    assert said_by(report, f"Memory of the graphs: {units.size(report.memory.pools)} in 1 memory pool")


@pytest.mark.parametrize("fixed", [None, "reentrant", "inside"])
def test_checkpointing_says_that_nothing_replays_and_how_it_would(net, x, transform, fixed):
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    whole = thunder.jit(Outer(Net().to(x.device)), transforms=[transform()]) if fixed == "inside" else None
    line = inspect.currentframe().f_lineno + 2
    for _ in range(3):
        y = whole(x) if whole is not None else checkpoint(net, x, use_reentrant=fixed == "reentrant")
        y.sum().backward()
    first, second, *rest = str(explain(whole or net)).splitlines()
    if fixed:
        assert "1 of 3 backwards replayed" in first and "0 of" not in first.partition(";")[0] and "hooks" not in second
        return
    assert first.startswith("CUDA graphs: 0 of 6 calls and 0 of 3 backwards replayed; 2 regions")
    assert second.startswith("Not replayed: 6 x saved-tensor hooks are active (activation checkpointing")
    assert second.endswith("; 3 x the forward of this backward ran eagerly")
    fix = "call torch.utils.checkpoint inside of the compiled function, where Thunder traces it"
    assert re.match(rf"To change that saved-tensor hooks are active: at test_entries.py:{line}, {fix}", rest[0])
    assert rest[0] in explain(net)._repr_html_() and "captures" not in second
    assert "for x float32 (2, 4) with strides (4, 1); " in str(explain(net)), "calls that run eagerly have strides, too"


def test_each_line_that_checkpoints_is_named(net, x):
    for _ in range(2):
        line = inspect.currentframe().f_lineno + 1
        y = checkpoint(net, x, use_reentrant=False)
        z = checkpoint(net, x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            z = z + net(x)
        (y + z).sum().backward()  # repeats the forwards, which is no other line to change
    places = f"at test_entries.py:{line}, test_entries.py:{line + 1} and test_entries.py:{line + 3}, call torch.utils"
    assert f"hooks are active: {places}" in str(explain(net))


def test_the_line_that_checkpoints_what_dynamo_has_compiled(x, backend):
    """Not the line of the function, whose code Dynamo runs."""
    torch._dynamo.reset()
    net = thunderfx(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(x.device), backend=backend)
    for _ in range(2):
        line = inspect.currentframe().f_lineno + 1
        checkpoint(net, x, use_reentrant=False).sum().backward()
    assert f"hooks are active: at test_entries.py:{line}, call torch.utils.checkpoint inside" in str(explain(net))


def test_a_retained_graph_says_that_no_backward_replays(net, x):
    for _ in range(3):
        net(x).sum().backward(retain_graph=True)
    first, second, fix, *_ = str(explain(net)).splitlines()
    assert first.startswith("CUDA graphs: 1 of 3 calls and 0 of 3 backwards replayed")
    assert "3 x the autograd graph is retained" in second and "; 1 capture; " in second
    at = r"(at test_entries.py:\d+, )"
    at += "?" * (x.device.type == "cuda")  # where another thread may run a backward
    assert re.match(f"To change that the autograd graph is retained: {at}sum the losses and call backward once", fix)
