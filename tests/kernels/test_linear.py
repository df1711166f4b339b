"""Linear layers of one row: which ones are sums that Inductor fuses, and that values and gradients are PyTorch's."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from support import programs, same, same_state
from torch import nn
from torch.nn import functional as F

import thunder_cg
from thunder_cg.compat.torch_compile import CompileError
from thunder_cg.kernels import inductor, linear
from thunder_cg.kernels.fusion import Kernels


class Decoder(nn.Module):
    """What follows attention in a layer, for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 96)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 128), (64, 128), (128, 64)))

    def forward(self, x):
        normed = self.norm(x)
        x = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x, self.out(x)


def rows(jfn):
    """The linear layers of one row in the fusions of what runs."""
    ops = [op for program in programs(jfn) for op in program.ops.ops]
    assert [op.is_fusion for op in ops if op.executor == "inductor"] == [True]
    return sum("linear_of_one_row" in sub.name for op in ops for sub in op.subs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_a_token(transform, device, dtype):
    torch.manual_seed(0)
    model = Decoder().to(device, dtype).requires_grad_(False)
    uncaptured, captured = (
        thunder.jit(copy.deepcopy(model), executors=thunder_cg.executors(), transforms=t) for t in ([], [transform()])
    )
    exact = copy.deepcopy(model).double()
    for _ in range(4):
        x = torch.randn(1, 1, 64, device=device, dtype=dtype)
        found = captured(x)
        same(uncaptured(x), found)
        for mine, theirs, best in zip(found, model(x), exact(x.double())):
            assert mine.shape == theirs.shape and mine.stride() == theirs.stride()
            assert (mine - best).abs().max() <= 2 * (theirs - best).abs().max() + torch.finfo(dtype).eps
    assert rows(captured) == 4


def test_training_with_one_row(transform, device):
    """Derivatives are Thunder's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 8)).to(device, torch.bfloat16)
    twin, graphed = copy.deepcopy(model), copy.deepcopy(model)
    plain = thunder.jit(twin, executors=thunder_cg.executors())
    captured = thunder.jit(graphed, executors=thunder_cg.executors(), transforms=[transform()])
    for _ in range(4):
        x = torch.randn(1, 64, device=device, dtype=torch.bfloat16)
        for each in (model, plain, captured):
            each.zero_grad()
            each(x).float().square().sum().backward()
        same_state(twin, graphed)
        for mine, theirs in zip(graphed.parameters(), model.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.02, atol=0.02 * theirs.grad.abs().max().item())


@pytest.mark.parametrize(
    ("shape", "weight", "dtype", "is_ours"),
    [
        ((1, 1, 8), (4, 8), torch.bfloat16, True),
        ((8,), (4, 8), torch.float16, True),
        ((2, 8), (4, 8), torch.bfloat16, False),
        ((0, 8), (4, 8), torch.bfloat16, False),
        ((1, 8), (0, 8), torch.bfloat16, False),
        ((1, 8), (4, 8), torch.float32, False),
        ((1, 8), (linear._MOST_SUMS, 8), torch.bfloat16, True),
        ((1, 8), (linear._MOST_SUMS + 1, 8), torch.bfloat16, False),
        ((1, linear._MOST_ELEMENTS // 2), (2, linear._MOST_ELEMENTS // 2), torch.bfloat16, True),
        ((1, linear._MOST_ELEMENTS // 2 + 1), (2, linear._MOST_ELEMENTS // 2 + 1), torch.bfloat16, False),
    ],
)
def test_which_are_ours(shape, weight, dtype, is_ours):
    with torch.device("meta"):
        a, w = torch.empty(shape, dtype=dtype), torch.empty(weight, dtype=dtype)
    trace = thunder.trace()(thunder.torch.linear, a, w)
    (symbol,) = (each for each in trace.bound_symbols if each.sym.name == "linear")
    assert linear.fused_executor.can_execute(symbol) is is_ours


def test_op_by_op_no_product_is_written(transform, device, monkeypatch):
    """Where Inductor fails, it is PyTorch's linear layer again, with the same bits."""

    def fails(*args):
        raise CompileError("no compiler")

    class Failing(Kernels):
        def __init__(self, function):
            super().__init__(function)
            self.compiled = fails

    monkeypatch.setattr(inductor, "Kernels", Failing)
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU()).to(device, torch.bfloat16).requires_grad_(False)
    jmodel = thunder.jit(model, executors=thunder_cg.executors(), transforms=[transform()])
    inputs = torch.randn(3, 1, 8, device=device, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="runs op by op"):
        found = [jmodel(x).clone() for x in inputs]
    same(found, [model(x) for x in inputs])
    assert rows(jmodel) == 1
