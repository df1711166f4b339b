"""An InstanceNorm updates its running statistics, where something of ours is compiled."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from support import replays
from torch import nn

from thunder_cg import explain

NORMS = [
    (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 8)),
    (nn.InstanceNorm1d(3, track_running_stats=True, momentum=0.5), (3, 8)),
    (nn.InstanceNorm2d(3, track_running_stats=True, momentum=None), (2, 3, 4, 4)),
    (nn.InstanceNorm3d(3, track_running_stats=True), (2, 3, 2, 3, 2)),
]


@pytest.mark.parametrize(("norm", "shape"), NORMS)
@pytest.mark.nightly_after(2)
def test_statistics_are_updated(transform, device, norm, shape):
    eager = nn.Sequential(nn.Tanh(), copy.deepcopy(norm), nn.Tanh()).to(device)
    graphed = copy.deepcopy(eager)
    jmodel = thunder.jit(graphed, transforms=[transform()])
    for step in range(5):
        inputs = [torch.randn(shape, device=device, requires_grad=True)]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        for model, x in zip((eager, jmodel), inputs, strict=True):
            model.train(step != 3)
            with torch.set_grad_enabled(step != 4):
                result = model(x)
            if step != 4:
                result.square().sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        torch.testing.assert_close(graphed.state_dict(), eager.state_dict())
    assert replays(jmodel) > 0
    assert not explain(jmodel).differs


def test_thunder_updates_none_in_training():
    """Where this fails, Thunder has mended it, and ours can go."""
    norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    thunder.jit(norm)(torch.randn(2, 3, 8))
    assert norm.running_mean.eq(0).all()
