"""Rewritten graphs, and operators that PyTorch runs as they are: PyTorch's bits in one region."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import thunder
import torch
from support import regions, same
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from thunder_cg import cudagraph_transform, executors, explain, thunderfx
from thunder_cg.dynamo.constants import compute_numbers_first
from thunder_cg.dynamo.own_symbols import use_own_operator
from thunder_cg.errors import LayoutError


class Around(nn.Module):
    """A function behind a layer whose weights it has to give gradients to."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn, self.linear = fn, nn.Linear(8, 8)

    def forward(self, x):
        return self.fn(self.linear(x))


def infers_alike(fn, backend, device):
    """In one graph, all of it."""
    graphed = thunderfx(fn, backend=backend)
    for _ in range(4):
        y = torch.randn(4, 8, device=device)
        near(graphed(y), fn(y), 1e-6)
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [3]


def trains_alike(
    model: nn.Module, inputs: Callable[[], torch.Tensor], backend: str, rounding: float = 0.0, **options: Any
) -> Any:
    """Compares a compiled model with PyTorch, outputs bit for bit or up to `rounding`, and returns the compiled one.

    Its gradients are those of PyTorch but for rounding: Thunder adds them in another order.
    """
    twin = copy.deepcopy(model)
    graphed = thunderfx(model, backend=backend, **options)
    for step in range(4):
        x = inputs()
        for each in (model, twin):
            each.zero_grad()
        torch.manual_seed(step)
        found = graphed(x)
        found.square().sum().backward()
        torch.manual_seed(step)
        expected = twin(x)
        expected.square().sum().backward()
        near(found, expected, rounding)
        for one, other in zip(model.parameters(), twin.parameters()):
            if rounding:
                near(one.grad, other.grad, rounding)
            else:
                torch.testing.assert_close(one.grad, other.grad)
    return graphed


def near(found: torch.Tensor, expected: torch.Tensor, rounding: float) -> None:
    """Equal up to a share of the largest value: small values are differences of large ones, which were rounded."""
    torch.testing.assert_close(found, expected, rtol=0, atol=rounding * float(expected.detach().abs().max()))


def each_and_all(*fns: Callable[..., Any]) -> list[Any]:
    """Cases: all functions in one, and each by itself, for the nights."""

    def together(x):
        return sum(fn(x).to(x.dtype).mean() for fn in fns)

    return [together, *(pytest.param(fn, marks=pytest.mark.nightly) for fn in fns)]


def one_region_each_way(graphed: Any) -> bool:
    report = explain(graphed)
    assert not report.outside, report.outside
    return [len(trace.regions) for trace in report.traces] == [1, 1] and all(
        r["replays"] == 3 for r in regions(graphed)
    )


INTERPOLATIONS: list[dict[str, Any]] = [
    {"scale_factor": 2},
    {"size": (5, 7), "mode": "bilinear"},
    {"scale_factor": 1.5, "mode": "bilinear", "align_corners": False},
    {"size": (5, 7), "mode": "bicubic", "align_corners": True},
]
ALONE = {
    **{str(options): partial(F.interpolate, **options) for options in INTERPOLATIONS},
    "bernoulli_": lambda x: x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5).div_(0.5),
    "embedding": lambda x: F.embedding(torch.tensor([1, 2, 2, 5], device=x.device), x.reshape(-1, 8)),
    "embedding, padding_idx": lambda x: F.embedding(
        torch.tensor([1, 2, 5], device=x.device), x.reshape(-1, 8), padding_idx=2
    ),
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.nightly_after(2)
def test_the_gradient_of_one_operator_has_pytorchs_bits(backend, device, deterministic, name):
    fn = ALONE[name]
    graphed = thunderfx(lambda x: fn(x), backend=backend)
    for seed in range(4):
        found, x = [], torch.randn(2, 3, 8, 8, device=device)
        for each in (graphed, fn):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(seed)
            y = each(leaf)
            y.backward(torch.ones_like(y).cumsum(0).sin())
            found.append((y.detach(), leaf.grad))
        same(*found)
    assert not explain(graphed).outside


@pytest.mark.parametrize("options", INTERPOLATIONS, ids=str)
@pytest.mark.nightly_after(3)
def test_interpolate(backend, device, deterministic, options):
    model = Around(lambda x: F.interpolate(x, **options)).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(2, 3, 8, 8, device=device), backend))


@pytest.mark.parametrize(
    "fn",
    each_and_all(
        torch.round,
        lambda c: torch.heaviside(c - 1, c),
        torch.isfinite,
        torch.argmin,
        lambda c: c.flip(0),
        lambda c: torch.minimum(c, c * 2),
        lambda c: torch.lerp(c, c * 2, 0.5),
        lambda c: torch.zeros_like(c).index_add(0, torch.arange(8, device=c.device), c),
        lambda c: torch.complex(c, c.sin()).real + torch.complex(c, c.cos()).mul(1j).imag,
    ),
    ids=["all", "round", "heaviside", "isfinite", "argmin", "flip", "minimum", "lerp", "index_add", "complex"],
)
def test_what_thunder_cannot_differentiate_of_floats_without_a_gradient(backend, device, fn):
    scale = torch.linspace(0.1, 3.0, 8, device=device)
    model = Around(lambda y: torch.tanh(y) * fn(scale)).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(4, 8, device=device), backend))


@pytest.mark.nightly_after(3)
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y + (y.round(decimals=1) - y).detach() + torch.trunc(y),  # as quantization in training has it
        lambda y: y.flip(0, -1) + torch.flip(y, (0,)),
        lambda y: torch.minimum(y, y * 2) + torch.lerp(y, y * 3, 0.25) + y % 0.7,
        lambda y: torch.hstack([y, y * 2]) + torch.vstack((y, y)).view(4, -1) + torch.dstack([y, y]).flatten(1),
        lambda y: torch.column_stack((y, y[:, 0], y * 2))[:, :8],
        lambda y: _reduced(y),
        lambda y: _summed_cell(y),
    ],
    ids=["round", "flip", "pointwise", "stacks", "column_stack", "segment_reduce", "lstm_cell"],
)
def test_what_thunder_cannot_differentiate(backend, device, fn):
    model = Around(fn).to(device)
    graphed = trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-6)
    assert one_region_each_way(graphed)


def _reduced(y):
    lengths = torch.full((2,), 2, device=y.device)
    sums = torch.segment_reduce(y, "sum", lengths=lengths, unsafe=True)
    return sums.repeat(2, 1) + torch.segment_reduce(y, "max", lengths=lengths, axis=0, unsafe=True).repeat(2, 1)


def _summed_cell(y):
    weight = y.repeat(8, 1) * 0.1
    return sum(torch.lstm_cell(y, (y * 2, y.sin()), weight, weight, weight[:, 0], weight[:, 0]))


def test_lengths_of_segments_that_are_checked(backend, device):
    lengths = torch.full((2,), 2, device=device)
    graphed = thunderfx(lambda x: torch.segment_reduce(x * 2, "sum", lengths=lengths).exp(), backend=backend)
    for _ in range(3):
        x = torch.randn(4, 3, device=device)
        same(graphed(x), torch.segment_reduce(x * 2, "sum", lengths=lengths).exp())
    (eager,) = (op for op in explain(graphed).traces[0].ops if op.name.endswith("segment_reduce"))
    assert eager.verdict == "eager" and "unsafe=True" in eager.fix and not explain(graphed).outside


def test_products_of_integers(backend, device):
    graphed = thunderfx(lambda x, w: torch._int_mm(x, w) * 2 + 1, backend=backend, dynamic=True)
    for rows in (32, 48, 32, 48, 32, 48):
        x, w = (torch.randint(-5, 5, shape, dtype=torch.int8, device=device) for shape in ((rows, 16), (16, 24)))
        same(graphed(x, w), torch._int_mm(x, w) * 2 + 1)
    assert not explain(graphed).outside and sum(region["replays"] for region in regions(graphed)) > 1


@pytest.mark.nightly
def test_a_scale_that_depends_on_sizes(backend, device):
    """As torchvision's detection resizes images of several sizes."""

    def resized(image):
        scale = min(16.0 / min(image.shape[-2:]), 20.0 / max(image.shape[-2:]))
        return F.interpolate(image[None], scale_factor=scale, mode="bilinear", recompute_scale_factor=True) * 2

    graphed = thunderfx(resized, backend=backend)
    for height in (8, 9, 10, 9):
        image = torch.randn(3, height, 12, device=device)
        near(graphed(image), resized(image), 0.0)
    assert not explain(graphed).outside


def test_tensors_of_sizes_that_vary(backend, device):
    """As torchvision's detection scales boxes to the size of their image."""

    def fn(x):
        ratio = torch.tensor(2 * x.shape[0], dtype=torch.float32, device=x.device) / torch.tensor(x.shape[0] + 1)
        sizes = torch.tensor([[x.shape[0], 2], [3, x.shape[0] + 1]], device=x.device).sum(1, keepdim=True)
        last = torch.as_tensor((x.shape[1], x.shape[0]), device=x.device).cumsum(0)[-1:]
        return (x * ratio.to(x.device)).tanh() + torch.as_tensor(x.shape[0], device=x.device), sizes - last

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for rows in (4, 4, 4, 5, 5, 5):
        x = torch.randn(rows, 3, device=device)
        for one, other in zip(graphed(x), fn(x)):
            near(one, other, 0.0)
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [2, 2]
    # A copy of numbers would be eager, as is what the function makes on the CPU beside a GPU.
    assert device != "cpu" or not any(trace.counts["eager"] for trace in explain(graphed).traces)


def test_tensors_of_numbers(backend, device):
    """As torchvision's detection normalizes images: Inductor would get `as_tensor`."""

    def fn(x):
        mean = torch.as_tensor([0.5, 0.25], dtype=x.dtype, device=x.device)
        places = torch.tensor([[1, 0], [0, 2]], device=x.device)
        return (x - mean) / torch.as_tensor([2.0, 2.0], device=x.device) * torch.as_tensor(3) + places[:1] - 0.1

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 2, device=device)
        near(graphed(x), fn(x), 0.0)
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [2]
    assert not explain(graphed).traces[0].counts["eager"]  # a copy of numbers from the host would be


def test_tensors_of_numbers_by_their_types():
    """As VITS has them."""

    def fn(x):
        return (x * torch.FloatTensor([0.5, 0.25]) + torch.IntTensor([3])).sin() * torch.LongTensor([[1], [0]])

    graphed = thunderfx(fn, backend="tape")
    for _ in range(3):
        x = torch.randn(2, 2)
        same(graphed(x), fn(x))
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [2]
    assert not explain(graphed).traces[0].counts["eager"]


def test_shapes_that_dynamo_knows(backend, device):
    """Dynamo leaves a call without users in the graph. The distributions of PyTorch have it."""

    def fn(x, scale):
        shape = torch.broadcast_shapes(x.shape, scale.shape)
        return (x.exp() * 2).expand(shape).sin() - torch.distributions.Normal(x, scale).log_prob(x.tanh())

    graphed = thunderfx(fn, backend=backend, dynamic=False)
    for _ in range(3):
        x, scale = torch.randn(4, 1, device=device), torch.rand(3, device=device) + 1
        near(graphed(x, scale), fn(x, scale), 1e-6)
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [2]


def test_shapes_that_are_broadcast_of_sizes_that_vary(backend, device):
    """One is made of another, which has no other user; one is used."""

    def fn(x, scale):
        torch.broadcast_shapes(torch.broadcast_shapes(x.shape, scale.shape), x.shape)
        shape = torch.broadcast_shapes(x.shape, (1, *scale.shape))
        return torch.distributions.Normal(x, scale).log_prob(x.tanh()) + x.new_ones(shape[0], shape[-1])

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for rows in (4, 4, 4, 5, 5, 5):
        x, scale = torch.randn(rows, 1, device=device), torch.rand(3, device=device) + 1
        near(graphed(x, scale), fn(x, scale), 1e-6)
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [2, 2]


def test_tensors_of_tensors(backend, device):
    """As TAPAS has it: itself, or a copy in another dtype, with its gradient."""

    def fn(x):
        y = x.exp()
        return torch.as_tensor(y, device=x.device) * 2 + torch.as_tensor(y * 2, dtype=torch.float64).sin()

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 2, device=device, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        graphed(x).sum().backward()
        fn(other).sum().backward()
        near(x.grad, other.grad, 1e-6)
    assert not explain(graphed).outside and len(regions(graphed)) == 2


def test_arguments_that_pytorch_itself_calls_axis(backend, device):
    scale, zero = torch.rand(8, device=device) + 0.1, torch.zeros(8, dtype=torch.int32, device=device)
    lengths = torch.tensor([3, 1], device=device)

    def fn(x):
        quantized = torch.fake_quantize_per_channel_affine(x, scale, zero, axis=1, quant_min=-8, quant_max=7)
        return torch.segment_reduce(quantized, "max", lengths=lengths, axis=0) * 2

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        near(graphed(x), fn(x), 0.0)


@torch.no_grad
def _finite_and_smallest(y):
    return y.isfinite(), y.argmin(-1, keepdim=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda y: torch.where(y.isfinite(), y, 0.0),
        lambda y: y * y.argmin(-1, keepdim=True),
        lambda y: y * sum(_finite_and_smallest(y)),
        lambda y: checkpoint(lambda z: torch.where(z.isfinite(), torch.sin(z), 0.0), y, use_reentrant=False),
    ],
    ids=["isfinite", "argmin", "under no_grad", "checkpointed"],
)
@pytest.mark.nightly_after(2)
def test_results_without_a_gradient_of_what_has_one(backend, device, fn):
    model = Around(fn).to(device)
    graphed = trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-6)
    assert one_region_each_way(graphed)


@pytest.mark.parametrize(
    "fn",
    each_and_all(
        lambda y: y.where(y > 0, other=y * 0.5),
        lambda y: y.view(4, 2, 4)[..., [-1], :] + y.view(4, 2, 4)[:, [1, 0, 1]],
        # What Thunder makes like a transposed tensor is not transposed, and `as_strided` would read it otherwise.
        lambda y: (torch.full_like(y.t(), 2.0) * y.t()).as_strided((4, 4), (8, 2)),
        lambda y: y.t().masked_fill(y.t() > 1, 0.0).as_strided((8, 2), (4, 1)),
        lambda y: y.unfold(1, 4, 2).sin().sum(-1),
        lambda y: torch.sin(y).masked_scatter(y[:, :1] > 0, y[:, [1, 0, 3, 2, 5, 4, 7, 6]] * 2).exp(),
        lambda y: torch.complex(y, y.sin()).real * y.real + torch.imag(torch.complex(y.cos(), y))[:, :1],
        lambda y: math.prod(y.split(4, 1)) * 2,
    ),
    ids=[
        "all",
        "where",
        "lists",
        "full_like",
        "as_strided",
        "unfold",
        "masked_scatter",
        "parts of complex numbers",
        "prod",
    ],
)
def test_what_thunder_reads_or_lays_out_otherwise(backend, device, fn):
    model = Around(fn).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-6))


@pytest.mark.parametrize(
    "fn",
    [
        lambda y: torch.sin(y).div_(3).t().as_strided((4, 4), (8, 2)) * 2,
        lambda y: torch.einsum("bij,bjk->bik", y.view(4, 2, 4), torch.sin(y).view(4, 4, 2)).view(4, 4) + 1,
        lambda y: y[:, None].repeat_interleave(3, 1).view(12, 8) + 1,
        lambda y: F.nll_loss(y, y.argmin(-1)),
        lambda y: y.view(2, 2, 8).mH @ y.sin().view(2, 2, 8) + y.H @ y,
    ],
    ids=["written before", "einsum", "repeat_interleave", "nll_loss", "mH"],
)
def test_what_thunder_reads_or_lays_out_otherwise_in_inference(backend, device, fn):
    infers_alike(fn, backend, device)


def test_layouts_that_inductor_was_told(backend, device):
    """What Thunder lays out otherwise is copied for Inductor, or refused where a copy would not do."""

    def fn(y):
        z = torch.ops.aten.native_layer_norm(y.t().masked_fill(y.t() > 1, 0.0), (4,), None, None, 1e-5)[0]
        return z.exp() * y.t()  # by layer_norm alone, the bias would have a gradient of zero but for rounding

    trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend, 1e-5)

    def written(y):
        z = y.t().masked_fill(y.t() > 1, 0.0)
        z.as_strided((8,), (1,)).zero_()
        return z

    with pytest.raises(LayoutError, match=r"test_rewrites.py:\d+, .*strides \(1, 8\) .* \(4, 1\) in PyTorch"):
        thunderfx(Around(written).to(device), backend=backend)(torch.randn(4, 8, device=device))


def test_what_is_made_like_a_transposed_tensor_whose_sizes_vary(backend, device):
    """The numbers are drawn in the order of its memory."""

    def fn(x):
        return torch.rand_like(x.transpose(1, 2)) * 2

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for n in (3, 4, 4):
        x, found = torch.ones(2, n, 5, device=device), []
        for each in (fn, graphed):
            torch.manual_seed(n)
            found.append(each(x))
        assert torch.equal(*found) and found[0].stride() == found[1].stride()


def test_sum_of_sizes_that_vary(backend, device):
    def fn(x, y):
        return torch.cat((x, y, x[:1])) * 2, x.new_ones(x.shape[0] + y.shape[0] + 1)

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for n in (3, 4, 4):
        x, y = torch.randn(n, 2, device=device), torch.randn(n + 2, 2, device=device)
        same(graphed(x, y), fn(x, y))
    assert not explain(graphed).outside


def test_spectrograms(backend, device):
    """As losses of audio models have them. Thunder's fallback takes no window by name."""
    window = torch.hann_window(8, device=device)

    def fn(y):
        return torch.stft(y.flatten(), n_fft=8, hop_length=4, window=window, return_complex=True).abs()

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend, 1e-6)
    # The plan of cuFFT is no part of a graph.
    assert one_region_each_way(graphed) if device == "cpu" else not explain(graphed).outside


def test_smallest_and_middle_values(backend, device):
    def fn(y):
        coarse = y.round() + y * 0
        return torch.min(coarse, y.detach().round()) + y.min(1, keepdim=True)[0] * y.median(1).values[:, None]

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend))


def draws(x):
    return x.bernoulli(0.5) * torch.bernoulli(input=x, p=0.3)


def test_a_draw_that_has_no_derivative(backend, device):
    """As SpeechT5 has it. Where its gradient is wanted, PyTorch decides: it raises, but for Inductor's on a GPU."""

    def consistent_dropout(x):
        mask = torch.bernoulli(x[0], p=0.3)
        return torch.where(mask.unsqueeze(0).repeat(4, 1) == 1, x, 0) * 2

    model = Around(consistent_dropout).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(4, 8, device=device), backend))
    graphed = thunderfx(draws, backend=backend)
    for seed in range(4):
        found, x = [], torch.rand(4, 8, device=device)
        for fn in (graphed, draws):
            torch.manual_seed(seed)
            found.append(fn(x))
        same(*found)
    assert not explain(graphed).outside
    if device == "cpu":
        wanted = thunderfx(Around(lambda x: x * torch.bernoulli(x, p=0.3)), backend=backend)
        with pytest.raises(RuntimeError, match="derivative for aten::bernoulli is not implemented"):
            wanted(torch.randn(4, 8)).sum().backward()


def test_stochastic_depth(backend, device):
    """As timm and torchvision have it. The draw is not repeated in the backward."""

    def drop(x):
        kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
        return x * kept.div_(0.5)

    assert one_region_each_way(trains_alike(Around(drop).to(device), lambda: torch.randn(8, 8, device=device), backend))


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
        lambda x: x + torch.zeros(x.shape[1], device=x.device).normal_(0.0, 0.1),
        lambda x: x + torch.empty_like(x).normal_(mean=0.0, std=0.1),
        lambda x: x + x.new_empty(x.shape).exponential_().log(),
        lambda x: x * x.new_empty(8).uniform_(-np.log(2.0), np.log(2.0)).exp(),
        lambda x: x * torch.rand_like(x).uniform_() + torch.rand_like(x),
    ],
    ids=["uniform", "normal", "named", "exponential", "numbers of NumPy's", "what was drawn before"],
)
def test_noise(backend, device, draw):
    """As routers of experts have it."""
    fn = Around(lambda x: torch.sin(draw(x)) * 2).to(device)
    assert one_region_each_way(trains_alike(fn, lambda: torch.randn(8, 8, device=device), backend))


@pytest.mark.parametrize("method", ["bernoulli_", "normal_"])
def test_noise_in_what_others_see(backend, device, method):
    """A buffer, and a part of what the graph makes."""

    def fn(x, noise):
        made = x * 2
        getattr(noise, method)()
        getattr(made[1:3], method)(0.5)
        return made + noise

    graphed = thunderfx(fn, backend=backend)
    found = []
    for each in (fn, graphed):
        torch.manual_seed(3)
        x, noise = torch.randn(8, 8, device=device), torch.zeros(8, 8, device=device)
        found.append([(each(x, noise), noise.clone()) for _ in range(4)])
    assert all(torch.equal(*pair) for calls in zip(*found) for pair in zip(*calls))
    report = explain(graphed)
    assert not report.outside and [len(trace.regions) for trace in report.traces] == [1], report


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.new_empty(x.shape).exponential_().log() + torch.rand_like(x) * 2,
        lambda x: F.gumbel_softmax(x) + torch.randn_like(x),
        lambda x: torch.empty_like(x).uniform_(0.5, 1.0) * F.dropout(x, 0.5),
    ],
    ids=["exponential", "gumbel", "dropout"],
)
def test_draws_keep_their_order(backend, device, draw):
    """Thunder's fusions by data flow would make those first that wait for nothing."""
    if device != "cpu" and "dropout" in draw.__code__.co_names:
        pytest.skip("Thunder's dropout has other numbers on a GPU")
    graphed = thunderfx(draw, backend=backend)
    x = torch.randn(8, 8, device=device)
    for seed in range(3):
        torch.manual_seed(seed)
        found = graphed(x)
        torch.manual_seed(seed)
        same(found, draw(x))


def test_sizes_by_name(backend, device):
    def fn(x):
        y = torch.reshape(x, shape=(4, 2, 2)).permute(dims=(1, 0, 2)).reshape(shape=(-1, 8)).repeat(repeats=(2, 1))
        return y[:1].expand(size=(3, 8)) + x.view(size=(2, 8))[:1]

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend))


def _with_factories(x):
    made = torch.zeros(size=(4, 8), device=x.device), torch.full(size=(4, 8), fill_value=2.0, device=x.device)
    return sum(made, x) + torch.ones(size=(8,), device=x.device)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fn",
    each_and_all(
        _with_factories,
        lambda x: torch.broadcast_to(x, size=(2, 4, 8)) * 2,
        lambda x: x.split(split_size=2)[0] * torch.split(tensor=x, split_size_or_sections=2)[1],
        lambda x: torch.cat([x.mean(axis=0), torch.sum(x, axis=-1, keepdims=True)[:, 0]]),
        lambda x: torch.stack(tensors=[torch.softmax(input=x, dim=0), x]) * torch.tril(input=x, diagonal=1),
        lambda x: torch.where(condition=x > 0, input=x, other=torch.sin(x)) @ torch.argmax(x, axis=0).to(x.dtype),
        lambda x: F.linear(input=torch.matmul(input=x, other=x.T), weight=x.T),
        lambda x: torch.einsum("ij,kj->ik", (x, x.cos()))[:, :1].broadcast_to((4, 8)) * x,
        lambda x: F.linear(x, weight=x, bias=None) * x.std(-1, keepdim=True, unbiased=False),
        lambda x: x * torch.var(x, 0, False) * x.std(1, True)[:, None] * (torch.arange(8, device=x.device) * 7 % 5),
    ),
    ids=[
        "all",
        "factories",
        "broadcast_to",
        "split",
        "axis",
        "stack",
        "where",
        "linear",
        "operands",
        "weight",
        "unbiased",
    ],
)
def test_other_names_of_arguments(backend, device, fn):
    model = Around(fn).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-5))


def test_a_tensor_of_numbers_alone():
    """As Longformer counts its chunks. Another part gets it, as Inductor gets the operator between."""

    def fn(x):
        chunks = torch.div(x.shape[0], 2, rounding_mode="trunc") - 1
        y = torch.sin(x)
        return torch.cumprod(y, 0) * y * chunks, chunks

    graphed = thunderfx(fn, backend="tape")
    for _ in range(3):
        x = torch.randn(8, 8, requires_grad=True)
        twin = x.detach().clone().requires_grad_()
        (found, count), (expected, expected_count) = graphed(x), fn(twin)
        same(count, expected_count)
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)


def test_numbers_that_are_computed_as_tensors(backend, device):
    """As DeBERTa computes its scales and positions. PyTorch would read them on the host."""

    def fn(x):
        n = torch.tensor(min(x.shape[0], 3))
        scale = torch.sqrt(torch.tensor(x.shape[1] * 3, dtype=torch.float))
        positions = torch.clamp(torch.arange(8, device=x.device) + n, min=0, max=n * 2 - 1)
        return (x / scale.to(x.dtype))[:, positions] * torch.arange(8, device=x.device)[4 - n : 4 + n].sum() + (
            x.view(size=(torch.div(16, 2, rounding_mode="trunc"), n + 5)) * n.item()
        )

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(8, 8, device=device), backend)
    assert one_region_each_way(graphed)
    assert all(op.verdict != "eager" for trace in explain(graphed).traces for op in trace.ops)


def test_a_tensor_of_one_number_that_is_written():
    def fn(x):
        n = torch.tensor(2)
        before = n * 3
        n.add_(1)
        return x * n + before

    graphed = thunderfx(fn, backend="tape")
    for _ in range(3):
        x = torch.randn(3, 2)
        same(graphed(x), fn(x))


def _with_sizes(x):
    rows = x.reshape(-1, 8)
    return rows.view(x.size()) + rows.new_ones(x.shape[1:])


def _checkpointed(x):
    return checkpoint(_with_sizes, x, use_reentrant=False)


def _cut(x):
    rows = x.reshape(-1, 8)
    doubled = torch.vmap(lambda row: row * 2)(rows)
    return doubled.view(x.shape) * rows.shape[0] + x.shape[0] * 3


def _largest(x):
    return x.repeat(max(x.shape[0], 3), 1, 1)[: min(x.shape[0], 2)] * max(x.shape[0], 2)


def _fractions(x):
    half, back = int(x.shape[0] * 0.75), int(x.shape[0] * -0.75)
    return x[:half] * float(x.shape[0]) + x.sum(0) * back / x.shape[0] ** 0.5


def _cut_fraction(x):
    half = int(x.shape[0] * 0.75)
    return torch.vmap(lambda row: row * 2)(x[:half]) * half


def _rewritten(x, scale):
    y = torch.sin(x).mul_(x)
    grid = torch.linspace(0, 1, 8, device=x.device)[-100:]
    y = checkpoint(lambda y: nn.Tanh()(y), y, use_reentrant=False)
    return y * grid * scale * torch.round(x.detach())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_functions(backend, device, is_reentrant):
    """All that is rewritten in a graph is in that of such a function. Thunder does not take the constant `scale`."""
    model = Around(lambda x: checkpoint(_rewritten, x, 2.0, use_reentrant=is_reentrant)).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(2, 8, device=device), backend))


class Drops(nn.Module):
    """A checkpointed layer whose results show which ones it has dropped."""

    def __init__(self, drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8, bias=False), drop

    def forward(self, x):
        return checkpoint(lambda x: self.drop(self.linear(x)), x, use_reentrant=False)


@pytest.mark.nightly_after(2)
@pytest.mark.parametrize(
    "drop",
    [F.dropout, lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)), lambda x: x * torch.rand_like(x)],
    ids=["dropout", "bernoulli", "rand_like"],
)
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_checkpointed_function_drops_the_same_in_its_backward(backend, device, dynamo, drop):
    """Thunder draws again there, so that gradients are those of what was not dropped in the forward."""
    model = Drops(drop).to(device)
    options = {"transforms": [cudagraph_transform(backend=backend)]}
    graphed = thunderfx(model, backend=backend) if dynamo else thunder.jit(model, **options)
    for _ in range(4):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        y = graphed(x)
        y.sum().backward()
        kept = (y / model.linear(x)).detach()
        torch.testing.assert_close(x.grad, kept @ model.linear.weight, rtol=1e-3, atol=1e-4)
    assert [r["replays"] for r in regions(graphed)] == [3, 3]


@pytest.mark.parametrize("trains", [True, False])
def test_checkpointed_functions_that_write_in_place(backend, device, trains):
    """Without a gradient, they are part of the graph. Thunder computes them wrong otherwise."""

    def fn(x):
        y = x.detach() * 2
        first = y[0]
        y[:, 0].add_(1)
        return x * first + y * torch.linspace(0, 1, 4, device=x.device)

    graphed = thunderfx(lambda x: checkpoint(fn, x, use_reentrant=False), backend=backend)
    x, y = (torch.ones(2, 4, device=device, requires_grad=trains) for _ in range(2))
    found, expected = graphed(x), fn(y)
    same(found.detach(), expected.detach())
    if trains:
        found.sum().backward()
        expected.sum().backward()
        same(x.grad, y.grad)
    assert ("writes in place in a checkpointed function" in str(explain(graphed))) is trains


@pytest.mark.parametrize(
    "fn",
    [_with_sizes, _checkpointed, _largest, _fractions, _cut_fraction, pytest.param(_cut, marks=pytest.mark.nightly)],
)
@pytest.mark.nightly_after(1)
def test_sizes_that_are_dynamic(backend, device, fn):
    """What gets another tensor's size stays in Thunder. A part gives another one no number, so it trains."""
    rows = iter((2, 3, 3, 2))
    graphed = trains_alike(
        Around(fn).to(device), lambda: torch.randn(next(rows), 2, 8, device=device), backend, dynamic=True
    )
    report = explain(graphed)
    assert not report.outside and bool(report.joined) == (fn in (_cut, _cut_fraction))


def test_a_cache_that_begins_empty(backend, device):
    def grow(x):
        return torch.cat([torch.tensor([], device=x.device), x, x * 2], dim=-2)

    assert one_region_each_way(
        trains_alike(Around(grow).to(device), lambda: torch.randn(2, 3, 8, device=device), backend)
    )


@pytest.mark.parametrize("index", [slice(-100, None), (slice(None), slice(1, 100)), (slice(-9, 9, 2), None)], ids=str)
def test_slices_that_reach_beyond(backend, device, index):
    model = Around(lambda x: x[index] * 2).to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(5, 8, device=device), backend))


def test_slices_that_reach_beyond_a_size_that_changes(backend, device):
    def fn(x):
        return torch.sin(x[:, -8:]) * x[:, :100]

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for size in (5, 6, 7, 5, 6):
        x = torch.randn(3, size, device=device)
        same(graphed(x), fn(x))
    assert not explain(graphed).outside


def divides(x):
    y = torch.sin(x) + 2
    y /= y.sum(-1, keepdim=True)
    return y


def multiplies(x):
    y = torch.sin(x)
    return y.mul_(y.detach() + x)


def routes(x):
    """As a mixture of experts does it."""
    weights, experts = torch.topk(x.softmax(-1), 2, dim=-1)
    weights /= weights.sum(-1, keepdim=True)
    return torch.zeros_like(x).scatter(-1, experts, weights)


def chains(x):
    y = torch.sin(x)
    y *= x
    y.add_(1).clamp_(min=-0.5)
    y[:, :4].exp()
    return y.square_()


def activates(x):
    return F.leaky_relu(torch.sin(x), 0.25, inplace=True)


def corrects(x):
    """As Gemma 3n does."""
    y = x.sin() * 2
    y += x
    y = y.contiguous().type_as(x)
    first = y[0].clone().exp()
    y[1:] += first
    return y


@pytest.mark.parametrize("grad", [True, False])
def test_masks_that_are_combined_in_place(grad):
    """As torchvision's FCOS does."""

    def masked(x):
        inside = x > -1
        inside &= x < 1
        inside |= x > 2
        inside ^= x > 3
        return torch.where(inside, x * 2, x.sin())

    graphed = thunderfx(masked, backend="tape", dynamic=False)
    for _ in range(3):
        x = torch.linspace(-2, 4, 16, requires_grad=grad)
        assert torch.equal(graphed(x), masked(x))
    assert not explain(graphed).outside and not explain(graphed).joined


@pytest.mark.nightly
@pytest.mark.parametrize("fn", each_and_all(corrects, divides, multiplies, routes, chains, activates))
def test_gradients_of_operators_in_place(backend, device, fn):
    """Thunder's own are wrong for these: its backward reads what was overwritten."""
    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend))


def test_what_is_read_under_another_name_is_written_in_place(backend, device):
    def fn(x):
        y = torch.sin(x)
        first = y[0]
        with torch.no_grad():
            y.mul_(2)
        return first * 2 + y.detach()

    model = Around(fn).to(device)
    trains_alike(model, lambda: torch.randn(2, 8, device=device), backend)


class Writes(nn.Module):
    """Writes to its parameter, which Thunder's gradients do not survive, before its use and after it."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.rand(8)), write

    def forward(self, x):
        self.write(self.weight)
        x = torch.sin(x) * self.weight
        self.write(self.weight)
        return x


@torch.no_grad
def decay(weight):
    weight.mul_(0.9)


@torch.no_grad
def decay_part(weight):
    weight[1:].mul_(0.9)


@torch.no_grad
def clear_part(weight):
    weight[1:3] = 0.5


@pytest.mark.parametrize("write", [decay, decay_part, clear_part, lambda weight: weight.data.clamp_(0.2, 0.6)])
@pytest.mark.nightly_after(2)
def test_parameters_written_without_a_gradient(backend, device, write):
    graphed = trains_alike(Writes(write).to(device), lambda: torch.randn(2, 8, device=device), backend)
    assert any("without a gradient, to a tensor that has one" in part.reason for part in explain(graphed).outside)


class WritesBefore(nn.Module):
    """Writes to its parameter before anything else reads it, in a graph that also writes to what it has made."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.rand(8)), write

    def forward(self, x):
        self.write(self.weight)
        y = (torch.sin(x) * self.weight).clone()
        y[0] = x[0]
        return y + self.weight.square()


def clamp_twice(weight):
    weight.data.clamp_(0.2, 0.6)
    weight.data.mul_(0.97)


@torch.no_grad
def normalize_and_decay(weight):
    weight.div_(weight.norm()).mul_(0.9)


@pytest.mark.parametrize("write", [clamp_twice, normalize_and_decay])
def test_parameters_written_without_a_gradient_before_they_are_read(backend, device, write):
    model = WritesBefore(write).to(device)
    twin = copy.deepcopy(model)
    graphed = trains_alike(model, lambda: torch.randn(2, 8, device=device), backend)
    assert one_region_each_way(graphed)
    twin.load_state_dict(model.state_dict())
    model.zero_grad()
    x = torch.randn(2, 8, device=device)
    for call in (graphed, twin):  # the first backward needs what the second forward writes
        loss = (call(x) + call(x)).sum()
        if write is normalize_and_decay:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)
    assert torch.equal(model.weight, twin.weight)


def test_what_the_graph_makes_is_written_without_a_gradient(backend, device):
    def fn(x):
        y = torch.sin(x)
        decay(y)
        return y * x

    trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend)


def test_an_optimizer_stays_in_thunder(backend, device):
    """Nothing in its graph has a gradient that could be lost."""

    @torch.no_grad
    def step(weight, gradient):
        weight.mul_(0.9).add_(gradient, alpha=-0.1)

    graphed = thunderfx(step, backend=backend)
    found, expected = (torch.ones(4, device=device, requires_grad=True) for _ in range(2))
    for _ in range(4):
        gradient = torch.randn(4, device=device)
        graphed(found, gradient)
        step(expected, gradient)
        torch.testing.assert_close(found, expected)
    assert not explain(graphed).outside


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_multi_head_attention_trains(backend, device, dropout):
    """Thunder traces its parts, so bits differ from PyTorch's; with dropout, other elements are dropped."""
    model = Attention(dropout).to(device)
    twin = copy.deepcopy(model)
    graphed = thunderfx(model, backend=backend)
    for _ in range(4):
        x = torch.randn(2, 5, 8, device=device)
        for each in (model, twin):
            each.zero_grad()
        found, expected = graphed(x), twin(x)
        assert found.shape == expected.shape and found.isfinite().all()
        found.square().sum().backward()
        expected.square().sum().backward()
        if not dropout:
            torch.testing.assert_close(found, expected)
            for one, other in zip(model.parameters(), twin.parameters()):
                torch.testing.assert_close(one.grad, other.grad)
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert one_region_each_way(graphed)


# With the least dropout, other kernels run, and nothing is dropped.
@pytest.mark.parametrize("options", [{"enable_gqa": False}, {"is_causal": True}, {"attn_mask": True}], ids=str)
@pytest.mark.nightly_after(1)
def test_attention_by_keywords(backend, device, deterministic, options):
    """As Diffusers does. Without groups, and with a mask."""

    def attend(x):
        q = x.view(2, 5, 4, 2).transpose(1, 2)
        others = {"attn_mask": q[0, 0, :, :1] < 1} if "attn_mask" in options else options
        return F.scaled_dot_product_attention(query=q, key=q.sin(), value=q.cos(), **others)

    graphed = trains_alike(Around(attend).to(device), lambda: torch.randn(2, 5, 8, device=device), backend, 1e-5)
    assert one_region_each_way(graphed)
    assert not explain(graphed).joined


@pytest.mark.parametrize(("width", "dtype"), [(2, torch.float32), (4, torch.bfloat16), (8, torch.float64)])
def test_masked_attention_without_a_fused_kernel(width, dtype):
    """On CUDA, too, Thunder's own is NaN for a row of the mask that is all False, and PyTorch's is zero."""
    graph = torch.fx.Graph()
    tensors = [graph.placeholder(name) for name in ("query", "key", "value", "attn_mask")]
    attention = graph.call_function(F.scaled_dot_product_attention, tuple(tensors))
    with FakeTensorMode():
        for node in (*tensors[:3], attention):
            node.meta["example_value"] = torch.empty(2, 4, 8, width, dtype=dtype, device="cuda")
        tensors[3].meta["example_value"] = torch.empty(8, 8, dtype=torch.bool, device="cuda")
        use_own_operator(attention, {})
    assert attention.target is not F.scaled_dot_product_attention


def test_a_mask_whose_last_dimension_is_not_contiguous():
    """As T5's, a bias by heads that was permuted. Fused kernels need it contiguous."""
    graph = torch.fx.Graph()
    tensors = [graph.placeholder(name) for name in ("query", "key", "value", "attn_mask")]
    attention = graph.call_function(F.scaled_dot_product_attention, tuple(tensors))
    with FakeTensorMode():
        for node in (*tensors[:3], attention):
            node.meta["example_value"] = torch.empty(1, 4, 8, 8, device="cuda")
        tensors[3].meta["example_value"] = torch.empty(8, 8, 4, device="cuda").permute(2, 0, 1).unsqueeze(0)
        use_own_operator(attention, {})
    mask = attention.args[3]
    assert mask.target == "contiguous" and mask.args == (tensors[3],) and mask.meta["example_value"].stride(-1) == 1
    assert attention.target is F.scaled_dot_product_attention


DROPOUTS = [0.0, 1e-30]


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.nightly_after(1)
def test_grouped_query_attention(backend, device, deterministic, dropout):
    """Two heads of queries for each head of keys and values."""

    def attend(x):
        q = x.view(2, 5, 4, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], None, dropout, True, enable_gqa=True)

    model, rounding = Around(attend).to(device), 1e-5 if dropout else 0.0
    graphed = trains_alike(model, lambda: torch.randn(2, 5, 8, device=device), backend, rounding)
    assert one_region_each_way(graphed)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.nightly_after(1)
def test_attention_to_nothing_on_the_cpu(kind, dropout):
    """As of padding on the left: PyTorch has zeros there. On GPUs, Thunder takes PyTorch's kernels."""
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask[..., :2, :] = False
    mask = mask if kind is bool else torch.zeros(1, 1, 5, 5).masked_fill(~mask, -torch.inf)

    def attend(x):
        q = x.view(2, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=dropout)

    graphed = trains_alike(Around(attend), lambda: torch.randn(2, 5, 8), "tape", 1e-5 if dropout else 0.0)
    assert one_region_each_way(graphed)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.nightly
def test_multi_head_attention_to_nothing_on_the_cpu(kind, dropout):
    model = Attention(dropout)
    masks = (torch.ones(5, 5, dtype=torch.bool).triu(1), torch.tensor([[False] * 5, [True] * 2 + [False] * 3]))
    if kind is float:
        masks = tuple(torch.zeros(mask.shape).masked_fill(mask, -torch.inf) for mask in masks)

    def attend(x):
        return model.attention(x, x, x, masks[1], attn_mask=masks[0], need_weights=False)[0]

    graphed = trains_alike(Around(attend), lambda: torch.randn(2, 5, 8), "tape", 1e-5)
    assert one_region_each_way(graphed)


@pytest.mark.nightly
def test_multi_head_attention_with_projections_and_a_boolean_mask(backend, device):
    """As WavLM calls it, without the module that has made masks of floats before."""
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)

    def attend(x):
        weights = {f"{name}_proj_weight": x[0, :1].t() * x[1, :1] for name in "qkv"}
        others = {"key_padding_mask": padding, "use_separate_proj_weight": True, **weights}
        x = x.transpose(0, 1)
        return F.multi_head_attention_forward(
            x, x, x, 8, 2, None, None, None, None, False, 0.0, x[0, :1].t() * x[1, :1], None, True, **others
        )[0]

    graphed = trains_alike(Around(attend).to(device), lambda: torch.randn(2, 5, 8, device=device), backend, 1e-5)
    assert one_region_each_way(graphed)


class Twice(torch.autograd.Function):
    """Its gradients are not those of what it computes."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return torch.tanh(x) * y * factor, x + y

    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad * y * 3 + other, grad * x * ctx.factor + other * 2, None


class TwiceInPlace(Twice):
    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        scaled = grad * y
        scaled.mul_(3)
        return scaled + other.clip(min=-1.0), grad * x * ctx.factor + torch.clip(other, 0.0, 2.0), None


class TwiceOverGiven(Twice):
    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad * y * 3 + other, grad.mul_(x) * ctx.factor + other * 2, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


class Clipped(torch.autograd.Function):
    """Masks joined with ``&`` and ``|``, which are ``operator.and_`` and ``operator.or_`` in a graph of Dynamo's."""

    @staticmethod
    def forward(ctx, x, low):
        ctx.save_for_backward(x)
        ctx.low = low
        return torch.round(x.clamp(low, 1) * 7) / 7

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (((x >= ctx.low) & (x <= 1)) | (x > 3)), None


def test_masks_are_not_written(backend, device):
    def fn(x):
        y = checkpoint(lambda y: torch.where((y > 0) & (y < 1) | (y < -1), y, y * 2), x, use_reentrant=False)
        return Clipped.apply(y, -0.5) + 1

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend)
    assert one_region_each_way(graphed)


class StraightThrough(torch.autograd.Function):
    """Thunder has no gradient of ``round``, which the function does not need."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_an_autograd_function_of_what_has_no_gradient(backend, device):
    fn = StraightThrough.apply
    graphed = trains_alike(
        Around(lambda x: fn(x * 3) + fn(x)).to(device), lambda: torch.randn(2, 8, device=device), backend
    )
    assert one_region_each_way(graphed)


def test_an_autograd_function_with_one_result(backend, device):
    fn = Once.apply
    graphed = trains_alike(Around(lambda x: fn(x) + 1).to(device), lambda: torch.randn(2, 8, device=device), backend)
    assert one_region_each_way(graphed)


def test_an_autograd_function_in_a_checkpointed_function():
    def fn(x):
        return checkpoint(lambda y: torch.sin(Once.apply(y)), x, use_reentrant=False) + 1

    graphed = trains_alike(Around(fn), lambda: torch.randn(2, 8), "tape", 1e-5)
    assert "in a checkpointed function" in explain(graphed).outside[0].reason


@pytest.mark.parametrize("function", [Twice, TwiceInPlace, TwiceOverGiven])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.nightly_after(2)
def test_autograd_functions(backend, device, function, unused):
    """They have the user's gradients. Inductor gets one that writes to what it was given."""

    def fn(x):
        for _ in range(2):
            one, other = function.apply(x * 2, torch.sin(x), 1.5)
            x = one if unused else one + torch.sin(other)
        return x

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend)
    if function is not TwiceOverGiven:
        assert one_region_each_way(graphed)
    else:
        assert {part.operator for part in explain(graphed).outside} == {"autograd_function_apply"}


class WritesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        z = x * y
        z.add_(1)
        z.relu_()
        ctx.save_for_backward(x, y, z)
        return z, z.sum(0)  # Thunder (0.2.6) does not sum the gradient of a number that is a tensor on the CPU

    @staticmethod
    def backward(ctx, grad, other):
        x, y, z = ctx.saved_tensors
        grad = (grad + other) * (z > 0)
        return grad * y, grad * x


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_an_autograd_function_that_writes_its_result(backend, device, is_checkpointed):
    """torch.compile (2.11) calls its backward with zeros."""

    def function_of(x):
        z, total = WritesItsResult.apply(x, torch.cos(x))
        return torch.sin(z) + total

    fn = (lambda x: checkpoint(function_of, x, use_reentrant=False)) if is_checkpointed else function_of
    trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend, 1e-5)


class OfRows(torch.autograd.Function):
    """What it computes depends on how many rows there are."""

    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x, y)
        ctx.rows = x.shape[0]
        return torch.tanh(x).view(-1, 2) * x.shape[0], y * factor

    @staticmethod
    def backward(ctx, grad, other):
        x, y = ctx.saved_tensors
        return grad.view(ctx.rows, -1) * x * ctx.rows, other * y, None


@pytest.mark.parametrize("function", [Twice, OfRows])
@pytest.mark.nightly
def test_autograd_functions_of_dynamic_shapes(backend, device, function):
    def fn(x):
        one, other = function.apply(x * 2, torch.sin(x), 1.5)
        return one.view(x.shape).exp() + other

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for rows in (2, 3, 4, 2, 3):
        x = torch.randn(rows, 4, device=device, requires_grad=True)
        y = x.detach().requires_grad_()
        for one, call in ((x, graphed), (y, fn)):
            call(one).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert not explain(graphed).outside


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (gradient + gradient.T).float() @ x


@pytest.mark.parametrize("case", ["casts nothing", "casts", "sums"])
@pytest.mark.nightly_after(1)
def test_autograd_functions_under_autocast(backend, device, case):
    """The first of `Twice` is bfloat16, and its gradient float32; autograd sums that of the second to its shape."""

    def fn(x):
        with torch.autocast(device, torch.bfloat16) if case != "sums" else nullcontext():
            y = x.sum(1) if case == "sums" else x.tanh()
            return _Product.apply(x).float() if case == "casts" else Twice.apply(x @ x.T, y, 1.5)[0].float()

    # Inductor keeps what it fuses in float32.
    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(8, 8, device=device), backend, rounding=2e-2)
    outside = [part.operator for part in explain(graphed).outside]
    assert outside == ([] if case == "casts nothing" else ["autograd_function_apply"])


@pytest.mark.parametrize("layer", [nn.Hardswish(True), nn.SiLU(True)], ids=repr)
def test_layers_in_place(backend, device, layer):
    """They pass `inplace` by position. Thunder's gradients of them would be wrong."""

    def fn(x):
        return layer(torch.sin(x) * 3) * 2

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend))


def test_dropout_in_place(backend, device):
    """Thunder refuses it, in inference, too. Out of place, it draws the same."""
    compiled = [
        thunderfx(lambda x, i=in_place: F.dropout(torch.sin(x), 0.5, True, i) * 2, backend=backend)
        for in_place in (True, False)
    ]
    with torch.no_grad():
        for step in range(4):
            x, found = torch.randn(4, 8, device=device), []
            for each in compiled:
                torch.manual_seed(step)
                found.append(each(x))
            same(*found)
    assert not explain(compiled[0]).outside and len(explain(compiled[0]).traces[0].regions) == 1


@pytest.mark.parametrize("fn", [F.max_pool2d, F.max_pool1d])
@pytest.mark.nightly_after(1)
def test_pooling_with_ceil_mode(backend, device, fn):
    """Thunder's symbol refuses it."""

    def pools(x):
        x = x.view(1, 2, 8) if fn is F.max_pool1d else x.view(1, 2, 2, 4)
        name = fn(x, 3, stride=2, ceil_mode=True)  # Dynamo names the value by the operator
        return name * fn(x, 2)[..., :1]

    assert one_region_each_way(
        trains_alike(Around(pools).to(device), lambda: torch.randn(2, 8, device=device), backend)
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fn",
    each_and_all(
        lambda x: F.avg_pool2d(x[None], 3, stride=1, padding=1, count_include_pad=False) * 2,
        lambda x: x.repeat_interleave(2, dim=0, output_size=4) * 2,
        lambda x: torch.repeat_interleave(x, 3, -1) * 2,
        lambda x: torch._weight_norm(x, x[:, :1], 0) * 2,
        lambda x: x.norm(p=2, dim=-1, keepdim=True) * torch.norm(x, dim=0),
        lambda x: F.embedding(torch.zeros_like(x).int(), x, padding_idx=-2).sum(-1) * 2,
        lambda x: (
            torch.scatter_reduce(x, dim=1, index=x.argsort(1), src=x.sin(), reduce="amax", include_self=False) * 2
        ),
    ),
    ids=[
        "all",
        "avg_pool2d",
        "repeat_interleave",
        "repeat_interleave of the last",
        "weight_norm",
        "norm",
        "embedding",
        "scatter_reduce",
    ],
)
def test_arguments_that_thunder_refuses(backend, device, fn):
    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(2, 8, device=device), backend))


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("options", [{}, {"executors": executors()}], ids=["as it is", "fused"])
def test_rms_norm(backend, device, options):
    """It has PyTorch's bits, and where Inductor fuses, it is fused with what is around it."""
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, 1e-3, elementwise_affine=False))
    model = model.to(device, torch.bfloat16)
    twin = copy.deepcopy(model)
    graphed = thunderfx(model, backend=backend, **options)
    for _ in range(4):
        x = torch.randn(3, 8, device=device, dtype=torch.bfloat16) / 1000  # the default of eps shows
        found = [each(x) for each in (graphed, twin)]
        for result in found:
            result.sum().backward()
        bits = {"rtol": 0.05, "atol": 0.01} if options else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(*found, **bits)
        for one, other in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(one.grad, other.grad, **bits)
    assert one_region_each_way(graphed) or options
    assert any("rms_norm" in op.name for trace in explain(graphed).traces for op in trace.ops) is not bool(options)


def test_a_gradient_of_what_is_passed_by_name():
    """Thunder's fallbacks refuse it."""

    def fn(x):
        rows = x.detach().argsort(1)
        return torch.zeros_like(x).scatter_reduce(src=x.sin(), dim=1, index=rows, reduce="amax", include_self=False) * 2

    graphed = thunderfx(fn, backend="tape")
    for _ in range(2):
        x = torch.randn(2, 8, requires_grad=True)
        y = x.detach().requires_grad_()
        for each, call in ((x, graphed), (y, fn)):
            call(each).sum().backward()
        same(x.grad, y.grad)
    assert not explain(graphed).outside


def test_repeats_that_a_tensor_holds_are_left_alone():
    repeats = torch.tensor([1, 2])
    graphed = thunderfx(lambda x: (x + 1).repeat_interleave(repeats, dim=0, output_size=3), backend="tape")
    for _ in range(3):
        x = torch.randn(2, 4)
        same(graphed(x), (x + 1).repeat_interleave(repeats, dim=0))
    assert [part.operator for part in explain(graphed).outside] == ["repeat_interleave"]


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "mean"}, {"label_smoothing": 0.1}])
@pytest.mark.nightly_after(1)
def test_cross_entropy(backend, device, options):
    """Of a sum, as in Transformers' `Trainer`, Thunder's gradient raises. Its mean of smoothed losses is wrong."""
    is_own = options != {"reduction": "mean"}
    labels = torch.tensor([3, -100, 0], device=device)
    model = Around(lambda y: F.cross_entropy(y, labels, ignore_index=-100, **options) / 2)
    rounding = 0.0 if is_own else 1e-5
    graphed = trains_alike(model.to(device), lambda: torch.randn(3, 8, device=device), backend, rounding)
    assert one_region_each_way(graphed)
    names = [op.name for trace in explain(graphed).traces for op in trace.ops]
    assert any(name.startswith("torch_ops_cross_entropy") for name in names) == is_own


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.nightly_after(2)
def test_losses_of_weighted_classes(backend, device, loss, reduction):
    """Of sequences. Thunder's `nll_loss` has another default of what is ignored."""
    labels, weight = torch.tensor([[3, -100], [0, 1]], device=device), torch.rand(4, device=device)
    fn = Around(lambda y: loss(y.view(2, 4, 2), labels, weight=weight, reduction=reduction) / 2).to(device)
    assert one_region_each_way(trains_alike(fn, lambda: torch.randn(2, 8, device=device), backend))


def test_thunders_gradient_of_a_cross_entropy_of_a_sum_still_raises():
    """When it does not any more, `cross_entropy` can go from `dynamo/operators.py`."""
    loss = thunder.jit(lambda y, labels: F.cross_entropy(y, labels, reduction="sum"))
    with pytest.raises(RuntimeError, match="expected scalar type"):
        loss(torch.randn(3, 8, requires_grad=True), torch.tensor([3, 1, 0])).backward()


def test_own_operators_do_not_hide_autocast():
    """Attention is computed in bfloat16 there."""

    def attend(x):
        q = x.view(2, 5, 4, 2).transpose(1, 2)
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, q[:, :2], q[:, 2:], enable_gqa=True)

    graphed = thunderfx(attend, backend="tape")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(2, 5, 8)
            same(graphed(x), attend(x))
    assert not explain(graphed).outside


class Experts(nn.Module):
    """A mixture of experts: each group of rows has a matrix of its own, and the call says where groups end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 32, dtype=torch.bfloat16))

    def forward(self, x, ends):
        return torch._grouped_mm(x * 2, self.weight, offs=ends) * 2


def test_grouped_matmul(backend, device):
    model = Experts().to(device)
    twin = copy.deepcopy(model)
    graphed = thunderfx(model, backend=backend)
    for ends in ((4, 8, 12, 16), (0, 0, 16, 16), (1, 2, 3, 16), (16, 16, 16, 16)):
        x = torch.randn(16, 16, dtype=torch.bfloat16, device=device)
        ends = torch.tensor(ends, dtype=torch.int32, device=device)
        for each in (model, twin):
            each.zero_grad()
        found, expected = graphed(x, ends), twin(x, ends)
        same(found.detach(), expected.detach())
        found.sum().backward()
        expected.sum().backward()
        same(model.weight.grad, twin.weight.grad)
    assert one_region_each_way(graphed)


@pytest.mark.parametrize(("limits", "captured"), [({"min": 0, "max": 7}, True), ({}, False)], ids=["range", "no range"])
def test_histogram(backend, device, limits, captured):
    """How many tokens go to each expert."""

    def fn(x):
        return torch.histc((x * 2).to(torch.float32), bins=8, **limits) * 2

    graphed = thunderfx(fn, backend=backend)
    for _ in range(4):
        x = torch.randint(0, 4, (64,), device=device)
        same(graphed(x), fn(x))
    assert not explain(graphed).outside
    eager = [op.name for trace in explain(graphed).traces for op in trace.ops if op.verdict == "eager"]
    assert ("torch.histc" not in eager) is captured


@pytest.fixture(scope="module")
def twice():
    @torch.library.custom_op("thunder_cg_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, gradient: gradient * 2)
    return torch.ops.thunder_cg_tests.twice


@pytest.mark.parametrize(
    "allow", [(), ("thunder_cg_tests.twice", "thunder_cg_tests.twice_vjp")], ids=["eager", "allowed"]
)
def test_operators_of_torch_library(backend, device, twice, allow):
    model = Around(lambda x: torch.sin(twice(torch.cos(x)))).to(device)
    graphed = trains_alike(model, lambda: torch.randn(2, 8, device=device), backend, allow=allow)
    if allow:
        assert one_region_each_way(graphed)
    else:
        assert not explain(graphed).outside and "thunder_cg_tests::twice" in str(explain(graphed))


def test_operators_of_torch_library_without_a_gradient():
    """Nothing asks for one: plain PyTorch runs it, too."""

    @torch.library.custom_op("thunder_cg_tests::half", mutates_args=())
    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    half.register_fake(torch.empty_like)
    model = Around(lambda x: torch.sin(x) + torch.ops.thunder_cg_tests.half(x.detach()))
    graphed = trains_alike(model, lambda: torch.randn(2, 8), "tape", allow=["thunder_cg_tests::half"])
    assert one_region_each_way(graphed)


def test_operators_of_torch_library_that_return_a_scalar():
    @torch.library.custom_op("thunder_cg_tests::total", mutates_args=())
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    total.register_fake(lambda x: x.new_empty(()))
    total.register_autograd(
        lambda ctx, gradient: gradient.expand(ctx.shape),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
    )
    trains_alike(
        Around(lambda x: torch.sin(x) / torch.ops.thunder_cg_tests.total(x)), lambda: torch.randn(2, 8), "tape"
    )


def test_operators_of_torch_library_that_write_are_left_alone(twice):
    @torch.library.custom_op("thunder_cg_tests::double_", mutates_args=("x",))
    def double_(x: torch.Tensor) -> None:
        x.mul_(2)

    def fn(x):
        y = x + 1
        torch.ops.thunder_cg_tests.double_(y)
        return torch.sin(y)

    graphed = thunderfx(fn, backend="tape")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4)
            torch.testing.assert_close(graphed(x), fn(x))
    assert any("double_" in part.operator for part in explain(graphed).outside)


def test_an_operator_whose_author_says_that_no_graph_can_hold_it():
    """Also if it is allowed: that is not for its user to say."""

    @torch.library.custom_op("thunder_cg_tests::reads_host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    def reads_host(x: torch.Tensor) -> torch.Tensor:
        return x + float(x.sum())

    reads_host.register_fake(torch.empty_like)
    graphed = thunderfx(
        lambda x: torch.ops.thunder_cg_tests.reads_host(x * 2) + 1,
        backend="tape",
        allow=["torch_ops.thunder_cg_tests.reads_host"],
    )
    for _ in range(4):
        x = torch.randn(4)
        same(graphed(x), torch.ops.thunder_cg_tests.reads_host(x * 2) + 1)
    assert "is tagged torch.Tag.cudagraph_unsafe by its author" in str(explain(graphed))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.empty(4, 8, device=x.device).fill_(2.5) * x,
        lambda x: x.new_zeros(4, 8, dtype=torch.bool).fill_(True) * x,
        lambda x: x.fill_(3) * 2 + x[:1].cumprod_(1),
        lambda x: (y := torch.sin(x), y[1:].index_fill_(1, torch.arange(3, device=x.device), 0.5))[0] * 2,
    ],
    ids=["fill_", "bool", "argument", "view"],
)
@pytest.mark.nightly_after(2)
def test_writes_that_thunder_has_no_symbol_for(backend, device, fn):
    graphed = thunderfx(fn, backend=backend)
    for _ in range(4):
        x = torch.randn(4, 8, device=device)
        y = x.clone()
        same(graphed(x), fn(y))
        same(x, y)
    assert not explain(graphed).outside and [r["replays"] for r in regions(graphed)] == [3]


def reshapes(x):
    y = torch.sin(x)
    y.unsqueeze_(1).transpose_(0, 2)
    y.mul_(3)
    return torch.exp(y.squeeze(1))


@pytest.mark.parametrize("trains", [False, True])
def test_shapes_that_change_in_place(backend, device, trains):
    if trains:
        model = Around(reshapes).to(device)
        assert one_region_each_way(trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-6))
        return
    infers_alike(reshapes, backend, device)


def test_writes_without_a_gradient_that_thunder_cannot_differentiate(backend, device):
    def fn(y):
        steps = y.detach() * 3
        return steps.round_().lerp_(steps, 0.5) * y

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend))


class Averages(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x):
        y = self.linear(x)
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return (y - self.mean).square()


def test_a_buffer_that_is_written_by_what_thunder_cannot_differentiate(backend, device):
    model = Averages().to(device)
    assert one_region_each_way(trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-5))


def test_inference_mode_inside(backend, device):
    """Thunder enters it while it traces, and stays there."""

    def fn(x):
        with torch.inference_mode():
            scale = x.abs().mean()[None]
            with torch.inference_mode(False):
                scale = scale * 2
        return x * scale.clone()

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend, 1e-6)
    assert one_region_each_way(graphed) and not torch.is_inference_mode_enabled()


class Momentum(nn.Module):
    """As in MoCo, whose second encoder follows the first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.follower = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        before = self.follower * x
        with torch.no_grad():
            self.follower.data = self.follower.data * 0.5 + self.weight.data
        return self.weight * self.follower + before


def test_other_memory_for_a_parameter(backend, device):
    """Inductor loses it where it compiles a part of a graph alone."""
    model = Momentum().to(device)
    graphed = trains_alike(model, lambda: torch.randn(4, 8, device=device), backend)
    assert model.follower[0] == 2 - 0.5**3
    assert "write x.data.copy_(y)" in str(explain(graphed))


def _copy_(y, x):
    y[:, :2].copy_(x[:, 2:4])
    y[:, 2:4].copy_(x[:, :2] * 3)


def _add_(y, x):
    y[:, 0].add_(x[:, 1] ** 2)


def _masked_fill_(y, x):
    y[:, :2].masked_fill_(x[:, :2] > 0, 0.5)


def _zero_(y, x):
    y[0].zero_()


def _exp_(y, x):
    y[1].exp_()


def _copy_without_waiting_(y, x):
    y[:, :2].copy_(x[:, 2:4], True)


def _copy_by_name_(y, x):
    y[:, :2].copy_(x[:, 2:4], non_blocking=True)


def _fill_(y, x):
    y[:, 0].fill_(0.5)


def _twice(y, x):
    part = y[:, :2]
    part.mul_(2)
    part.add_(x[:, :2] ** 2)


_WRITES = (_copy_, _copy_by_name_, _copy_without_waiting_, _add_, _masked_fill_, _zero_, _fill_, _twice, _exp_)


def _all_writes(y, x):
    for write in _WRITES:
        write(y, x)


@pytest.mark.parametrize("write", [_all_writes, *_WRITES])
@pytest.mark.nightly_after(1)
def test_slices_written_in_place(backend, device, write):
    """Thunder loses the gradient of what is written through a view, without a word."""

    def fn(x):
        y = x * 2
        write(y, x)
        return y * x

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend))


def _multiplied(y, x):
    y[0] *= x[1]


def _divided_(y, x):
    y[:, 0].div_(x[:, 1].exp())


def _sine_(y, x):
    y[1].sin_()


@pytest.mark.parametrize("write", [_multiplied, _divided_, _sine_])
def test_what_the_backward_reads_of_a_slice_that_is_overwritten(backend, device, write):
    """PyTorch copies it, too."""

    def fn(x):
        y = x.sin()
        write(y, x)
        return y * 2

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend))


def test_a_slice_that_gets_another_shape_in_place():
    """Nothing is written then, so the write is no item."""

    def fn(x):
        part = (x * 2)[0]
        part.unsqueeze_(0)
        return torch.sin(part) * 2

    graphed = thunderfx(fn, backend="tape")
    x = torch.randn(3, 4, requires_grad=True)
    try:
        same(graphed(x), fn(x))
    except RuntimeError as error:
        assert "is a view and is being modified inplace" in str(error)  # noqa: PT017
    finally:
        torch.set_grad_enabled(True)


def _narrow(x, w):
    x.narrow(1, 1, 2).copy_(w[:2, :2])
    return x * 2


def _swapaxes(x, w):
    y = w * 2
    view = y.swapaxes(0, 1)
    y += x
    return view


def _detach(x, w):
    y = x * 2
    y.detach().clamp_(min=0)
    return y


def _ravel(x, w):
    y = x * 2
    y.ravel().mul_(x.ravel())
    return y + 1


def _read_before(x, w):
    y = torch.sin(x)
    x.copy_(torch.cos(x))
    return y * w


@pytest.mark.parametrize("fn", [_narrow, _swapaxes, _detach, _ravel, _read_before])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.nightly_after(4)
def test_writes_and_reads_in_their_order(backend, device, fn, grad):
    """Thunder's fusions by data flow may move a write; and Thunder does not know that ``ravel`` makes a view."""
    graphed = thunderfx(fn, backend=backend)
    w, v = (torch.ones(4, 4, device=device, requires_grad=grad and fn is not _narrow) for _ in range(2))
    for _ in range(3):
        x = torch.randn(2 if fn is _narrow else 4, 4, device=device)
        y = x.clone()
        found, expected = graphed(x, w), fn(y, v)
        same((found.detach(), x), (expected.detach(), y))
        if expected.requires_grad:
            found.sum().backward()
            expected.sum().backward()
            same(w.grad, v.grad)


def test_what_an_operator_in_place_returns_is_no_view(backend, device):
    """Inductor would get the second write, and its gradient would be lost between the pieces."""

    def fn(x, w):
        x.sub_(w).index_copy_(0, torch.tensor([0], device=x.device), w[:1])
        return torch.sin(x)

    graphed = thunderfx(fn, backend=backend)
    w, v = (torch.ones(4, 4, device=device, requires_grad=True) for _ in range(2))
    for _ in range(3):
        x = torch.randn(4, 4, device=device)
        found, expected = graphed(x.clone(), w), fn(x.clone(), v)
        same(found.detach(), expected.detach())
        found.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(w.grad, v.grad)


@pytest.mark.parametrize("number", [-1, 0.5, -0.0, True, [2], [[0.1, 0.1]]])
@pytest.mark.nightly_after(2)
def test_tensors_of_one_number(backend, device, number):
    """As a cache of Transformers has them: a copy from the host would be eager."""

    def fn(x):
        return torch.sin(x) * torch.tensor(number, device=x.device)

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(3, 2, device=device)
        same(graphed(x), fn(x))
    report = explain(graphed)
    assert not report.outside and all(op.verdict != "eager" for op in report.traces[0].ops), report


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize(
    "add",
    [
        lambda y, rows, x: y.index_add(0, rows, x),
        lambda y, rows, x: torch.index_add(y, 0, rows, x, alpha=2),
        lambda y, rows, x: y.index_add_(0, rows, x),
        lambda y, rows, x: torch.zeros_like(y).index_add_(0, rows, x),
    ],
)
def test_index_add_is_captured(backend, device, add):
    """Thunder's symbol has no gradient."""
    rows = torch.tensor([2, 0, 2, 1], device=device)

    def fn(x):
        return add(x * 2, rows, x.cos()) * x

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(4, 8, device=device), backend)
    assert one_region_each_way(graphed)


def test_index_fill_is_captured(backend, device):
    index = torch.tensor([2, 0], device=device)
    fn = Around(lambda x: torch.cos(x.index_fill(0, index, 2.0))).to(device)
    assert one_region_each_way(trains_alike(fn, lambda: torch.randn(4, 8, device=device), backend))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.nightly_after(1)
def test_index_put_is_captured(backend, device, accumulate):
    """Thunder's gradient of it is wrong."""
    rows = torch.tensor([0, 1], device=device)

    def fn(x):
        named = x.index_put(indices=(rows,), values=x[1:].cos(), accumulate=accumulate)
        return (x * 2).index_put((rows,), x[:2].sin(), accumulate=accumulate) * named

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend))


def test_index_put_of_what_a_mask_selects_is_left_to_inductor(backend, device):
    rows = torch.tensor([True, True, False], device=device)

    def fn(x):
        return (x * 2).index_put((rows,), x[:2].sin()) * x

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend)
    assert [part.operator for part in explain(graphed).outside] == ["index_put"]


def _divide(b, w, x):
    x /= 2
    return x.exp() + x


def _copy_to(b, w, x):
    b.copy_(w * 2)
    return b.exp()


def _write_item_of(b, w, x):
    b[:, :2] = w[:, :2] * 2
    return b.exp()


def _add_to_item_of(b, w, x):
    x[:, 0] += 2 * w[:, 0]
    return x.exp() + x


def _relu_in_place(b, w, x):
    F.relu(x, inplace=True)
    return x * w


def _write_view_of(b, w, x):
    x.t().mul_(w)
    return x * w


@pytest.mark.parametrize("fn", [_divide, _copy_to, _write_item_of, _add_to_item_of, _relu_in_place, _write_view_of])
@pytest.mark.nightly_after(2)
def test_gradients_of_arguments_that_are_written(backend, device, fn):
    """As a graph gets them after a graph break."""

    def trained(call):
        w = torch.linspace(0, 1, 16, device=device).view(4, 4).requires_grad_()
        b, x = torch.ones(4, 4, device=device), w * 3 - 1
        loss = call(b, w, x).sum() + b.sum() * 3 + x.sum() * 5
        loss.backward()
        return loss.detach(), w.grad

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        for found, expected in zip(trained(graphed), trained(fn)):
            same(found, expected)


def _item_of_cut(y, x):
    y[torch.arange(1)] = x[1:2] ** 2


def _sum_of_cut(y, x):
    y.add_(x)
    F.relu(y, inplace=True)


def _view_of_cut(y, x):
    y.view(-1)[1:3] = x[0, :2]


def _named_otherwise(y, x):
    before = y.detach()
    y[0] = x[0]
    y.add_(before)


@pytest.mark.parametrize("write", [_named_otherwise, _item_of_cut, _sum_of_cut, _view_of_cut])
@pytest.mark.parametrize("is_inductors", [False, True])
@pytest.mark.nightly_after(2)
def test_gradients_of_what_another_piece_made_and_a_piece_writes(monkeypatch, backend, device, write, is_inductors):
    """An argument of the piece that writes, whose gradient Thunder would leave as it was before the write."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)
    rows = torch.tensor([True, True, False], device=device)

    def fn(x):
        y = x * 2
        z = y.index_put((rows,), x[:2] * 2)  # left to Inductor
        if is_inductors:
            y = z
        write(y, x.sin())
        return y.cos() + x

    graphed = trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend)
    assert {"index_put", "setitem"} & {part.operator for part in explain(graphed).outside}


def _item_before(y, x):
    v = y[0]
    y.mul_(2)
    return v


def _view_before(y, x):
    v = y.view(-1)
    y[0] = x[1] ** 2
    return v


def _view_of_view_before(y, x):
    v = y[:2].t()
    y += x
    return v


@pytest.mark.parametrize("write", [_item_before, _view_before, _view_of_view_before])
@pytest.mark.nightly_after(1)
def test_a_view_that_is_read_after_a_write_to_its_memory(backend, device, write):
    """Thunder gives the view the gradient that it had before the write."""

    def fn(x):
        y = x * 2
        return torch.cat([write(y, x).sin().flatten(), y.cos().flatten()])

    trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend)


def test_a_part_that_is_written_and_read_as_the_whole(monkeypatch, backend, device):
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: graph)

    def fn(x):
        y = x.sin()
        F.relu(y[0], inplace=True)
        return y * 2

    trains_alike(Around(fn).to(device), lambda: torch.randn(3, 8, device=device), backend)


def test_tensors_made_of_numbers(backend, device):
    """Thunder has no symbol for these, and would raise."""

    def fn(x):
        grid = torch.linspace(0, 1, 8, device=x.device) * torch.hann_window(8, dtype=torch.float32, device=x.device)
        rows, columns = torch.triu_indices(8, 8, 1, device=x.device)
        return x * grid + torch.eye(8, device=x.device)[rows, columns].sum()

    assert one_region_each_way(trains_alike(Around(fn).to(device), lambda: torch.randn(8, 8, device=device), backend))


def test_a_function_that_thunder_does_not_know_is_left_to_inductor(backend, device):
    def fn(x):
        y = torch.tanh(x)[torch.randperm(8, device=x.device)].sort(0).values * 2
        return y.unfold(0, 4, 2) * 2

    graphed = thunderfx(fn, backend=backend)
    x = torch.randn(8, device=device)
    torch.testing.assert_close(graphed(x), (torch.tanh(x).sort().values * 2).unfold(0, 4, 2) * 2)
    assert [part.operator for part in explain(graphed).outside] == ["randperm"]


def test_a_float_whose_value_an_operator_has_to_know(backend, device):
    """The p of a dropout that a schedule changes: Dynamo compiles for each value, and reads it from a tensor."""
    dropped = thunderfx(lambda x, p: F.dropout(torch.sin(x), p).cos(), backend=backend)
    x = torch.ones(4, 8, device=device)
    for p in (0.1, 0.2, 0.3, 0.3, 0.3, 0.3):
        torch.manual_seed(0)
        result = dropped(x, p)
        torch.manual_seed(0)
        same(result, F.dropout(torch.sin(x), p).cos())
    report = explain(dropped)
    assert sum(trace.replays for trace in report.traces) == 2 and not report.causes


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.nightly_after(1)
def test_padding_modes(backend, device, mode):
    fn = Around(lambda x: F.pad(x, (1, 2), mode=mode).sin()).to(device)
    assert one_region_each_way(trains_alike(fn, lambda: torch.randn(2, 3, 8, device=device), backend, 1e-5))


@pytest.mark.nightly
def test_spectral_norm(backend, device):
    """It iterates in place, with out=, on buffers. A product of vectors is a number on the CPU, which Inductor gets."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh()).to(device)
    graphed = trains_alike(model, lambda: torch.randn(4, 8, device=device), backend, 1e-5)
    assert {part.operator for part in explain(graphed).outside} <= {"vdot"}


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("padding", [False, True])
def test_transformer_encoder_in_inference(backend, device, padding):
    """Without gradients, PyTorch runs each layer as one operator."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).eval()
    mask = (torch.arange(5, device=device) > 3).expand(3, 5) if padding else None
    graphed = thunderfx(model, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 5, 8, device=device)
            same(graphed(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask))
    assert not explain(graphed).outside
    assert [len(trace.regions) for trace in explain(graphed).traces] == [1]


def test_a_check_of_values_on_the_host(backend, device):
    """Inductor gets the operator, and Thunder what is around it."""
    window = torch.hann_window(16, device=device)

    def fn(x):
        spectrum = torch.stft(x.sin(), 16, 4, window=window, return_complex=True)
        return torch.istft(spectrum * 1.5, 16, 4, window=window, length=64).cos() * 2

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(2, 64, device=device)
        torch.testing.assert_close(graphed(x), fn(x))
    assert [part.operator for part in explain(graphed).outside] == ["istft"]
    assert explain(graphed).traces and "on the host" in explain(graphed).outside[0].reason


def test_nan_to_num_by_keyword(backend, device):
    def fn(x):
        y = torch.nan_to_num(x.log(), nan=0.5)
        return y + (1 / x.round()).nan_to_num(neginf=-1.0, posinf=1.0) + torch.nan_to_num(y)

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        same(graphed(x), fn(x))
    assert not explain(graphed).outside and len(explain(graphed).traces) == 1


def test_a_mask_as_index(backend, device):
    def fn(x):
        bias = torch.zeros_like(x)
        bias[x > 0] = -torch.inf
        bias[x[:, :1].expand(x.shape) < -9] = 2
        return torch.softmax(x.sin() + bias, -1), bias[0]

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        same(graphed(x), fn(x))
    (trace,) = explain(graphed).traces
    assert len(trace.regions) == 1 and not trace.counts["eager"]


def test_all_strides_of_a_tensor_whose_sizes_vary(backend, device):
    """As Longformer's overlapping chunks have them. Inductor gets the strides, and one that is a number is written."""

    def fn(x):
        y = x.sin().transpose(0, 1) * 2
        stride = list(y.stride())
        columns = torch.arange(end=y.shape[-1], device=x.device)
        return y.as_strided((3, 2, 6), (stride[0] // 2, *stride[1:])).cos() + columns

    graphed = thunderfx(fn, backend=backend, dynamic=True)
    for n in (2, 3, 3, 3):
        x = torch.randn(n, 4, 6, device=device)
        same(graphed(x), fn(x))
    report = explain(graphed)
    assert {part.operator for part in report.outside} == {"stride"} and all(part.line for part in report.outside)
    assert {len(trace.regions) for trace in report.traces if trace.calls} == {1}


def test_defaults_that_thunder_has_no_names_for(backend, device):
    """As TorchVision's poolers and DETR's loss have them, and `Module.to`."""

    def fn(x):
        y = torch.full_like(x, 3.0, dtype=x.dtype, layout=torch.strided, device=x.device)
        y = y + torch.zeros(4, 8, layout=torch.strided, device=x.device, pin_memory=False, requires_grad=False)
        return y * x.to(x.device, None, False) + x.to(x.device, torch.float64, False).sin().float()

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x = torch.randn(4, 8, device=device)
        same(graphed(x), fn(x))
    report = explain(graphed)
    assert not report.outside and [len(trace.regions) for trace in report.traces] == [1]


def test_a_number_at_indices_of_a_tensor(backend, device):
    def fn(x, last):
        mask = torch.zeros(x.shape, dtype=torch.long, device=x.device)
        mask[torch.arange(len(x), device=x.device), last] = 1
        bias = torch.zeros_like(x)
        bias[:, last] = -0.5
        return x * mask.flip(-1).cumsum(-1).flip(-1) + bias

    graphed = thunderfx(fn, backend=backend)
    for _ in range(3):
        x, last = torch.randn(4, 8, device=device), torch.randint(8, (4,), device=device)
        same(graphed(x, last), fn(x, last))
    (trace,) = explain(graphed).traces
    assert len(trace.regions) == 1 and not trace.counts["eager"]


def test_numbers_are_computed_early_in_their_order():
    sizes = FakeTensorMode(shape_env=ShapeEnv())
    tensor = sizes.from_tensor(torch.ones(3, 5), static_shapes=False)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    relu = graph.call_function(torch.relu, (x,))
    rows, columns = (graph.call_method("size", (x, i)) for i in range(2))
    product = graph.call_function(operator.mul, (columns, rows))
    graph.output(graph.call_method("reshape", (relu, product)))
    values = (tensor, tensor, *tensor.size(), tensor.numel())
    for node, value in zip((x, relu, rows, columns, product), values):
        node.meta["example_value"] = value
    compute_numbers_first(graph)
    graph.lint()
    assert [*graph.nodes][1:5] == [rows, columns, product, relu]
