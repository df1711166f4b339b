"""Which way a call goes, and what Thunder says of it afterwards."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from functools import partial

import pytest
import thunder
import torch
from models import Linear
from support import fast_path_calls, no_fast_path, on_threads, same, same_state
from thunder.core.interpreter import InterpreterError
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thunder_cg.fastpath.dispatch import _OVERTAKEN


def mlp():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_statistics(twins, device):
    plain, graphed = twins(mlp())
    for step in range(16):
        x = torch.randn(2 + step // 2 % 2, 4, device=device)
        with torch.set_grad_enabled(step % 2 == 0):
            for model in (plain, graphed):
                model(x)
        for count in (thunder.cache_hits, thunder.cache_misses, lambda model: model._lc_cs.calls):
            assert count(plain) == count(graphed)
        for traces in (thunder.last_traces, thunder.last_prologue_traces):
            assert str(traces(plain)[0]) == str(traces(graphed)[0])
    assert fast_path_calls(graphed) == 8


def test_no_shortcut_has_a_reason(twins, device):
    class Work(nn.Module):
        def forward(self, x):
            return torch.tanh(x * 2) * torch.cos(x), x

    plain, graphed = twins(Work())
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        same(plain(x), graphed(x))
    assert no_fast_path(graphed) == ["something is returned that the region does not make"]


def test_a_call_that_fails_after_it_was_compiled(twins, device):
    """Thunder keeps what it compiled, and tries it first from then on, though it is not as the older entry."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Linear(4, 4)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            return torch.tanh(self.first(x)) * 2 + self.shift

    plain, graphed = twins(Shifted())
    for step in range(16):
        x = torch.randn(2, 4, device=device)
        with torch.autocast(device, torch.bfloat16) if step == 4 else nullcontext():
            same(plain(x).detach(), graphed(x).detach())
        if step == 8:
            for model in (plain, graphed):
                shift = model._overrides_buffers["shift"]
                model._overrides_buffers["shift"] = shift.half()
                with pytest.raises(AssertionError, match="expected"):
                    model(x)
                model._overrides_buffers["shift"] = shift
    assert fast_path_calls(graphed) > 8


@pytest.mark.parametrize("grad", [True, False])
def test_a_newer_version_that_checks_less(grad, twins, device):
    """Both are for the last calls: Thunder does not check an object, and the newer one read no more."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Linear(4, 4)
            self.adapter, self.options = None, {"activation": 0}

        def forward(self, x):
            x = torch.tanh(self.first(x))
            if self.adapter is not None:
                return x * 10
            return x * 3 if self.options["activation"] else torch.sin(x) * 2

    plain, graphed = twins(Adapted())
    for step in range(12):
        x = torch.ones(2, 4, device=device)
        with torch.set_grad_enabled(grad):
            same(plain(x).detach(), graphed(x).detach())
        for model in (plain, graphed):
            if step == 4:
                model._model.adapter = object()
            model._model.options["activation"] = int(step == 4)
    assert thunder.cache_misses(graphed) == 2
    assert fast_path_calls(graphed) == 8 and _OVERTAKEN in no_fast_path(graphed)


def test_thunders_cache_is_cleared(twins, device):
    """Then Thunder compiles anew, with what it reads but does not check."""
    scale = [1.0]

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.first(x)) * float(len(scale))

    plain, graphed = twins(Scaled())
    for step in range(12):
        x = torch.randn(2, 4, device=device)
        same(plain(x).detach(), graphed(x).detach())
        if step == 5:
            scale.append(1.0)
            for model in (plain, graphed):
                thunder.compile_stats(model).interpreter_cache.clear()
    assert fast_path_calls(graphed) > 0


@pytest.mark.nightly
def test_inside_of_torch_compile(twins, device):
    """Dynamo looks into all that it can, and takes a node of autograd that it sees for a part of its own graph."""
    plain, graphed = twins(mlp())
    for step in range(8):
        x = torch.randn(2, 4, device=device)
        for model in (plain, graphed):
            model.zero_grad()
            call = torch.compile(lambda x, model=model: model(x) * 2, backend="eager") if step > 3 else model
            call(x).sum().backward()
        same_state(plain, graphed)
    assert fast_path_calls(graphed) > 2
    torch._dynamo.reset()


def test_traced_by_torch_jit(twins, device):
    plain, graphed = twins(mlp().requires_grad_(False))
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        same(plain(x), graphed(x))
    for model in (plain, graphed):
        with pytest.raises(InterpreterError):  # Thunder takes no sizes that are tensors
            torch.jit.trace(model, torch.randn(2, 4, device=device))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.nightly_after(1)
def test_autocast(grad, twins, device):
    plain, graphed = twins(mlp())
    for step in range(12):
        x = torch.randn(2 + step // 6, 4, device=device)
        results = []
        for model in (plain, graphed):
            with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16, enabled=step % 2 == 0):
                results.append(model(x))
            if grad:
                model.zero_grad()
                results[-1].float().sum().backward()
        same(*[result.detach() for result in results])
        same_state(plain, graphed)
    assert fast_path_calls(graphed) == 4


class HalfCast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            z = torch.tanh(self.second(y.float()))
        return self.first(z) * z


def test_a_part_without_autocast_in_a_call_under_autocast(transform, device):
    """Thunder alone casts there, too, where it differentiates, and raises."""
    model = HalfCast().to(device)
    graphed = thunder.jit(model, transforms=[transform()])
    gradients = []
    for step in range(6):
        torch.manual_seed(step // 2)
        x = torch.randn(2, 4, device=device)
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            result = (model if step % 2 else graphed)(x)
        result.sum().backward()
        gradients.append([result.detach(), *(p.grad.clone() for p in model.parameters())])
    for found, expected in zip(gradients[::2], gradients[1::2], strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert fast_path_calls(graphed) == 1


class Halving(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.tanh else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if "tanh" in str(func) else result


@pytest.mark.parametrize("mode", [Halving, Watching])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.nightly_after(2)
def test_modes_see_every_operator(twins, device, mode, grad):
    plain, graphed = twins(mlp())
    with torch.set_grad_enabled(grad):
        for step in range(8):
            x = torch.randn(2, 4, device=device)
            before = fast_path_calls(graphed)
            with mode() if step % 3 == 2 else nullcontext():
                same(plain(x).detach(), graphed(x).detach())
            assert step % 3 != 2 or fast_path_calls(graphed) == before
    assert fast_path_calls(graphed) > 0


def test_forward_mode_derivatives(twins, device):
    plain, graphed = twins(mlp().requires_grad_(False))
    for step in range(8):
        x, tangent = torch.randn(2, 2, 4, device=device)
        with forward_ad.dual_level() if step % 2 else nullcontext():
            inputs = forward_ad.make_dual(x, tangent) if step % 2 else x
            a, b = plain(inputs), graphed(inputs)
            if step % 2:
                a, b = (tuple(forward_ad.unpack_dual(y)) for y in (a, b))
                assert b[1] is not None
            same(a, b)
    assert fast_path_calls(graphed) > 0


def test_inside_another_compiled_function(twins, device):
    plain, graphed = twins(mlp())
    x = torch.randn(2, 4, device=device)
    for _ in range(4):
        graphed(x)

    def doubled(model):
        return thunder.jit(lambda x: model(x) * 2)

    same(doubled(plain)(x).detach(), doubled(graphed)(x).detach())


def test_gradients_that_are_synchronized(twins, device):
    _, graphed = twins(mlp())
    for _ in range(4):
        graphed(torch.randn(2, 4, device=device))
    before = fast_path_calls(graphed)
    graphed._model.use_ddp = True
    graphed(torch.randn(2, 4, device=device))
    assert fast_path_calls(graphed) == before
    del graphed._model.use_ddp
    graphed(torch.randn(2, 4, device=device))
    assert fast_path_calls(graphed) == before + 1


def test_threads(twins, device):
    plain, graphed = twins(mlp())

    def run(seed: int) -> None:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(device)
        expected = torch.autograd.grad(plain._model(x).square().sum(), list(plain._model.parameters()))
        for _ in range(10):
            found = torch.autograd.grad(graphed(x).square().sum(), list(graphed.parameters()))
            torch.testing.assert_close(found, expected)

    for model in (plain, graphed):
        model(torch.randn(3, 4, device=device)).sum().backward()
    on_threads(*(partial(run, seed) for seed in range(4)))
    assert fast_path_calls(graphed) > 0
    for model in (plain, graphed):
        model.zero_grad()
    same_state(plain, graphed)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x):
        return (self.linear(x) * self.scale).sin()


def test_a_shallow_copy_outlives_the_compiled_module(transform, device):
    model = Scaled().to(device)
    jmodel = thunder.jit(model, transforms=[transform()])
    for i, rows in enumerate((4, 4, 2, 2, 4, 4)):
        x = torch.randn(rows, 4, device=device)
        same(jmodel(x), model(x))
        if i == 1:
            jmodel = copy.copy(jmodel)  # which shares all that was compiled
            gc.collect()
