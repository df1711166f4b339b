"""A catalogue of models that needs no other package. The processes that measure its rows import it, too."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thunder_cg.tools.suite.measure import measure
from thunder_cg.tools.suite.models import ModelInputs, SuiteModel
from thunder_cg.tools.suite.results import FORWARD, SuiteRow


class Net(nn.Module):
    """Dropout and BatchNorm: random draws, and buffers that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


class Small(nn.Module):
    """One region of few ops."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(self.layer(x)))


class Item(Small):
    """A number read by the host: an eager op."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (1 + x.square().sum().item()))


class Branch(Small):
    """A branch that depends on data: Dynamo breaks the graph, and `thunder.jit` cannot trace it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.square().sum() > 0 else y


class Diagonal(Small):
    """An operator that thunderfx leaves to Inductor, after a branch that `thunder.jit` cannot trace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().fill_diagonal_(0.0) * 2 if torch.compiler.is_dynamo_compiling() else x[x > 0])


class Overwrites(Small):
    """Thunder's gradient of the product is wrong: its backward reads what is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.silu(y * 2, inplace=True)


class Broken(Small):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such thing\nwith details")


class Crash(Small):
    def forward(self, x: Tensor) -> Tensor:
        os.write(2, b"out of luck\n")
        os._exit(3)


class Hang(Small):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(600)
        return x


class Large(Small):
    """There is no memory for it when it is tried first, which a file says."""

    def forward(self, x: Tensor) -> Tensor:
        tried = Path(os.environ["TRIED"])
        if not tried.exists():
            tried.touch()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def _batch(tiny: bool, trains: bool) -> ModelInputs:
    return ModelInputs((torch.randn(6, 4),), labels=torch.randint(3, (6,)))


def entry(model: type[nn.Module]) -> SuiteModel:
    return SuiteModel(model.__name__, "tests", lambda tiny: model().train(), _batch)


_ALL = (Net, Small, Item, Branch, Diagonal, Overwrites, Broken, Crash, Hang, Large)
MODELS = {model.__name__: entry(model) for model in _ALL}


def measured(name: str, mode: str = FORWARD) -> SuiteRow:
    return measure(MODELS[name], mode, torch.device("cpu"))
