"""Moving averages by `AveragedModel` are part of a step's graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn

from thunder_cg import explain, graphed_step


class Training:
    """A small model with BatchNorm, and a moving average of it."""

    def __init__(self, backend, device, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.averages = AveragedModel(self.model, **options)
        self.graphed = graphed_step(self.step, backend=backend)

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.averages.update_parameters(self.model)
        return loss

    def state(self):
        return [tensor.clone().cpu() for tensor in self.averages.state_dict().values()]


@pytest.fixture
def trained(backend, device):
    """Trains twice, compares, and returns the training with the graph."""

    def run(between=lambda i, training: None, kind=Training, **options):
        plain, other = kind(backend, device, **options), kind(backend, device, **options)
        for i in range(8):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(i)).to(device)
            assert torch.equal(plain.step(x), other.graphed(x))
            for training in plain, other:
                between(i, training)
            for mine, others in zip(plain.state(), other.state(), strict=True):
                assert mine.dtype == others.dtype and torch.equal(mine, others)
        return other

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
        {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
        {"avg_fn": get_swa_avg_fn()},
        {"multi_avg_fn": lambda averages, now, n: [a.lerp_(b, 1 / (n + 1).float()) for a, b in zip(averages, now)]},
    ],
    ids=["EMA", "with buffers", "SWA", "the user's"],
)
@pytest.mark.nightly_after(3)
def test_averages_are_in_the_graph(trained, options):
    found = trained(**options)
    assert found.graphed.replays >= 4, explain(found.graphed)
    assert found.averages.n_averaged == 8 and type(found.averages.n_averaged) is torch.Tensor


def test_a_counter_that_begins_anew(trained):
    """The next update copies the parameters; the graph, which averages, is right again after it."""
    saved = {}

    def between(i, training):
        if i == 3:
            training.averages.n_averaged.zero_()
        if i == 4:
            saved[training] = copy.deepcopy(training.averages.state_dict())
        if i == 5:
            training.averages.load_state_dict(saved[training])

    found = trained(between, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    assert found.averages.n_averaged == 3
    assert found.graphed.captures == 1 and found.graphed.replays >= 4, explain(found.graphed)


def test_a_counter_that_the_step_reads(trained, device):
    """The step does something else until there is an average. On a GPU, the counter stays on the CPU: another graph."""

    class Reads(Training):
        def step(self, x):
            return self.model(x).square().mean() * (2 if self.averages.n_averaged == 0 else 3)

    def between(i, training):
        if i == 3:
            training.averages.update_parameters(training.model)

    if device == "cpu":
        with pytest.warns(UserWarning, match="the host reads a value there"):
            trained(between, Reads)
    else:
        assert trained(between, Reads).graphed.captures == 2


def test_an_average_of_all_steps(trained, device):
    """PyTorch's own function of it reads their number on the host where it has one kernel for all parameters."""
    if device == "cpu":
        assert trained().graphed.replays >= 5
    else:
        with pytest.warns(UserWarning, match="the average of all steps .* with avg_fn=get_swa_avg_fn"):
            assert trained().graphed.replays == 0
