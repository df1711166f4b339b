"""Fifty steps of the usual loop have the bits of uncaptured Thunder on each rank, whatever training does besides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Ranks

STEPS = 50


def train(compiled: Any, *, mixed_precision: bool) -> list[torch.Tensor]:
    """With dropout, a recomputed block, clipping by the global norm, and a state that is saved and loaded again."""
    import parallel

    parameters = list(compiled.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(parallel.RANK())
    found = []
    for step in range(STEPS):
        if step == STEPS // 2:
            state, slots = copy.deepcopy(compiled.state_dict()), copy.deepcopy(optimizer.state_dict())
            with torch.autocast(parallel.device().type, torch.bfloat16, enabled=mixed_precision):
                loss = compiled(parallel.tokens(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            compiled.load_state_dict(state)
            optimizer.load_state_dict(slots)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(parallel.device().type, torch.bfloat16, enabled=mixed_precision):
            loss = compiled(parallel.tokens(step)).float().square().mean()
        loss.backward()
        _clip(parameters, sharded=getattr(compiled._model, "use_fsdp", False))
        optimizer.step()
        found += [loss.detach().clone(), *(p.detach().clone() for p in parameters)]
    return found


def _clip(parameters: list[torch.Tensor], *, sharded: bool) -> None:
    norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    if sharded:
        torch.distributed.all_reduce(norm)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(torch.clamp(0.1 / norm.sqrt(), max=1.0))


def fifty_steps(builder: str, mixed_precision: bool) -> tuple[int, list[dict[str, Any]]]:
    import parallel

    build = parallel.BUILDERS[builder]
    parallel.MODEL_OPTIONS = {"dropout": 0.3, "checkpoints": True}
    try:
        theirs = train(build(), mixed_precision=mixed_precision)
        compiled = build(parallel.transform())
        ours = train(compiled, mixed_precision=mixed_precision)
    finally:
        parallel.MODEL_OPTIONS = {}
    return parallel.differing(ours, theirs), parallel.summary(compiled)


@pytest.mark.parametrize(
    ("builder", "mixed_precision"),
    [("fsdp zero2", True), *(pytest.param("ddp", mixed, marks=pytest.mark.nightly) for mixed in (False, True))],
)
def test_fifty_steps(ranks: Ranks, builder: str, mixed_precision: bool) -> None:
    for differing, traces in ranks.run(fifty_steps, builder, mixed_precision, timeout=180.0):
        assert not differing
        for trace in traces:
            assert trace["replays"] and min(trace["replays"]) >= STEPS - 3
