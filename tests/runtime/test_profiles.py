"""Replays have the names of their regions in a profile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from models import mlp
from support import fast_path_calls
from torch.profiler import ProfilerActivity, profile, record_function

from thunder_cg.fastpath import inference
from thunder_cg.runtime import recording


def named(call: Callable[[], Any]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        call()
    return [event.name for event in seen.events() if event.name.startswith("CUDAGraph")]


@pytest.mark.parametrize("trains", [False, True])
def test_replays_are_ranges(transform: Callable[..., Any], device: str, trains: bool) -> None:
    jmodel = thunder.jit(mlp(1).requires_grad_(trains).to(device), transforms=[transform()])
    x = torch.ones(2, 16, device=device)

    def step() -> None:
        y = jmodel(x)
        if trains:
            y.sum().backward()

    for _ in range(3):
        step()
    before = fast_path_calls(jmodel)
    assert named(step) == ["CUDAGraph1 of Sequential, forward", "CUDAGraph2 of Sequential, backward"][: 1 + trains]
    assert fast_path_calls(jmodel) == before + 1, "a profile shows what runs without it"


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this PyTorch has no NVTX")
def test_replays_are_ranges_under_emit_nvtx(
    transform: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of NVTX itself, a test sees nothing without a tool of NVIDIA's. It gets what `record_function` is given."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # all that asks for a GPU
    seen: list[str] = []
    for module in (recording, inference):
        monkeypatch.setattr(module, "record_function", lambda label: seen.append(label) or record_function(label))
    jmodel = thunder.jit(mlp(1).to(device), transforms=[transform()])
    inputs = torch.ones(2, 16, device=device)
    for _ in range(3):
        jmodel(inputs).sum().backward()
    with torch.autograd.profiler.emit_nvtx():
        jmodel(inputs).sum().backward()
    assert seen == ["CUDAGraph1 of Sequential, forward", "CUDAGraph2 of Sequential, backward"]


def test_without_a_profiler_there_are_none(
    transform: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "record_function", None)
    jfn = thunder.jit(lambda x: torch.sin(torch.cos(x)), transforms=[transform()])
    for _ in range(3):
        jfn(torch.ones(3, device=device))
