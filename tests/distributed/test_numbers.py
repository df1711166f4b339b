"""Fifty steps of the usual loop have the bits of uncaptured Thunder on each rank, whatever training does besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

STEPS = 50


def train(compiled: Any, folder: str, *, mixed_precision: bool) -> list[torch.Tensor]:
    """With dropout, a recomputed block, clipping by the global norm, accumulation in each fifth step under ``no_sync``,
    and a checkpoint that is saved and loaded.
    """
    import parallel

    parameters = list(compiled.parameters())
    sharded = getattr(compiled._model, "use_fsdp", False)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(parallel.RANK())
    found = []
    for step in range(STEPS):
        if step == STEPS // 2:
            checkpoint.save(_state(compiled, optimizer, sharded=sharded), checkpoint_id=folder)
            with torch.autocast(parallel.device().type, torch.bfloat16, enabled=mixed_precision):
                loss = compiled(parallel.tokens(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            _load(compiled, optimizer, folder, sharded=sharded)
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 4:
            with compiled.no_sync(), torch.autocast(parallel.device().type, torch.bfloat16, enabled=mixed_precision):
                compiled(parallel.tokens(STEPS + step)).float().square().mean().backward()
        with torch.autocast(parallel.device().type, torch.bfloat16, enabled=mixed_precision):
            loss = compiled(parallel.tokens(step)).float().square().mean()
        loss.backward()
        _clip(parameters, sharded=sharded)
        optimizer.step()
        found += [loss.detach().clone(), *(p.detach().clone() for p in parameters)]
    return found


def _state(compiled: Any, optimizer: torch.optim.Optimizer, *, sharded: bool) -> dict[str, Any]:
    """What a checkpoint holds of a model and its optimizer: whole tensors, or this rank's shards."""
    import parallel

    mesh = init_device_mesh(parallel.device().type, (torch.distributed.get_world_size(),))

    def of(tensor: torch.Tensor) -> torch.Tensor:
        is_shard = sharded and tensor.dim() > 0
        return DTensor.from_local(tensor.detach(), mesh, [Shard(0)], run_check=False) if is_shard else tensor

    slots = optimizer.state_dict()["state"]
    return {
        "model": {name: of(tensor) for name, tensor in compiled.state_dict().items()},
        "optimizer": {f"{i}.{name}": of(value) for i, slot in slots.items() for name, value in slot.items()},
    }


def _load(compiled: Any, optimizer: torch.optim.Optimizer, folder: str, *, sharded: bool) -> None:
    empty = tree_map(torch.zeros_like, _state(compiled, optimizer, sharded=sharded))
    checkpoint.load(empty, checkpoint_id=folder)
    loaded = tree_map(lambda t: t.to_local() if isinstance(t, DTensor) else t, empty)
    compiled.load_state_dict(loaded["model"])
    state = optimizer.state_dict()
    for name, value in loaded["optimizer"].items():
        i, slot = name.split(".")
        state["state"][int(i)][slot] = value
    optimizer.load_state_dict(state)


def _clip(parameters: list[torch.Tensor], *, sharded: bool) -> None:
    norm = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    if sharded:
        torch.distributed.all_reduce(norm)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(torch.clamp(0.1 / norm.sqrt(), max=1.0))


def fifty_steps(builder: str, mixed_precision: bool, folder: str) -> tuple[int, list[dict[str, Any]]]:
    import parallel

    build = parallel.BUILDERS[builder]
    parallel.MODEL_OPTIONS = {"dropout": 0.3, "checkpoints": True}
    try:
        theirs = train(build(), f"{folder}/theirs", mixed_precision=mixed_precision)
        compiled = build(parallel.transform())
        ours = train(compiled, f"{folder}/ours", mixed_precision=mixed_precision)
    finally:
        parallel.MODEL_OPTIONS = {}
    return parallel.differing(ours, theirs), parallel.summary(compiled)


@pytest.mark.nightly
@pytest.mark.parametrize(("builder", "mixed_precision"), [("fsdp zero2", True), ("ddp", False), ("ddp", True)])
def test_fifty_steps(ranks: Ranks, builder: str, mixed_precision: bool, tmp_path: Path) -> None:
    for differing, traces in ranks.run(fifty_steps, builder, mixed_precision, str(tmp_path), timeout=180.0):
        assert not differing
        for trace in traces[:2]:
            assert trace["replays"] and min(trace["replays"]) >= STEPS - 3
        for trace in traces[2:]:  # under no_sync
            assert trace["replays"] and min(trace["replays"]) >= STEPS // 5 - 3
        assert len(traces) == 4
