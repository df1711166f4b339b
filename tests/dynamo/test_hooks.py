"""Hooks on gradients see and change those of PyTorch, bit for bit: Dynamo may put them where there are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import regions, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain, thunderfx

SEEN: list[torch.Tensor] = []


def scale(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 3 + 1


def see(gradient: torch.Tensor) -> torch.Tensor:
    """What Dynamo does not trace, as it changes a list: the graph ends."""
    SEEN.append(gradient.clone())
    return gradient * 2


def outcome(fn: Callable[..., Any], seed: int, device: str) -> list[torch.Tensor | None]:
    torch.manual_seed(seed)
    x, z = (torch.randn(shape, device=device).requires_grad_() for shape in ((4, 3), (3,)))
    SEEN.clear()
    loss = fn(x * 1, z * 1).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, z.grad, *(each.grad if each.requires_grad else each for each in SEEN)]


def trains_alike(body: str, backend: str, device: str, hook: Callable[..., Any] = scale) -> Any:
    names = {"torch": torch, "checkpoint": checkpoint, "hook": hook, "SEEN": SEEN}
    exec(f"def fn(x, z):\n {body}", names)
    return trains_alike_of(names["fn"], backend, device)


def trains_alike_of(fn: Callable[..., Any], backend: str, device: str) -> Any:
    graphed = thunderfx(fn, backend=backend)
    for seed in range(3):
        same(outcome(graphed, seed, device), outcome(fn, seed, device))
    return graphed


def is_left(graphed: Any) -> bool:
    """Whether all ran in PyTorch, and the report says why."""
    report = explain(graphed)
    (found,) = report.breaks
    assert found.reason.startswith("A hook on a gradient, which Dynamo would put at another place"), found
    assert "y = y.clone()" in found.fix
    return not report.traces


MOVED = [
    "y = x * 2; y[0] = z; y.register_hook(hook); return y * y",
    "y = x * 2; y.mul_(z); y.register_hook(hook); return y * y",
    "y = x * 2; y[x > 0] = 1.0; y.register_hook(hook); return y * y",
    "y = x * 2; y[:, 0].copy_(z[0]); y.register_hook(hook); return y * y",
    "y = x * 2; y.index_put_((torch.tensor([0], device=x.device),), z); y.register_hook(hook); return y * y",
    "y = x * 2; y[0] = z; a = y.exp(); y.register_hook(hook); return y * a",
    "y = x * 2; a = y + 3; y[0] = z; y.register_hook(hook); return y * a",
    "y = x * 2; v = y[1]; y.mul_(z); y.register_hook(hook); return y * v",
    "y = x * 2; v = y.view(-1); v.mul_(3); y.register_hook(hook); return y * v.view(4, 3)",
    "y = x * 2; y[0] = z; y.register_hook(hook); return y",
    "y = x * 2; y.register_hook(hook); y[0] = z; return y * y",
    "y = x * 2; v = y[0]; y.register_hook(hook); v.mul_(z); return y * y",
    "h = x * 2; y = h[0]; y.register_hook(hook); h.mul_(z); return h * y",
    "y = x * 2; y.data.mul_(3); y.register_hook(hook); return y * y",
    "y = x * 2; w = y.mul_(z); w.register_hook(hook); return y * y",
    "y = x * 2; w = y.float(); w.register_hook(hook); return y * w",
    "y = x * 2; y.register_hook(hook); y.register_hook(lambda g: g - 2); return y * y",
    "m = z.detach() * 2; y = x * 3; y.register_hook(lambda g: g * m); m.mul_(5); return y * m",
    "m = z.detach() * 2; s = m.sum(); m.mul_(5); y = x * 3; y.register_hook(lambda g: g * s); return y * y",
    "x.register_hook(hook); x.mul_(z); return x * x",
    "v = x[0]; v.register_hook(hook); x.mul_(2); return v * v",
    "y = x * 2\n with torch.no_grad(): y.register_hook(hook)\n return y * y",
    "def f(x, z):\n  y = x * 2; y[0] = z; y.register_hook(hook); return y * y\n return f(x, z) * 2",
    "def f(t): t.register_hook(hook); t.register_hook(lambda g: g - 2)\n y = x * 2; f(y); return y * y",
    "def f(x, z):\n  y = x * 2; y[0] = z; y.register_hook(hook); return y * y\n"
    " return checkpoint(f, x, z, use_reentrant=False)",
]


@pytest.mark.parametrize("body", MOVED)
@pytest.mark.nightly_after(17)
def test_a_function_whose_hook_dynamo_would_move_is_left_to_pytorch(backend, device, body):
    assert is_left(trains_alike(body, backend, device))


KEPT = [
    "y = x * 2; a = y * z; y.register_hook(hook); return y * a",
    "y = x * 2; y.register_hook(lambda g: None); return y * y",
    "y = x * 2; y = torch.relu_(y); y.register_hook(hook); return y * y",
    "y = x * 2; w = y.contiguous(); y.register_hook(hook); return y * w",
    "y = x * 2; h = y[1]; h.register_hook(hook); return y * h",
    "a, b = (x * 2).chunk(2); a.register_hook(hook); b.register_hook(lambda g: g - 2); return a * b",
    "y = x * 2; y[0] = z; a = y * 3; y = y.clone(); y.register_hook(hook); return y * a",
    "x.register_hook(hook); return x * z",
]


@pytest.mark.parametrize("body", KEPT)
@pytest.mark.nightly_after(5)
def test_other_hooks_are_in_the_graph(backend, device, body):
    graphed = trains_alike(body, backend, device)
    assert not explain(graphed).breaks and any(region["replays"] for region in regions(graphed))


@pytest.mark.parametrize(
    "body",
    [
        "y = x * 2; a = y * 3; y.register_hook(hook); return y * a",
        "y = x * 2; v = y[0]; v.mul_(2); y.register_hook(hook); return y * v",
        "y = x * 2; w = y.float(); a = y * 3; w.register_hook(hook); return y * a",
        "def f(t): t.register_hook(hook)\n y = x * 2; a = y * 3; f(y); return y * a",
        "y = x * 2; a = y * 3; y.retain_grad(); SEEN.append(y); return y * a",
    ],
)
@pytest.mark.nightly_after(3)
def test_what_was_computed_before_a_graph_ends_adds_to_the_gradient_that_a_hook_sees(backend, device, body):
    assert is_left(trains_alike(body, backend, device, hook=see))


@pytest.mark.parametrize(
    "body",
    [
        "y = x * 2; y.register_hook(hook); return y * y",
        "y = x * 2; y[0] = z; y.register_hook(hook); return y * y",
        "y = x * 2; y = torch.relu_(y); y.register_hook(hook); return y * y",
        "h = x * 2; y = h.mul_(3); y.register_hook(hook); return y * h",
    ],
)
@pytest.mark.nightly_after(3)
def test_a_graph_may_end_at_a_hook(backend, device, body):
    assert len(explain(trains_alike(body, backend, device, hook=see)).traces) == 4


def test_where_a_function_may_not_be_left_a_moved_hook_raises(backend, device):
    def fn(x, z):
        y = x * 2
        y[0] = z
        y.register_hook(scale)
        return y * y

    assert is_left(trains_alike_of(fn, backend, device))
    graphed = thunderfx(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Dynamo would put at another place"):
            outcome(graphed, 0, device)


def test_a_hook_that_pytorch_refuses_is_refused(backend, device):
    def fn(x, z):
        y = x * 2
        y.register_post_accumulate_grad_hook(scale)
        return y * z

    with pytest.raises(RuntimeError, match="cannot be registered on non-leaf tensors"):
        outcome(thunderfx(fn, backend=backend), 0, device)


def test_others_that_share_the_code_are_in_graphs(backend, device):
    def hook(module, args, y):
        y.register_hook(scale)

    def trained(first):
        model = nn.Sequential(first, nn.ReLU(inplace=True)).to(device)
        graphed = thunderfx(model, backend=backend)
        for _ in range(3):
            graphed(torch.ones(2, 3, device=device)).sum().backward()
        return explain(graphed)

    linear = nn.Linear(3, 3)
    handle = linear.register_forward_hook(hook)
    report = trained(linear)
    (left,) = report.breaks
    assert not report.traces and "y.register_hook(scale)" in (left.source or "")
    handle.remove()
    report = trained(linear)
    assert len(report.traces) == 2 and not report.breaks
