"""Whole models, trained and evaluated: the same numbers as uncaptured Thunder, in one region each way."""

from __future__ import annotations

from functools import partial

import pytest
import thunder
import torch
from models import GPT, CachedAttention, ResNet, mlp
from support import regions, replays, same, same_state, same_training
from torch import nn
from torch.utils.checkpoint import checkpoint

from thunder_cg import explain

STEPS = 6


def tokens(device, rows=2, length=8):
    return torch.randint(0, 64, (rows, length), device=device)


def images(device):
    return torch.randn(2, 3, 16, 16, device=device)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (mlp, lambda d: (torch.randn(4, 16, device=d),)),
        (GPT, lambda d: (tokens(d),)),
        pytest.param(GPT, lambda d: (tokens(d), tokens(d)), marks=pytest.mark.nightly),
        (lambda: GPT(dropout=0.2), lambda d: (tokens(d), tokens(d))),
        (ResNet, lambda d: (images(d),)),
    ],
    ids=["mlp", "gpt", "gpt-loss", "gpt-dropout", "resnet"],
)
@pytest.mark.nightly_after(3)
def test_one_region_each_way(twins, device, deterministic, model, batch):
    plain, graphed = twins(model())
    batches = [batch(device) for _ in range(STEPS)]
    same_training(plain, graphed, batches)
    assert [r["captures"] for r in regions(graphed)] == [1, 1]
    assert [r["replays"] for r in regions(graphed)] == [STEPS - 1] * 2


def test_attention_in_evaluation_is_one_operator_and_captured(twins, device):
    """`nn.MultiheadAttention` without gradients takes another way than in training."""

    class Attention(nn.MultiheadAttention):
        def forward(self, x):
            return x + super().forward(x, x, x, need_weights=False)[0].tanh()

    plain, graphed = twins(Attention(32, 4, batch_first=True).eval())
    with torch.no_grad():
        for _ in range(STEPS):
            x = torch.randn(2, 5, 32, device=device)
            same(plain(x), graphed(x))
    (forward,) = explain(graphed).traces
    assert "_native_multi_head_attention" in {op.name.rsplit(".", 1)[-1] for op in forward.ops}
    assert forward.counts["eager"] == 0
    assert [r["replays"] for r in regions(graphed)] == [STEPS - 1]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.nightly_after(1)
def test_optimizers(twins, device, deterministic, name):
    plain, graphed = twins(mlp())
    batches = [(torch.randn(4, 16, device=device),) for _ in range(STEPS)]
    make = lambda p: getattr(torch.optim, name)(p, lr=0.01)  # noqa: E731
    same_training(plain, graphed, batches, make)
    assert replays(graphed) == 2 * (STEPS - 1)


@pytest.mark.nightly
def test_changing_shapes(twins, device, deterministic):
    plain, graphed = twins(mlp(1))
    batches = [(torch.randn(*shape, 16, device=device),) for shape in ((4,), (8,), (2, 4), (1, 3))] * 3
    same_training(plain, graphed, batches)
    assert replays(graphed) > 0


@pytest.mark.nightly
def test_autocast(twins, device):
    plain, graphed = twins(mlp())
    for step in range(STEPS):
        x = torch.randn(4, 16, device=device)
        for model in (plain, graphed):
            with torch.autocast(device, torch.bfloat16, enabled=step % 3 != 2):
                y = model(x)
            y.float().square().mean().backward()
        same_state(plain, graphed)
    assert replays(graphed) > 0


def test_activation_checkpointing(twins, device):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(mlp(1) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    plain, graphed = twins(Checkpointed())
    batches = [(torch.randn(4, 16, device=device),) for _ in range(STEPS)]
    same_training(plain, graphed, batches)
    assert replays(graphed) > 0


def test_kv_cache(twins, device):
    plain, graphed = twins(CachedAttention().requires_grad_(False))
    for start in range(2):
        for position in range(8):
            x = torch.randn(1, 1, 16, device=device)
            at = torch.tensor([position], device=device)
            same(plain(x, at), graphed(x, at))
            same_state(plain, graphed)
        if start == 0:
            for model in (plain, graphed):
                model.keys.zero_()
    assert replays(graphed) > 0


def test_item_in_the_middle(twins, device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(1), mlp(1)

        def forward(self, x):
            h = self.a(x)
            return self.b(h) * h.detach().abs().max().item()

    plain, graphed = twins(Scaled())
    batches = [(torch.randn(4, 16, device=device),) for _ in range(STEPS)]
    same_training(plain, graphed, batches)
    assert replays(graphed) > 0


def test_transfer_to_the_host(twins, device):
    def fn(x):
        y = torch.tanh(x * 2) + 1
        host = y.cpu() * 3
        return (y * y).sum(), host, (host + 1).to(x.device) * y

    plain, graphed = twins(fn)
    for _ in range(STEPS):
        x = torch.randn(4, 4, device=device)
        same(plain(x), graphed(x))


FUSED = {"executors": [thunder.extend.get_executor("torchcompile"), *thunder.get_default_executors()]}


def test_compiled_fusions(twins, device):
    """By Inductor, which would take half a minute to try a CPU's vector instructions, and to compile headers ahead."""
    pytest.importorskip("torch._inductor")
    quick = {"cpp_cache_precompile_headers": False, "cpp.simdlen": 1, "cpp.vec_isa_ok": True}
    plain, graphed = twins(lambda x: torch.tanh(x * 2) + 1, jit=FUSED)
    with torch._inductor.config.patch(quick):
        for _ in range(STEPS):
            x = torch.randn(4, 16, device=device)
            same(plain(x), graphed(x))
    assert replays(graphed) == STEPS - 1


def test_fusions_are_not_compiled_in_a_capture(twins, backend, device, monkeypatch):
    """What torch.compile guards of a fusion's inputs must be the same in the warm-up and in the capture."""
    if backend == "tape":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # the guards are the same
    plain, graphed = twins(mlp(), jit=FUSED)
    batches = [(torch.randn(4, 16, device=device),) for _ in range(4)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        same_training(plain, graphed, batches)
    assert [(r["captures"], r["replays"], r["failure"]) for r in regions(graphed)] == [(1, 3, None)] * 2


def test_fusions_are_not_compiled_in_a_capture_in_inference_mode(twins, backend, device, monkeypatch):
    """What a graph reads in the place of an inference tensor is one for the fusion, and what it writes, too."""
    if backend == "tape":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # the guards are the same

    def fn(x, cache, index):
        y = torch.cos(torch.relu(torch.tanh(x))) * 2
        return torch.tanh(y).sin() + cache.index_copy_(0, index, x[:1].sin()).sum()

    plain, graphed = twins(fn, jit=FUSED)
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        caches = torch.zeros(2, 4, 16, device=device).unbind()
        for i in range(5):
            x, index = torch.randn(4, 16, device=device), torch.tensor([i % 4], device=device)
            same(plain(x, caches[0], index), graphed(x, caches[1], index))
            same(*caches)
    assert [(r["captures"], r["replays"], r["failure"]) for r in regions(graphed)] == [(1, 4, None)]


def test_a_fusion_that_times_kernels_in_a_capture_is_captured_later(twins, device, monkeypatch):
    """As Inductor does where it compiles anew, which CUDA does not permit."""
    calls = 0

    def waiting(function, **options):
        def run(*args):
            nonlocal calls
            calls += 1
            if calls == 4:  # the capture, after two calls of the plain twin and the warm-up
                raise RuntimeError("operation not permitted when stream is capturing")
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", waiting)
    plain, graphed = twins(mlp().requires_grad_(False), jit=FUSED)
    for _ in range(STEPS):
        x = torch.randn(4, 16, device=device)
        same(plain(x), graphed(x))
    (region,) = regions(graphed)
    assert region["captures"] == 1 and region["replays"] == STEPS - 2 and region["failure"] is None


def test_two_devices_on_the_host_side(twins, device):
    """Numbers and tensors of the CPU beside tensors of the device."""

    def fn(x, scale):
        return torch.tanh(x) * torch.cos(x) * scale

    plain, graphed = twins(fn)
    for i in range(STEPS):
        x = torch.randn(4, 4, device=device)
        for scale in (2.0, torch.tensor(float(i))):
            same(plain(x, scale), graphed(x, scale))
