"""nvFuser's fusions inside of regions, against uncaptured nvFuser. Runs where nvFuser is installed."""

from __future__ import annotations

import pytest
import torch
from models import GPT, mlp
from support import regions, replays, same_training, twice
from thunder.executors.nvfuserex import nvfuserex

from thunder_cg import cudagraph_transform, explain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(nvfuserex is None, reason="no nvFuser")]


def fusions(compiled):
    return [op for trace in explain(compiled).traces for op in trace.ops if op.fused and "nvFusion" in op.name]


def trained(model, batch, steps=6):
    plain, graphed = twice(model.cuda(), cudagraph_transform(debug=True))
    same_training(plain, graphed, [batch() for _ in range(steps)])
    assert fusions(graphed)
    return graphed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusions_of_an_mlp(dtype):
    graphed = trained(mlp().to(dtype), lambda: (torch.randn(8, 16, device="cuda", dtype=dtype),))
    assert all(op.verdict == "capture" for op in fusions(graphed))
    assert len(regions(graphed)) == 2 and replays(graphed) == 2 * 5


def test_fusions_of_a_gpt():
    graphed = trained(GPT(), lambda: (torch.randint(64, (2, 32), device="cuda"),) * 2)
    assert all(op.verdict == "capture" for op in fusions(graphed))
    assert len(regions(graphed)) == 2 and replays(graphed) == 2 * 5


def test_dropout_in_fusions():
    """The seed and the offset of such a fusion are numbers on the host, which its kernels are given in each call."""
    graphed = trained(GPT(dropout=0.1), lambda: (torch.randint(64, (2, 32), device="cuda"),) * 2)
    assert all(op.verdict == "capture" for op in fusions(graphed))
    assert any("are set before each launch" in op.detail for op in fusions(graphed))
    assert len(regions(graphed)) == 2 and replays(graphed) == 2 * 5
