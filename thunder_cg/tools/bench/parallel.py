"""One step of a model on several ranks, under each kind of parallelism: PyTorch's, Thunder's, and by hand.

Tensor parallelism splits each MLP, its first layer by columns and its second by rows; attention is whole on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import thunder
import thunder.distributed as thunder_distributed
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_cg import cudagraph_transform, executors, graphed_step
from thunder_cg.compat.distributed import coalescing
from thunder_cg.tools.bench.variants import (
    COMPILE,
    EAGER,
    FLOOR,
    FLOOR_OF_THUNDER,
    GRAPHED_STEP,
    GRAPHED_STEP_FUSED,
    OURS,
    OURS_FUSED,
    REDUCE_OVERHEAD,
    THUNDER,
    THUNDER_FUSED,
    Prepared,
    Subject,
    in_one_graph,
    marked,
    step_of,
)
from thunder_cg.tools.measuring import backend_of

DDP, ZERO2, ZERO3, TENSOR = "ddp", "fsdp zero2", "fsdp zero3", "tensor parallel"
COLLECTIVES_EAGER = "thunder_cg, collectives eager"


@dataclass(frozen=True, slots=True)
class RankSubject(Subject):
    """One variant's own copy of a model, and this rank's inputs, on the device."""

    parallel: str

    @property
    def split_layers(self) -> tuple[list[str], list[str]]:
        """The layers that tensor parallelism splits by columns, and those by rows."""
        named = [(name, name.rpartition(".")[2]) for name, _ in self.model.named_modules()]
        return [n for n, last in named if last == "up"], [n for n, last in named if last == "down"]


def variants(device: torch.device, quick: bool, trains: bool) -> Sequence[str]:
    """The names of the variants, the hand-made graphs last, because they are the lower bounds."""
    steps = (GRAPHED_STEP, GRAPHED_STEP_FUSED) if trains else ()
    if device.type == "cpu":
        return (EAGER, THUNDER, COLLECTIVES_EAGER, OURS, *steps[:1])
    if quick:
        return (EAGER, THUNDER, OURS, *steps[:1], FLOOR_OF_THUNDER, FLOOR)
    torchs = (EAGER, COMPILE, REDUCE_OVERHEAD)
    return (*torchs, THUNDER, THUNDER_FUSED, COLLECTIVES_EAGER, OURS, OURS_FUSED, *steps, FLOOR_OF_THUNDER, FLOOR)


def prepare(name: str, subject: RankSubject) -> Prepared:
    """Compiles and captures nothing yet, but for the hand-made graph."""
    return _VARIANTS[name](subject)


def _step(
    subject: RankSubject, call: Callable[..., Any], parameters: Sequence[nn.Parameter], compiled: Any = None
) -> Prepared:
    """A forward and, in training, a backward that leaves new gradients on the parameters."""
    return Prepared(step_of(subject, call, parameters), compiled, parameters=parameters)


# -------------------------------------------------------------------------------------------------------------- PyTorch


def _torch(subject: RankSubject, mode: str | None = None) -> Prepared:
    """Args: mode: of torch.compile; None to run eagerly."""
    model = subject.model
    call: Callable[..., Any] = model
    if subject.parallel == DDP:
        ids = [subject.device.index] if subject.device.type == "cuda" else None
        call = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    else:
        mesh = dist.device_mesh.init_device_mesh(subject.device.type, (dist.get_world_size(),))
        (_shard if subject.parallel in (ZERO2, ZERO3) else _split)(subject, mesh)
    if mode is not None:
        call = marked(torch.compile(call, mode=mode))
    return _step(subject, call, [*model.parameters()])


def _shard(subject: RankSubject, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard  # slow to import

    reshard = subject.parallel == ZERO3
    for module in _blocks(subject.model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(subject.model, mesh=mesh, reshard_after_forward=reshard)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The items of lists and sequences of modules: blocks of a transformer, stages of a ResNet."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from (item for item in child if any(True for _ in item.parameters()))
        else:
            yield from _blocks(child)


def _split(subject: RankSubject, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = subject.split_layers
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
    parallelize_module(subject.model, mesh, plan)


# -------------------------------------------------------------------------------------------------------------- Thunder


def _thunder(subject: RankSubject, collectives: str | None = None, **options: Any) -> Prepared:
    """Args: collectives: `capture_collectives=` of the transform; None to run without graphs."""
    if collectives is not None:
        backend = backend_of(subject.device)
        transform = cudagraph_transform(backend=backend, capture_collectives=collectives)  # type: ignore[arg-type]
        options["transforms"] = [transform]
    compiled: Any = thunder.jit(subject.model, **options)
    if subject.parallel == DDP:
        compiled = thunder_distributed.ddp(compiled)
    elif subject.parallel == TENSOR:
        columns, rows = subject.split_layers
        compiled = thunder_distributed.column_parallel(compiled, columns, device=subject.device)
        compiled = thunder_distributed.row_parallel(compiled, rows, device=subject.device)
    else:
        kinds = thunder_distributed.FSDPType
        kind = kinds.ZERO2 if subject.parallel == ZERO2 else kinds.ZERO3
        compiled = thunder_distributed.fsdp(compiled, device=subject.device, sharding_strategy=kind)
    return _step(subject, compiled, [*compiled.parameters()], compiled)


def _graphed(subject: RankSubject, **options: Any) -> Prepared:
    step = _thunder(subject, collectives="auto", **options)
    call = graphed_step(step.step, modules=[step.compiled])
    return Prepared(call, call, parameters=step.parameters)


# -------------------------------------------------------------------------------------------------------------- by hand


class _Gathered:
    """Parameters that each rank holds a part of: gathered before the forward, their gradients reduced to the part."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        self.whole = [p for p in parameters if p.numel() % size]  # few and small; their gradients are summed
        parts = {p: nn.Parameter(p.detach().view(-1).chunk(size)[rank].clone()) for p in parameters}
        self.parts = {p: part for p, part in parts.items() if p.numel() % size == 0}
        self.held = [self.parts.get(p, p) for p in parameters]
        for part in self.parts.values():
            part.grad = torch.empty_like(part)

    def gather(self) -> None:
        with coalescing():
            for parameter, part in self.parts.items():
                dist.all_gather_into_tensor(parameter.detach().view(-1), part.detach())

    def reduce(self) -> None:
        with coalescing():
            for parameter, part in self.parts.items():
                assert part.grad is not None
                dist.reduce_scatter_tensor(part.grad, _gradient(parameter).view(-1))
        for parameter in self.parts:
            parameter.grad = None  # its memory is free for the next step
        _all_reduce(self.whole)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, divided by the number of ranks: the sum over ranks is then the mean."""
    assert parameter.grad is not None
    return parameter.grad.contiguous().div_(dist.get_world_size())


def _all_reduce(parameters: Sequence[nn.Parameter]) -> None:
    if parameters:
        with coalescing():
            for parameter in parameters:
                parameter.grad = _gradient(parameter)
                dist.all_reduce(parameter.grad)


class _Copied(torch.autograd.Function):
    """The input of layers that are split by columns: the sum of its gradients is over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Summed(torch.autograd.Function):
    """The output of a layer that is split by rows: summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _split_by_hand(subject: RankSubject) -> None:
    columns, rows = subject.split_layers
    size, rank = dist.get_world_size(), dist.get_rank()
    for name in columns:
        layer: Any = subject.model.get_submodule(name)
        for parameter in layer.parameters():
            parameter.data = parameter.data.chunk(size)[rank].clone()
        layer.register_forward_pre_hook(lambda module, args: _Copied.apply(*args))
    for name in rows:
        layer = subject.model.get_submodule(name)
        layer.weight.data = layer.weight.data.chunk(size, dim=1)[rank].clone()
        bias, layer.bias = layer.bias, None
        layer.register_forward_hook(partial(_summed, bias))


def _summed(bias: Tensor | None, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    summed: Tensor = _Summed.apply(output)
    return summed if bias is None else summed + bias


def step_by_hand(subject: RankSubject) -> Prepared:
    """A plain PyTorch step with its collectives, which one graph can hold: coalesced, and not overlapped."""
    held: Sequence[nn.Parameter] = [*subject.model.parameters()]
    parameters, before, after = held, _nothing, _nothing
    if subject.parallel == DDP:
        after = partial(_all_reduce, parameters)
    elif subject.parallel in (ZERO2, ZERO3):
        gathered = _Gathered(parameters)
        held, before, after = gathered.held, gathered.gather, gathered.reduce
    else:
        _split_by_hand(subject)
    step = _step(subject, subject.model, parameters).step

    def call() -> Any:
        before()
        result = step()
        after()
        return result

    return Prepared(call, parameters=held)


def _nothing() -> None:
    pass


def _hand_made(subject: RankSubject, make_step: Callable[[RankSubject], Prepared]) -> Prepared:
    """One graph of a whole step with its collectives."""
    step = make_step(subject)
    return Prepared(in_one_graph(subject, step.step), parameters=step.parameters)


_VARIANTS: Mapping[str, Callable[[RankSubject], Prepared]] = {
    EAGER: _torch,
    COMPILE: partial(_torch, mode="default"),
    REDUCE_OVERHEAD: partial(_torch, mode="reduce-overhead"),
    THUNDER: _thunder,
    THUNDER_FUSED: partial(_thunder, executors=executors()),
    COLLECTIVES_EAGER: partial(_thunder, collectives="never"),
    OURS: partial(_thunder, collectives="auto"),
    OURS_FUSED: partial(_thunder, collectives="auto", executors=executors()),
    GRAPHED_STEP: _graphed,
    GRAPHED_STEP_FUSED: partial(_graphed, executors=executors()),
    FLOOR_OF_THUNDER: partial(_hand_made, make_step=_thunder),
    FLOOR: partial(_hand_made, make_step=step_by_hand),
}
