"""Steps that communicate, as one graph and as the plain loop. Runs in the processes of `ranks`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import parallel
import torch
from torch import distributed as dist
from torch import nn

from thunder_cg import graphed_step
from thunder_cg.step import GraphedStep


def graphed(fn: Callable[..., Any], **options: Any) -> GraphedStep:
    return graphed_step(fn, backend="tape" if parallel.device().type == "cpu" else "cuda", **options)


def training_step(model: Any, micro: int = 1, **options: Any) -> Callable[..., Any]:
    """Forward, backward, clipping, optimizer, and the mean of the loss over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)

    def step(*batches):
        optimizer.zero_grad()
        for i, tokens in enumerate(batches):
            with model.no_sync() if i < micro - 1 else nullcontext():
                loss = model(tokens).square().mean()
                loss.backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean

    step.optimizer = optimizer
    return step


def tensors_of(model: Any) -> list[torch.Tensor]:
    found = []
    for p in model.parameters():
        found += [p.detach().clone(), *([p.grad.clone()] if p.grad is not None else [])]
    return found
