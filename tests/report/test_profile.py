"""profile: times of regions and eager ops, in the report's own words."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import thunder
import torch
from torch import nn

from thunder_cg import NotCompiledError, explain, profile, thunderfx
from thunder_cg.report import Report
from thunder_cg.report.state import StateBefore


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        y = torch.tanh(self.first(x)) * 2
        y = y * y.sum().item()
        return torch.tanh(self.second(y)), (y > 0).sum()


@pytest.mark.parametrize("trains", [True, False])
def test_each_region_and_each_eager_op_is_timed(transform, device, backend, trains):
    net = thunder.jit(Net().to(device).requires_grad_(trains), transforms=[transform()])
    x = torch.ones(2, 4, device=device)
    report = profile(net, x) if trains else explain(net).profile(x)
    assert [trace.kind for trace in report.traces] == ["forward", "backward"][: 1 + trains]
    assert report.clock == backend and all(p.grad is None for p in net.parameters())
    for trace in report.traces:
        assert len(trace.regions) == 2 and not trace.fallbacks
        assert all(region.microseconds > 0 and region.eager_microseconds > 0 for region in trace.regions)
        assert all(
            (region.copy_microseconds > 0) == bool(region.bytes_in + region.bytes_out) for region in trace.regions
        )
        eager = [op for op in trace.ops if op.verdict == "eager"]
        assert all(op.microseconds > 0 for op in eager)
        assert all(op.microseconds is None for op in trace.ops if op.verdict != "eager")
        first, second = trace.regions
        assert first.split_microseconds == pytest.approx(sum(op.microseconds for op in eager))
        assert second.split_microseconds is None and first.replays == first.captures == 0
    (cause,) = report.causes
    splits = sum(trace.regions[0].split_microseconds for trace in report.traces)
    assert cause.microseconds == pytest.approx(splits) and cause.added_regions == len(report.traces)
    said = f"Tensor.item makes {cause.eager_ops} ops eager, adds {count(cause.added_regions)}, costs "
    assert said in str(report) and said in report._repr_html_()
    assert explain(net).clock is None and explain(net).causes[0].microseconds is None
    assert float(net.get_buffer("calls")) == 0


def count(regions: int) -> str:
    return f"{regions} region" + "s" * (regions > 1)


def test_each_of_dynamos_graphs_is_timed(transform, backend, device):
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) * 2
        torch._dynamo.graph_break()
        return torch.tanh(y) * 3

    x = torch.ones(3, device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = thunderfx(broken, backend=backend)
        for _ in range(4):
            compiled(x).sum().backward()
        report = profile(compiled, x)
    torch._dynamo.reset()
    regions = [region for trace in report.traces for region in trace.regions]
    assert len(regions) == 4 and all(region.microseconds > 0 for region in regions)
    replays = [recording.replays for recording in report.memory.recordings]
    assert replays == [2, 2], "the arguments of the second graph hold no memory pool of the first one"


@pytest.mark.parametrize("compiler", ["thunder", "thunderfx", "method"])
@pytest.mark.nightly_after(1)
def test_training_goes_on_as_if_it_had_not_been_profiled(transform, backend, device, compiler):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(device)
    if compiler == "thunder":
        compiled = thunder.jit(model, transforms=[transform()])
    else:
        compiled = thunderfx(model if compiler == "thunderfx" else model.forward, backend=backend)
    x = torch.randn(3, 4, device=device)
    compiled(x).sum().backward()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.cuda if torch.device(device).type == "cuda" else torch.random
    state = generator.get_rng_state()
    assert profile(compiled, x).clock == backend
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(generator.get_rng_state(), state)
    torch._dynamo.reset()


def test_what_trial_calls_write_has_its_bits_again():
    signed, quantized = torch.tensor([0.0, -0.0]), torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.quint8)
    state = StateBefore([signed, quantized])
    signed.zero_(), quantized.copy_(torch.zeros(2))
    state.restore()
    assert signed.signbit().tolist() == [False, True] and quantized.int_repr().tolist() == [2, 2]


def test_what_the_times_say(report: Report) -> None:
    (trace,) = report.traces
    one, other = trace.regions
    slow = replace(other, failure=None, microseconds=30.0, eager_microseconds=12.4, copy_microseconds=0.0)
    fast = replace(one, microseconds=20.0, eager_microseconds=1234.0, copy_microseconds=5.0, split_microseconds=140.0)
    assert (fast.pays, slow.pays, one.pays) == (True, False, None)
    measured = replace(report, traces=(replace(trace, regions=(fast, slow)),), clock="cuda")
    for said in (str(measured), measured._repr_html_()):
        assert "Measured with CUDA events: the regions take 50 µs of a call as graphs, 1,246 µs eagerly." in said
        assert "Regions that do not pay: CUDAGraph2 (30 µs as a graph, 12 µs eagerly)." in said
        assert "; 20 µs as a graph, 1,234 µs eagerly, so it saves 1,214 µs a call; its copies take 5 µs" in said
        assert "; 30 µs as a graph, 12 µs eagerly, so it costs 18 µs a call" in said
        assert "ended by (140 µs of eager ops): Tensor.item at model.py:14" in said
    on_tape = str(replace(measured, clock="tape"))
    assert "The tape stands in for CUDA graphs: what regions save or cost" in on_tape and "do not pay" not in on_tape


def test_what_is_not_compiled_is_not_called() -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("called")

    with pytest.raises(NotCompiledError):
        profile(never, torch.ones(1))


@pytest.mark.parametrize("is_expanded", [True, False])
def test_only_calls_of_the_user_count(transform, device, is_expanded):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    jitted = thunder.jit(model, transforms=[transform()])
    x = torch.ones(2, 4, device=device)
    gradient = torch.ones((), device=device).expand(2, 4) if is_expanded else torch.ones_like(x)  # as sum() gives
    for _ in range(5):
        jitted(x).backward(gradient)
    before, said = str(explain(jitted)).partition("\n\n")[0], "compiled version 0, 3 replays: needs"
    assert said in str(explain(jitted))
    assert "3 of 5 calls and 3 of 5 backwards replayed" in before
    assert str(profile(jitted, x)).startswith("\n".join(before.splitlines()[:2]))
    assert str(explain(jitted)).partition("\n\n")[0] == before and said in str(explain(jitted))
    jitted(x).backward(gradient)
    assert "4 of 6 calls and 4 of 6 backwards replayed" in str(explain(jitted))


def test_a_call_that_thunder_cannot_compile_does_not_count(transform, device):
    jitted = thunder.jit(nn.Linear(4, 4).to(device), transforms=[transform()])
    before = str(explain(jitted))
    with pytest.raises(RuntimeError, match="innermost dimension"):
        profile(jitted, torch.ones(2, 5, device=device))
    assert str(explain(jitted)) == before
