"""What tests compare and count with."""

from __future__ import annotations

from typing import Any

import torch

from thunder_cg import explain


def same(a: Any, b: Any) -> None:
    """Bit for bit, and laid out alike."""
    if isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (a.stride(), b.stride())
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    else:
        assert a == b


def same_state(a: torch.nn.Module, b: torch.nn.Module) -> None:
    """Equal parameters, gradients and buffers."""
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters()):
        same(p.detach(), q.detach())
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            same(p.grad, q.grad)
    for (_, p), (_, q) in zip(a.named_buffers(), b.named_buffers()):
        same(p, q)


def regions(jfn: Any) -> list[dict[str, Any]]:
    """All regions of a compiled function, as its report has them."""
    return [region for trace in explain(jfn).to_dict()["traces"] for region in trace["regions"]]


def replays(jfn: Any) -> int:
    return sum(region["replays"] for region in regions(jfn))
