"""In `thunderfx`, what has dimensions decides the dtype, as in PyTorch, whatever it was made of."""

from __future__ import annotations

import pytest
import thunder
import torch

from thunder_cg import cudagraph_transform, thunderfx


def _scalar(x, mask):
    return x + torch.where(mask, torch.zeros((), dtype=torch.float64), -1e300)


def _number(x, mask):
    return (x.bfloat16() * (mask * 1.5)).to(torch.bfloat16) * 3


def _unsqueezed(x, mask):
    return torch.softmax((x.bfloat16() * torch.full((), 1 / 3)[None]).float(), -1)


def _floor(x, mask):
    return (x.bfloat16() // 0.5).to(torch.float32), torch.floor_divide(x.bfloat16(), x.bfloat16() + mask)


@pytest.mark.parametrize("fn", [_scalar, _number, _unsqueezed, _floor])
def test_dtypes_are_promoted_as_by_pytorch(fn):
    x, mask = torch.tensor([1 / 3, -2 / 3]), torch.tensor([True, False])
    graphed = thunderfx(fn, backend="tape")
    for _ in range(3):
        torch.testing.assert_close(graphed(x, mask), fn(x, mask), rtol=0, atol=0)
    (jfn,) = graphed._backend.subgraph_infos[0].thunder_compiled_fns
    results = thunder.last_traces(jfn)[-1].bound_symbols[-1].args[0]
    found, expected = torch.utils._pytree.tree_leaves(results), torch.utils._pytree.tree_leaves(fn(x, mask))
    assert [thunder.core.dtypes.to_torch_dtype(proxy.dtype) for proxy in found] == [each.dtype for each in expected]


@pytest.mark.parametrize("fn", [_scalar, _number])
def test_dtypes_with_a_transform_are_those_of_thunder(fn):
    """Captured and uncaptured Thunder have the same numbers, also where PyTorch has others."""
    x, mask = torch.tensor([1 / 3, -2 / 3]), torch.tensor([True, False])
    plain, jfn = thunder.jit(fn), thunder.jit(fn, transforms=[cudagraph_transform(backend="tape")])
    for _ in range(3):
        torch.testing.assert_close(jfn(x, mask), plain(x, mask), rtol=0, atol=0)
