"""Small models under each kind of parallelism, trained with and without graphs. Runs in the processes of `ranks`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import thunder
import thunder.distributed as thunder_distributed
import torch
from thunder.core.transforms import add_transform
from thunder.distributed.transforms.fsdp_v2 import FSDPTransform
from thunder.transforms import MaterializationTransform
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thunder_cg import cudagraph_transform, executors, explain
from thunder_cg.compat import distributed
from thunder_cg.runtime.ranks import groups
from thunder_cg.runtime.tape import TapePool

WIDTH = 16
RANK = torch.distributed.get_rank


def device() -> torch.device:
    is_gpu = "nccl" in torch.distributed.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")


def transform(**options: Any) -> Any:
    return cudagraph_transform(backend="tape" if device().type == "cpu" else "cuda", debug=True, **options)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A block between an embedding and a layer norm, and dropout if wanted."""

    def __init__(self, width: int = WIDTH, words: int = 32, dropout: float = 0.0, checkpoints: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.block = Block(width)
        self.norm = nn.LayerNorm(width)
        self.dropout, self.checkpoints = dropout, checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return F.dropout(self.norm(x), self.dropout, self.training)


MODEL_OPTIONS: dict[str, Any] = {}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model(**MODEL_OPTIONS).to(device())


def tokens(step: int, *, shared: bool = False, batch: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + (0 if shared else RANK()))
    return torch.randint(0, 32, (batch, 8), generator=generator).to(device())


# Each builder takes what makes the graphs, or nothing, and returns the compiled module.


def ddp(*graphs: Any, **options: Any) -> Any:
    return thunder_distributed.ddp(thunder.jit(model(), transforms=list(graphs), **options))


def ddp_last(*graphs: Any) -> Any:
    compiled = thunder_distributed.ddp(thunder.jit(model()))
    for each in graphs:
        compiled = add_transform(compiled, transform=each)
    return compiled


def fsdp(*graphs: Any, zero: str = "ZERO2", bucketing: str = "NONE", **options: Any) -> Any:
    return thunder_distributed.fsdp(
        thunder.jit(model(), transforms=list(graphs), **options),
        sharding_strategy=thunder_distributed.FSDPType[zero],
        bucketing_strategy=thunder_distributed.FSDPBucketingStrategy[bucketing],
        device=device(),
    )


def fsdp_transform_last(*graphs: Any) -> Any:
    """``add_transform`` after ``fsdp`` would shard anew what is sharded."""
    shard = FSDPTransform(device=device(), release_original_parameters=True)
    init = MaterializationTransform.init_from_original_module_init()
    return thunder.jit(model(), transforms=[shard, MaterializationTransform(device(), init=init), *graphs])


def tensor_parallel(order: str, *graphs: Any) -> Any:
    if device().type == "cpu":
        import thunder.distributed.tensor_parallel.common as common

        common.TransformForTensorParallel.__post_init__ = lambda self: setattr(self, "device", device())
    where = torch.device("cpu", RANK()) if device().type == "cpu" else device()
    compiled = thunder.jit(model(), transforms=list(graphs) if order == "after" else [])
    compiled = thunder_distributed.column_parallel(compiled, ["block.up"], device=where)
    compiled = thunder_distributed.row_parallel(compiled, ["block.down"], device=where)
    for each in graphs if order == "last" else ():
        compiled = add_transform(compiled, transform=each)
    return compiled


BUILDERS: dict[str, Callable[..., Any]] = {
    "ddp": ddp,
    "ddp, transform last": ddp_last,
    "fused ddp": lambda *g: ddp(*g, executors=executors()),
    "fused fsdp": lambda *g: fsdp(*g, executors=executors()),
    "fsdp zero2": fsdp,
    "fsdp zero2, transform last": fsdp_transform_last,
    "fsdp zero3": lambda *g: fsdp(*g, zero="ZERO3"),
    "fsdp zero3, buckets": lambda *g: fsdp(*g, zero="ZERO3", bucketing="BLOCK"),
    "tensor parallel": lambda *g: tensor_parallel("after", *g),
    "tensor parallel, transform last": lambda *g: tensor_parallel("last", *g),
}


def train(compiled: Any, steps: int, *, shared: bool = False, micro: int = 1) -> list[torch.Tensor]:
    """Losses, gradients and parameters of all steps of the usual loop, which keeps the loss."""
    parameters = list(compiled.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        for i in range(micro):
            with compiled.no_sync() if i < micro - 1 else nullcontext():
                loss = compiled(tokens(step * micro + i, shared=shared)).square().mean()
                loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in parameters if p.grad is not None)]
        optimizer.step()
        found += [p.detach().clone() for p in parameters]
    return found


@cache
def reference(builder: str, steps: int, micro: int) -> list[torch.Tensor]:
    """`train` without graphs: of one kind of parallelism, since where a transform stands changes nothing then."""
    return train(BUILDERS[builder](), steps, shared="tensor" in builder, micro=micro)


def differing(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> int:
    """How many values differ in any bit; all if their number differs."""
    if len(ours) != len(theirs):
        return max(len(ours), len(theirs))
    return sum(not torch.equal(a, b) for a, b in zip(ours, theirs))


def summary(compiled: Any) -> list[dict[str, Any]]:
    """For each trace: what ran, and what stayed eager."""
    keys = ("kind", "calls", "eager_calls", "fast_path_calls", "no_fast_path", "fallbacks")
    found = []
    for trace in explain(compiled).to_dict()["traces"]:
        short = {key: trace.get(key) for key in keys}
        short["regions"] = len(trace["regions"])
        short["replays"] = [region["replays"] for region in trace["regions"]]
        short["captures"] = [region["captures"] for region in trace["regions"]]
        short["collectives"] = len(trace["collectives"])
        short["launches"] = len({each["launch"] for each in trace["collectives"]})
        short["eager"] = [op["name"] for op in trace["ops"] if op["verdict"] == "eager"]
        found.append(short)
    return found


def forget_meetings() -> None:
    """Of earlier tests, with longer periods; and their time-outs, after which a rank waits for less than it needs."""
    world = torch.distributed.group.WORLD
    groups.state_of(world).timeouts = 0
    for counter in (*groups.common_counters(), groups.state_of(world)):
        counter.meeting, counter.next_request, counter.pause = 0, 0, 1
        distributed.store(world).set(counter.key_of_meeting(), "0")


def pool_class() -> type:
    """The pools of the backend that `transform` uses."""
    if device().type == "cpu":
        return TapePool
    from thunder_cg.runtime.cuda.pool import CudaPool

    return CudaPool
