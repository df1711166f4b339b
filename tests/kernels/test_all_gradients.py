"""What Thunder can differentiate has PyTorch's gradients with `executors()`, too."""

from __future__ import annotations

from typing import Any

import pytest
import thunder
import torch
from support import run_what_inductor_gets
from thunder.core import dtypes

from thunder_cg import cudagraph_transform, executors
from thunder_cg.compat.tensors import tensors_in


def gradients(result: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of the sum of all results that have one; zeros where there is none."""
    total = sum(each.abs().sum() for each in tensors_in(result) if each.requires_grad)
    return [*torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]


@pytest.mark.nightly
def test_gradients(monkeypatch: pytest.MonkeyPatch, backend: str, device: str) -> None:
    """The first sample of each operator that Thunder's own tests differentiate."""
    from thunder.tests.opinfos import opinfos

    if backend == "tape":
        run_what_inductor_gets(monkeypatch)
    differ, compared = [], 0
    for info in (each for each in opinfos if each.supports_grad and each.torch_reference is not None):
        sample = next(iter(info.sample_inputs(device, dtypes.float32, requires_grad=True)), None)
        leaves = [each for each in tensors_in((sample.args, sample.kwargs)) if each.requires_grad] if sample else []
        if not leaves:
            continue
        compiled = thunder.jit(info.op, executors=executors(), transforms=[cudagraph_transform(backend=backend)])
        try:
            expected = gradients(info.torch_reference(*sample.args, **sample.kwargs), leaves)
            for _ in range(3):
                found = gradients(compiled(*sample.args, **sample.kwargs), leaves)
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
            compared += 1
        except Exception as error:
            differ.append(f"{info.name}: {error}")
    assert not differ and compared >= 45, (compared, differ)
