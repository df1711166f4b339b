"""A catalogue of models that needs no other package. The processes that measure its rows import it, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thunder_cg.tools.generation.models import LITGPT, GeneratingModel


class Counter(nn.Module):
    """The next token depends on the last one and on all before, whose sum is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, token: Tensor) -> Tensor:
        x = self.words(token).sum(0)
        self.seen.add_(torch.tanh(x))
        return (self.words.weight @ (self.seen * 2 + x)).relu() + 1


def generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    tokens = prompt[0]
    for _ in range(new):
        tokens = torch.cat((tokens, model(tokens[-2:]).argmax(0, keepdim=True)))
    return tokens.unsqueeze(0)


def raises(model: Any, compile: Any) -> Any:
    raise RuntimeError("no such thing\nwith details")


def compiled(model: Any, compile: Any) -> Any:
    return torch.compile(model, backend="eager") if compile is None else compile(model)


MODELS = {
    "Counter": GeneratingModel("Counter", LITGPT, lambda tiny: Counter(), compiled, generate),
    "Broken": GeneratingModel("Broken", LITGPT, lambda tiny: Counter(), raises, generate),
}
