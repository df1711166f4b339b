"""Replays have the names of their regions in a profile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import thunder
import torch
from models import mlp
from support import fast_path_calls, training_step
from torch.profiler import ProfilerActivity, profile

import thunder_cg


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


def test_a_replay_of_a_whole_step_is_a_range(backend: str, device: str) -> None:
    model = mlp(1).to(device)
    step = thunder_cg.graphed_step(training_step(model), backend=backend)
    x = torch.ones(2, 16, device=device)
    for _ in range(3):
        step(x)
    assert named(lambda: step(x)) == ["CUDAGraph of the step step"] and step.replays == 2


@pytest.mark.parametrize("debug", [False, True])
def test_operators_are_ranges_in_warm_ups_and_captures(transform: Callable[..., Any], device: str, debug: bool) -> None:
    """A capture makes the nodes of a graph in the ranges of their operators, with the module or the line."""

    def operators(call: Callable[[], Any]) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
            call()
        return [event.name for event in seen.events() if event.name.startswith("torch.")]

    def net(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(layers(x)).cos()

    layers = mlp(1).requires_grad_(False).to(device)
    at = f"at {Path(__file__).name}:{net.__code__.co_firstlineno + 1}"
    jfn, x = thunder.jit(net, transforms=[transform(debug=debug)]), torch.ones(2, 16, device=device)
    first, second, third = (operators(lambda: jfn(x)) for _ in range(3))
    assert first == second and first[-2:] == [f"torch.sin {at}", f"torch.cos {at}"] and third == []
    jmodel = thunder.jit(layers, transforms=[transform(debug=debug)])
    assert "torch.nn.functional.linear at self.0 (linear.py" in operators(lambda: jmodel(x))[0]


NVTX_TOOL = r"""
/* Writes down what NVTX tells tools such as Nsight, which it loads as this one: see nvtx3/nvtxDetail/nvtxTypes.h. */
#include <stdio.h>
#include <stdlib.h>

enum { CALLBACKS = 1, CORE = 1, PUSH = 9, POP = 11 };
typedef int (*function)(const char *);
struct callbacks { size_t size; int (*table)(int module, function ***functions, unsigned *size); };
static FILE *out;

static int push(const char *name) { return fprintf(out, "push %s\n", name); }
static int pop(const char *none) { return fprintf(out, "pop\n"); }

int InitializeInjectionNvtx2(const void *(*exported)(unsigned)) {
    const struct callbacks *known = exported(CALLBACKS);
    function **functions;
    unsigned size;
    out = fopen(getenv("NVTX_SEEN"), "a");
    if (out) setvbuf(out, NULL, _IOLBF, BUFSIZ);
    if (!out || !known || !known->table(CORE, &functions, &size) || size <= POP) return 0;
    *functions[PUSH] = push;
    *functions[POP] = pop;
    return 1;
}
"""


@pytest.fixture(scope="module")
def told_by_nvtx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], list[str]]]:
    """What NVTX has told a tool since the last time. PyTorch looks for a tool once in a process."""
    if not torch.backends.cuda.is_built() or shutil.which("gcc") is None:
        pytest.skip("this PyTorch has no NVTX, or there is no compiler for C")
    folder = tmp_path_factory.mktemp("nvtx")
    source, tool, seen = folder / "tool.c", folder / "tool.so", folder / "seen.txt"
    source.write_text(NVTX_TOOL)
    seen.touch()
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tool, source], check=True)
    os.environ |= {"NVTX_INJECTION64_PATH": str(tool), "NVTX_SEEN": str(seen)}
    with seen.open() as file:
        yield lambda: file.read().splitlines()


def test_tools_for_nvtx_see_the_ranges(
    transform: Callable[..., Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    told_by_nvtx: Callable[[], list[str]],
) -> None:
    if device == "cuda" and "OF_ITS_OWN" not in os.environ:  # other tests may have used NVTX in this process
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-W", "ignore", request.node.nodeid]
        done = subprocess.run(
            command, env=os.environ | {"OF_ITS_OWN": "1"}, cwd=request.config.rootpath, capture_output=True, text=True
        )
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-4000:]
        return
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # all that asks for a GPU
    jmodel = thunder.jit(mlp(1).to(device), transforms=[transform()])
    x = torch.ones(2, 16, device=device)
    with torch.autograd.profiler.emit_nvtx():
        for _ in range(4):
            jmodel(x).sum().backward()
    ranges = Counter(line.partition(", ")[0] for line in told_by_nvtx())
    for name in ("CUDAGraph1 of Sequential", "CUDAGraph2 of Sequential"):  # in the capture, and twice after it
        assert ranges[f"push {name}"] == 3
    linear = "push torch.nn.functional.linear at self.0 (linear.py:"  # in the warm-up and the capture
    assert sum(number for name, number in ranges.items() if name.startswith(linear)) == 2
    assert ranges["pop"] == sum(ranges.values()) - ranges["pop"]
    jmodel(x)
    assert told_by_nvtx() == []


def test_without_a_profiler_there_are_none(
    transform: Callable[..., Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.profiler, "record_function", None)
    jfn = thunder.jit(lambda x: torch.sin(torch.cos(x)), transforms=[transform()])
    for _ in range(3):
        jfn(torch.ones(3, device=device))
