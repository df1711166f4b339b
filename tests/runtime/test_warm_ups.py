"""A layout is warmed up for all that a fusion is compiled for, so that none is compiled in a capture."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import thunder
import torch
from support import regions, same, same_state
from thunder.core.proxies import TensorProxy
from torch import nn

from thunder_cg.compat.torch_compile import before_dynamo_compiles
from thunder_cg.runtime.backends import resolve

FUSED = {"executors": [thunder.extend.get_executor("torchcompile"), *thunder.get_default_executors()]}


@pytest.fixture
def compiled_inside(backend, monkeypatch):
    """Of each frame that Dynamo has compiled: whether a graph was being captured."""
    if backend == "tape":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # the guards are the same
    found = []
    with before_dynamo_compiles(lambda: found.append(resolve(backend).busy())):
        yield found


@contextmanager
def another_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "context",
    [
        lambda device: torch.device(device),
        lambda device: torch.autocast(device, enabled=False, cache_enabled=False),
        lambda device: another_thread(),
        lambda device: torch._C.DisableTorchFunction(),
        lambda device: torch._C._AutoDispatchBelowAutograd(),
    ],
    ids=["default device", "autocast cache", "threads", "torch function", "dispatch keys"],
)
@pytest.mark.nightly_after(2)
def test_a_setting_that_a_fusion_is_compiled_for_warms_up_again(twins, device, compiled_inside, context):
    plain, graphed = twins(lambda x: torch.tanh(x * 2).sin() + 1, jit=FUSED)
    x = torch.randn(4, 16, device=device)
    same(plain(x), graphed(x))
    for _ in range(2):
        with context(device):
            same(plain(x), graphed(x))
    same(plain(x), graphed(x))
    assert not any(compiled_inside) and len(compiled_inside) == 4
    assert all(r["captures"] and not r["failure"] for r in regions(graphed))


class Scales(nn.Module):
    """Fusions that read a parameter in both directions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        y = torch.tanh(x * self.scale).exp() * self.scale
        return y, y.sin() * self.scale


@pytest.mark.parametrize(
    "losses",
    [
        [lambda y, z: (y * 2 + z * 2).sum(), *[lambda y, z: ((y + z) * 2).sum()] * 2],  # the gradients are one tensor
        [*[lambda y, z: y.sum() + z.sum()] * 2, *[lambda y, z: (y * y).sum() + (z * z).sum()] * 4],
    ],
    ids=["one gradient", "other strides"],
)
@pytest.mark.nightly_after(1)
def test_a_backward_warms_up_for_each_layout_of_gradients(twins, device, compiled_inside, losses):
    plain, graphed = twins(Scales(), jit=FUSED)
    x = torch.randn(4, 16, device=device)
    for loss in losses:
        for model in (plain, graphed):
            model.zero_grad()
            loss(*model(x)).backward()
        same_state(plain, graphed)
    assert not any(compiled_inside)
    assert all(r["captures"] and not r["failure"] for r in regions(graphed))


@pytest.mark.parametrize("kinds", ["xx", "yt", "yyt", "yi"])
@pytest.mark.nightly_after(2)
def test_what_an_eager_operator_makes_in_another_way_is_warmed_up(twins, device, compiled_inside, kinds):
    """It returns another argument, or a new tensor with these strides or others, or an inference tensor."""

    def make(x, y):
        kind = kinds[min(calls, len(kinds) - 1)]
        with torch.inference_mode(kind == "i"):
            strides = (1, 4) if kind == "t" else (16, 1)
            return x if kind == "x" else torch.empty_strided((4, 16), strides, device=device).copy_(y)

    executor = thunder.extend.OperatorExecutor("changing")
    made = executor.register_operator("made", fn=make, meta=lambda x, y: TensorProxy(like=y))

    class Scaled(Scales):
        def forward(self, x):
            y, _ = super().forward(x)
            return torch.tanh(made(x, y) + x).sin() * self.scale

    plain, graphed = twins(Scaled().requires_grad_(False), jit={"executors": [executor, *FUSED["executors"]]})
    x = torch.randn(4, 16, device=device)
    for calls in range(6):  # noqa: B007  (which `make` reads)
        same(plain(x), graphed(x))
    assert not any(compiled_inside)
    assert all(r["captures"] and not r["failure"] for r in regions(graphed))


@pytest.mark.parametrize("modes", ["nnin", "inni"])
def test_an_inference_tensor_is_written_in_inference_mode_only(twins, device, compiled_inside, modes):
    """Elsewhere PyTorch raises, with and without graphs, before a warm-up and after it; but no fusion does on a GPU."""

    def fn(x, cache):
        cache.add_(torch.tanh(x).sin())
        return cache.cos() * 2

    both = twins(fn, jit=FUSED)
    with torch.inference_mode():
        caches = torch.zeros(2, 4, 16, device=device).unbind()
    x = torch.randn(4, 16, device=device)
    for mode in modes:
        raises = mode == "n" and device == "cpu"
        for compiled, cache in zip(both, caches):
            expected = pytest.raises(RuntimeError, match="outside InferenceMode") if raises else nullcontext()
            with torch.inference_mode(mode == "i"), expected:
                compiled(x, cache)
        same(*caches)
    assert not any(compiled_inside)


def test_a_verification_compiles_no_fusion_once_more(twins, device, compiled_inside):
    """It gets a normal tensor in inference mode where the warm-up did, in copies of what is written, too."""

    def fn(x, cache):
        cache.add_(torch.tanh(x).sin())
        return cache.cos() * 2

    plain, graphed = twins(fn, jit=FUSED, verify=1)
    caches = torch.zeros(2, 4, 16, device=device).unbind()
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(4, 16, device=device)
            same(plain(x, caches[0]), graphed(x, caches[1]))
            same(*caches)
    assert compiled_inside == [False, False]
    assert all(r["captures"] and not r["failure"] for r in regions(graphed))
