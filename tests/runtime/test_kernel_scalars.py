"""Scalars that kernels get before each launch, here with a fusion that draws as nvFuser's does on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import thunder
import torch
from support import regions, replays, same, same_training
from thunder.core import prims
from thunder.core.proxies import TensorProxy, numberproxy
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transforms import get_grad, put_grad, register_grad
from thunder.extend import FusionExecutor, OperatorExecutor
from torch import nn

from thunder_cg import cudagraph_transform, explain
from thunder_cg.errors import DisagreementWarning
from thunder_cg.runtime.cuda.graph import CudaGraph
from thunder_cg.runtime.tape import TapeGraph

STEPS = 6


def masked(x: torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    """Dropout of about a half, by bits that follow from the seed and the offset."""
    bits = torch.arange(x.numel(), device=x.device) + seed
    bits = (bits * 6364136223846793005 + 1442695040888963407) + offset
    return x * ((bits >> 33) & 1).view(x.shape) * 2


class NvFuser(FusionExecutor):
    def can_fuse(self, bsym: BoundSymbol) -> bool:
        return False

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        return trace


class Fuse(thunder.core.transform_common.Transform):
    """Makes each masking a fusion that draws by a seed and an offset, with ``run`` as what was compiled for it."""

    executor = NvFuser("nvfuser")

    def __init__(self, run: Callable[..., Any] = masked, *, multiplies: bool = False) -> None:
        super().__init__()
        self.run = run
        self.multiplies = multiplies  # by the offset, instead of what was drawn
        self.numbers = count()

    def transform_trace_post_optimization(self, trace: TraceCtx, **kwargs: Any) -> TraceCtx:
        fused = from_trace(trace)
        with tracectx(fused):
            fused.bound_symbols = [self.fusion(s) if s.sym.name == "masked" else s for s in trace.bound_symbols]
        return fused

    def fusion(self, symbol: BoundSymbol) -> BoundSymbol:
        x, seed, offset = symbol.args
        drawn = TensorProxy(like=x)
        settings = {"device": x.device, "dtype": x.dtype, "seed": seed, "offset": offset}
        inside = [
            prims.uniform_philox.bind(x.shape, 0.0, 1.0, **settings, output=drawn),
            prims.mul.bind(x, offset if self.multiplies else drawn, output=symbol.output),
        ]
        name = f"nvFusion{next(self.numbers)}"
        sym = Symbol(name, meta=None, is_fusion=True, executor=self.executor)
        return BoundSymbol(sym, (x, seed, offset), {}, symbol.output, inside, _call_ctx={name: self.run})


@pytest.fixture(scope="module")
def dropout() -> Iterator[Callable[[Any], Any]]:
    executor = OperatorExecutor("numbers")

    def state() -> tuple[int, int]:
        return tuple(torch.randint(1 << 40, (2,)).tolist())

    def two_numbers() -> Any:
        return numberproxy(int, None), numberproxy(int, None)

    draw = executor.register_operator("draw", meta=two_numbers, fn=state)
    mask = executor.register_operator("masked", meta=lambda x, seed, offset: TensorProxy(like=x), fn=masked)

    def grad(x: Any, seed: Any, offset: Any) -> Any:
        y = mask(x, seed, offset)
        put_grad(x, mask(get_grad(y), seed, offset))
        return y

    register_grad(mask.id, grad)
    yield lambda x: mask(x, *draw())
    thunder.extend.deregister_executor(executor)


@pytest.fixture
def model(dropout, device) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = dropout(torch.tanh(layer(x)))
            return x

    return Model().to(device)


@pytest.fixture
def pair(model, transform) -> Callable[..., Any]:
    def make(run: Callable[..., Any] = masked, **options: Any) -> Any:
        plain = thunder.jit(model, transforms=[Fuse()])
        return plain, thunder.jit(copy.deepcopy(model), transforms=[Fuse(run), transform(**options)])

    return make


@pytest.fixture
def batches(device) -> list[tuple[torch.Tensor]]:
    return [(torch.randn(8, 16, device=device),) for _ in range(STEPS)]


def fusions(compiled: Any) -> list[Any]:
    return [op for trace in explain(compiled).traces for op in trace.ops if op.name.startswith("nvFusion")]


@pytest.mark.parametrize("verify", [None, "first", 2])
@pytest.mark.nightly_after(2)
def test_training_with_a_seed_in_each_call(pair, batches, verify):
    plain, graphed = pair(verify=verify)
    same_training(plain, graphed, batches)
    found = fusions(graphed)
    assert len(found) == 6 and all(op.verdict == "capture" for op in found)
    assert "are set before each launch" in found[0].detail
    assert len(regions(graphed)) == 2 and replays(graphed) == 2 * (STEPS - 1)
    assert not explain(graphed).to_dict()["traces"][0]["fallbacks"]


def test_inference(pair, batches):
    plain, graphed = pair()
    for (x,) in batches:
        found = []
        for fn in (plain, graphed):
            torch.manual_seed(1)
            with torch.no_grad():
                found.append([fn(x), fn(x)])
        same(*found)
        assert not torch.equal(*found[0])
    assert replays(graphed) == 2 * STEPS - 1


def test_a_scalar_that_reaches_no_kernel_fails_the_capture(pair, batches):
    plain, graphed = pair(lambda x, seed, offset: masked(x, seed, 0) if offset > 1 << 50 else masked(x, seed, offset))
    same_training(plain, graphed, batches)
    failures = [region["failure"] for region in regions(graphed)]
    if batches[0][0].is_cuda:
        assert "3 of 6 numbers of the call reach no kernel as they are" in failures[0]
    else:  # on the tape, a fusion is one call, and the scalar is its argument
        assert failures == [None, None]


def test_scalars_that_do_not_arrive_are_seen(pair, batches, monkeypatch):
    for graph in (CudaGraph, TapeGraph):
        replay = graph.replay

        def forgetting(self, sources=(), targets=(), scalars=(), replay=replay):
            replay(self, sources, targets, [5] * len(scalars))

        monkeypatch.setattr(graph, "replay", forgetting)
    plain, graphed = pair()
    with pytest.warns(DisagreementWarning, match="is eager from now on"):
        same_training(plain, graphed, batches)
    assert all(region["quarantined"] for region in regions(graphed))


def test_a_scalar_that_a_fusion_computes_with_stays_out_of_graphs(model, transform, batches):
    graphed = thunder.jit(model, transforms=[Fuse(multiplies=True), transform()])
    graphed(*batches[0])
    assert {op.verdict for op in fusions(graphed)} == {"eager"}
    assert all("which a graph would keep as it was when captured" in op.detail for op in fusions(graphed))


def test_a_backend_without_scalar_updates(model, batches, backend, monkeypatch):
    transform = cudagraph_transform(backend=backend)
    monkeypatch.setattr(type(transform._backend), "supports_scalar_updates", False)
    graphed = thunder.jit(model, transforms=[Fuse(), transform])
    graphed(*batches[0])
    assert {op.verdict for op in fusions(graphed)} == {"eager"}
    assert all("are numbers on the host" in op.detail or "it takes" in op.detail for op in fusions(graphed))
