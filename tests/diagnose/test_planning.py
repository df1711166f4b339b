"""`plan` gives the plan that a run gives, and runs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import thunder
import torch
from models import BatchNorm2d, Conv2d, Dropout, Linear, ReLU, mlp
from torch import nn

from thunder_cg import (
    NotCompiledError,
    OptionError,
    Report,
    cudagraph_transform,
    explain,
    graphed_step,
    plan,
    thunderfx,
)
from thunder_cg.compat import tracing


def reads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.sin(x) * 2
    return z * z.sum().item() + torch.cos(y).exp()


def writes(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return (x * y).sin()


def convolutional(training: bool) -> nn.Module:
    model = nn.Sequential(Conv2d(3, 4, 3), BatchNorm2d(4), ReLU(), Dropout(0.5), nn.Flatten(), Linear(16, 2))
    return model.train(training)


VECTORS = (torch.ones(3), torch.ones(3))
IMAGES = (torch.ones(2, 3, 4, 4),)
CASES: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
    "item": (reads, VECTORS),
    "writes": (writes, VECTORS),
    "training": (mlp(), (torch.ones(2, 16),)),
    "batch norm, training": (convolutional(True), IMAGES),
    "batch norm, inference": (convolutional(False).requires_grad_(False), IMAGES),
}


def decisions(report: Report, device: str) -> list[Any]:
    """All that was decided, with a name for the device."""
    return [
        (
            trace.kind,
            [(op.name, op.verdict, op.reason, op.detail, op.fix, op.line, op.region) for op in trace.ops],
            [
                (region.name, region.device.replace("cuda:0", device), region.ops, region.split)
                for region in trace.regions
            ],
        )
        for trace in report.traces
    ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.nightly_after(3)
def test_the_plan_is_that_of_a_run(name: str, tmp_path: Path) -> None:
    fn, inputs = CASES[name]
    planned = plan(fn, *inputs, backend="tape")
    jfn = thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    jfn(*(x.clone() for x in inputs))
    ran = explain(jfn)
    assert decisions(planned, "cpu") == decisions(ran, "cpu") and ran.calls == 1
    headline, note, *_ = str(planned).splitlines()
    assert headline.startswith("CUDA graphs: no call yet; ") and note == "Planned, not run."
    assert "Not replayed" not in str(planned)
    assert (planned.causes, planned.unmatched, planned.calls) == (ran.causes, ran.unmatched, 0)
    assert bool(planned.causes) == (name == "item") == ("Tensor.item makes" in str(planned))
    for device in ("cpu", "meta") if "training" not in name else ():
        stood_in = plan(fn, *(x.to(device) for x in inputs))
        assert decisions(stood_in, "cpu") == decisions(ran, "cpu")
        assert {region.device for trace in stood_in.traces for region in trace.regions} == {"cuda:0"}
        assert stood_in.note.startswith(f"Planned, not run: {device} tensors stand for CUDA ones")
        assert stood_in.note.endswith("; with meta tensors, a plan also shows what is on the CPU.") == (device == "cpu")
        assert stood_in.note in stood_in._repr_html_()
        for suffix in (".html", ".md", ".txt"):
            stood_in.save(tmp_path / f"plan{suffix}")
            assert stood_in.note in " ".join((tmp_path / f"plan{suffix}").read_text().split())
        assert stood_in.to_dict()["note"] == stood_in.note


def test_nothing_is_run() -> None:
    model = convolutional(True)
    before, state = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    inputs = torch.ones(2, 3, 4, 4)
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="tape")])
    for fn in (model, jmodel):
        assert [trace.kind for trace in plan(fn, inputs).traces] == ["forward", "backward"]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(inputs, torch.ones_like(inputs))
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert explain(jmodel).traces == () and thunder.cache_misses(jmodel) == 0
    x = torch.zeros(3)
    said = str(plan(writes, x, x + 1))
    assert torch.equal(x, torch.zeros(3)) and "CUDAGraph1 on cuda:0, 6 ops: has not run" in said


def test_thunder_traces_as_fast_as_in_a_call() -> None:
    before, inside = tracing._inside, list[int]()  # all tests may be inside

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.append(tracing._inside)
            return super().forward(x)

    plan(Noting(4, 4), torch.ones(2, 4))
    assert inside == [before + 1] and tracing._inside == before


def test_options_are_those_of_the_transform_and_of_thunder() -> None:
    def eager(report: Report) -> list[str]:
        return [op.name for op in report.traces[0].ops if op.verdict == "eager"]

    def work(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return (x.sin() * scale).cos().exp()

    x, kwargs = torch.ones(3), {"scale": 2.0}
    assert eager(plan(work, x, kwargs=kwargs)) == []
    assert "torch.cos" in eager(plan(work, x, kwargs=kwargs, deny=["cos"]))
    jwork = thunder.jit(work, transforms=[cudagraph_transform(backend="tape", deny=["cos"])])
    assert "torch.cos" in eager(plan(jwork, x, kwargs=kwargs)), "it has the options of what is compiled"
    fused = plan(work, x, kwargs=kwargs, executors=["torchcompile"])
    assert [len(op.fused) for op in fused.traces[0].ops if op.fused] == [4]
    way_out = "call it a few times, and explain.it. says what is captured"
    with pytest.raises(NotCompiledError, match=rf"plan\(.*graphed_step made this, .*; {way_out}"):
        plan(graphed_step(torch.sin, backend="tape"), torch.ones(2))
    with pytest.raises(OptionError, match=r"plan\(fn_or_module=3\): expected a function or module"):
        plan(3)
    with pytest.raises(NotCompiledError, match=r"plan\(.*thunderfx made this"):
        plan(thunderfx(work, backend="tape"), x)
    with pytest.raises(OptionError, match="max_arenas=0"):
        plan(work, x, max_arenas=0)
    with pytest.raises(OptionError, match=r"plan\(typo=3\): expected an option .* or of Thunder; drop it"):
        plan(work, x, typo=3)
    with pytest.raises(OptionError, match="did you mean sharp_edges="):
        plan(work, x, sharp_edge="error")
    assert plan(torch.nn.ReLU(), x, nv_enable_linear=True, sharp_edges="allow").traces
    with pytest.raises(OptionError, match=r"plan\(input=<class 'torch.Tensor'>\): .* of Linear: pass it in kwargs="):
        plan(Linear(2, 2), input=x)


def test_what_thunder_cannot_compile_is_a_report_with_what_to_try() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x

    said = " ".join(str(plan(branches, torch.ones(2))).split())
    line = f"test_planning.py:{branches.__code__.co_firstlineno + 1}"
    assert f"Thunder raised while it compiled, in 1 of 1 call: NotImplementedError at {line}: " in said
    assert "To try: for a branch on what a tensor holds" in said


def test_only_a_gpu_shows_it() -> None:
    """A plan for CUDA knows what CUDA refuses, on a machine without it."""

    def transformed(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x.sin().cos()).abs().sin()

    def eager(**options: Any) -> list[str]:
        report = plan(transformed, torch.ones(8), **options)
        return [op.name for op in report.traces[0].ops if op.verdict == "eager"]

    assert (eager(), eager(backend="tape")) == (["torch.fft.fft"], [])

    def moves(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.sin(x)).cpu().sin().cos()

    def regions(device: str) -> list[tuple[str, int]]:
        return [(each.device, each.ops) for each in plan(moves, torch.ones(8, device=device)).traces[0].regions]

    assert (regions("meta"), regions("cpu")) == ([("cuda:0", 2)], [("cuda:0", 2), ("cuda:0", 2)])
