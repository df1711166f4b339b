"""The loops that people have, with graphs and without, on one model and one set of data."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Net(nn.Module):
    """The loss of a small classifier; its predictions if there are no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        scores = self.down(self.drop(torch.tanh(self.up(x))))
        return scores if labels is None else nn.functional.cross_entropy(scores, labels)


@pytest.fixture
def net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(device)


@pytest.fixture
def data() -> torch.utils.data.TensorDataset:
    """21 samples, so that the last batch of an epoch is smaller."""
    torch.manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(21, 4), torch.randint(3, (21,)))


@pytest.fixture(autouse=True)
def only_errors_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("lightning.pytorch", "transformers"):
        caplog.set_level("ERROR", logger=name)
