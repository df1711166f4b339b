"""No name of a user's argument, parameter, buffer, operator or global collides with one that this package generates.

Names that uncaptured Thunder cannot compile either are left out: arguments called ``torch``, ``thunder``, ``args`` or
``kwargs``, and, in training, ``C0``, ``C1``, ``cotangents``.
"""

from __future__ import annotations

from functools import cache

import pytest
import thunder
import torch
from support import replays, same, same_state
from thunder.extend import OperatorExecutor
from torch import nn

from thunder_cg import cudagraph_transform
from thunder_cg.executor import executor

NAMES = (
    "call",
    "call0",
    "cudagraph_begin",
    "cudagraph_end",
    "cudagraph_finish",
    "cudagraph_resume",
    "empty",
    "inputs",
    "leave",
    "node",
    "others0",
    "print0",
    "result0",
    "saved",
    "saved_for_backward",
    "tensors",
    "values",
)
CALLS = 4


@cache
def generated(backend, device):
    """The names in what the transform makes of a training function, besides the fixed ones."""
    transform = cudagraph_transform(backend=backend)
    jfn = thunder.jit(lambda x: torch.cos(torch.tanh(x) * 2), transforms=[transform])
    jfn(torch.randn(4, 4, device=device, requires_grad=True)).sum().backward()
    traces = thunder.last_prologue_traces(jfn)[-1], thunder.last_traces(jfn)[-1], thunder.last_backward_traces(jfn)[-1]
    symbols = [s for trace in traces for s in trace.bound_symbols if s.sym.executor is executor]
    found = {s.sym.name for s in symbols} | {p.name for s in symbols for p in s.flat_proxy_outs}
    assert found
    return sorted({*NAMES, *(name for name in found if not name.startswith("t"))})  # Thunder names its values so


def function(names, header, body):
    """A function written with ``names``: the sum of what ``body`` makes of each."""
    scope = {"torch": torch}
    made = " + ".join(body.format(name=name) for name in names)
    exec(f"def fn({header.format(names=', '.join(names))}):\n    return torch.tanh({made}) * 2, torch.cos(x)", scope)
    return scope


def compare(plain, graphed, make, training):
    """The same calls of both, which replay in the end."""
    for _ in range(CALLS):
        tensors = make()
        found = []
        for fn in (plain, graphed):
            own = [tensor.detach().clone().requires_grad_(training) for tensor in tensors]
            results = fn(*own)
            if training:
                sum(result.square().sum() for result in results).backward()
            found.append(([result.detach() for result in results], [tensor.grad for tensor in own]))
        same(*found)
    assert replays(graphed) >= (CALLS - 1) * (1 + training)


@pytest.mark.nightly
def test_arguments(twins, backend, device):
    names = generated(backend, device)
    fn = function(names, "x, {names}", "torch.sin(x * {name})")["fn"]
    for training in (False, True):
        plain, graphed = twins(fn)
        compare(plain, graphed, lambda: list(torch.randn(len(names) + 1, 4, 4, device=device)), training)


@pytest.mark.nightly
def test_arguments_of_a_module(twins, backend, device):
    names = generated(backend, device)
    fn = function(names, "x, {names}", "torch.sin(x * {name})")["fn"]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

    scope = {"fn": fn}
    exec(f"def forward(self, x, {', '.join(names)}):\n    return fn(self.first(x), {', '.join(names)})", scope)
    Model.forward = scope["forward"]
    for training in (False, True):
        plain, graphed = twins(Model().requires_grad_(training))
        compare(plain, graphed, lambda: list(torch.randn(len(names) + 1, 4, 4, device=device)), training)
        same_state(plain, graphed)


@pytest.mark.nightly
def test_globals(twins, backend, device):
    names = generated(backend, device)
    scope = function(names, "x", "torch.sin(x * {name})")
    scope.update((name, torch.randn(4, 4, device=device)) for name in names)
    for training in (False, True):
        plain, graphed = twins(scope["fn"])
        compare(plain, graphed, lambda: [torch.randn(4, 4, device=device)], training)


def test_parameters_buffers_and_submodules(twins, device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs = nn.Linear(4, 4)
            self.C0 = nn.Parameter(torch.randn(4, 4))
            self.cudagraph_begin = nn.Parameter(torch.randn(4, 4))
            self.register_buffer("cotangents", torch.randn(4, 4))
            self.register_buffer("CUDAGraph1", torch.randn(4, 4))

        def forward(self, x):
            y = self.inputs(x) * self.C0 * self.cotangents + self.cudagraph_begin * self.CUDAGraph1
            return torch.tanh(y), torch.cos(x)

    for training in (False, True):
        plain, graphed = twins(Model().requires_grad_(training))
        compare(plain, graphed, lambda: [torch.randn(4, 4, device=device)], training)
        same_state(plain, graphed)


@pytest.mark.nightly
def test_operators(twins, backend, device):
    """An operator between regions, and the same one inside of a region."""
    names = generated(backend, device)
    owner = OperatorExecutor("names_of_users")
    meta, double = lambda a: thunder.TensorProxy(like=a), lambda a: torch.cos(a) * 2
    operators = {name: owner.register_operator(name, meta=meta, fn=double) for name in names}

    def fn(x):
        y = torch.exp(torch.tanh(x) * 2)
        for operator in operators.values():
            y = torch.sin(operator(y)) * torch.tanh(y)
        return y, torch.cos(x)

    for allow in ([], names):
        jit = {"executors": [owner, *thunder.get_default_executors()]}
        plain, graphed = twins(fn, jit=jit, allow=allow, verify="first")
        compare(plain, graphed, lambda: [torch.randn(4, 4, device=device)], training=False)
