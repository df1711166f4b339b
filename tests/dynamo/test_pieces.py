"""Pieces of Inductor's that are operators of the trace around them."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from support import regions, same
from torch import nn

from thunder_cg import explain, thunderfx
from thunder_cg.dynamo.pieces import _runs

nightly = pytest.mark.nightly


def _norms(rows):
    return torch.vmap(lambda row: (row * row.cos()).sum())(rows)


def _one(x, w):
    return (_norms(x.sin() @ w).tanh() * 2).sin()


def _two(x, w):
    y = x.sin() @ w
    z = _norms(y)
    return (_norms((z.exp().unsqueeze(1) * y).tanh()).cos() + z).sin(), y.tanh()


def _first(x, w):
    return (_norms(w) * 3).sin() @ x.t().sum(1, keepdim=True)[: w.shape[0]]


def _last(x, w):
    return _norms((x @ w).tanh())


def _written_inside(x, w):
    y = (x @ w).tanh()
    return torch.vmap(lambda row: row.clone().mul_(2).add_(row))(y) * y


def _written_after(x, w):
    y = torch.vmap(lambda row: row * 2)(x @ w)
    with torch.no_grad():
        y = y.detach().add_(1)
    return y * (x @ w)


def _view(x, w):
    y = torch.vmap(lambda row: (row * 2).view(2, 4).t())(x @ w)
    return y.sin(), y


def _places(x, w):
    values, places = torch.vmap(lambda row: row.max(0))(x @ w)
    return values.exp(), places


def _saved_arguments(x, w):
    return torch.vmap(lambda row: (row.unsqueeze(0) @ w).squeeze(0))(x.sin()).tanh()


def _without_gradient(x, w):
    y = x @ w
    with torch.no_grad():
        z = _norms(y)
    return z.unsqueeze(1) * y


def _detached(x, w):
    y, z = torch.vmap(lambda row: (row * 2, row.detach().sin()))(x @ w)
    return y.exp(), z


def _looked_up(x, w):
    y = x @ w
    scale = torch.vmap(lambda place: x[0][place].exp())(y.detach().argmax(1))
    return (y * scale.unsqueeze(1)).sin()


def _list(x, w):
    return torch.nn.utils.rnn.pad_sequence([x @ w, (x @ w).sin()]).tanh()


def _results(function, x, w, *numbers):
    w = w.clone().requires_grad_()
    torch.manual_seed(1)
    found = function(x.clone(), w, *numbers)
    found = found if isinstance(found, tuple) else (found,)
    if tracked := [each for each in found if each.requires_grad]:
        torch.autograd.backward(
            tracked, [torch.linspace(0, 1, each.numel(), device=each.device).view(each.shape) for each in tracked]
        )
    return [*(each.detach().clone() for each in found), w.grad, *(each.requires_grad for each in found)]


FUNCTIONS = [
    _one, _two, _first, _last, _written_inside, _written_after, _view, _places, _saved_arguments, _without_gradient,
    _detached, _looked_up, _list,
]  # fmt: skip


@pytest.mark.parametrize(
    ("grad", "dynamic"),
    [(True, False), *(pytest.param(*each, marks=nightly) for each in ((False, False), (True, True)))],
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__.strip("_"))
@pytest.mark.nightly_after(4)
def test_one_graph_each_way(function, grad, dynamic):
    graphed = thunderfx(function, backend="tape", dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for rows in (4, 8, 4, 8, 4, 8):
            x, w = torch.randn(rows, 8), torch.randn(8, 8)
            for found, expected in zip(_results(graphed, x, w), _results(function, x, w), strict=True):
                if isinstance(found, torch.Tensor):
                    torch.testing.assert_close(found, expected)
                else:
                    assert found == expected
    report = explain(graphed)
    assert not report.outside
    assert [trace.kind for trace in report.traces] == ["forward", "backward"][: 1 + grad] * 2
    assert all(len(trace.regions) <= 1 for trace in report.traces)
    assert any(op.name.startswith("inductor_piece") for trace in report.traces for op in trace.ops)


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=nightly)])
def test_the_bits_are_those_of_the_piece_by_itself(backend, device, request, dynamic):
    """Where Inductor compiles it. On a CPU, the tests run its operators, and in the backward other ones if apart."""
    x, w = torch.randn(4, 8, device=device), torch.randn(8, 8, device=device)
    joined = thunderfx(_two, backend=backend, dynamic=dynamic)
    found = [_results(joined, x, w) for _ in range(3)][-1]
    request.getfixturevalue("cut")
    torch._dynamo.reset()
    apart = thunderfx(_two, backend=backend, dynamic=dynamic)
    expected = _results(apart, x, w)
    assert explain(apart).outside and not explain(joined).outside
    same(found[:2], expected[:2])
    torch.testing.assert_close(found[2], expected[2], **({"rtol": 0, "atol": 0} if device == "cuda" else {}))


def _times_a_number(x, w, n):
    return torch.vmap(lambda row: (row * n).sin())(x @ w).exp()


def _of_halves(x, w, n):
    return _norms((x @ w).view(-1, 4)).sin()


def _padded(x, w, n):
    return torch.vmap(lambda row: torch.cat([row, row.new_zeros(n)]))(x @ w).exp()


@pytest.mark.nightly_after(1)
@pytest.mark.parametrize("function", [_times_a_number, _of_halves, _padded])
def test_sizes_that_change(function):
    graphed = thunderfx(function, backend="tape", dynamic=True)
    for rows, n in ((4, 3), (4, 5), (8, 3)) * 3:
        x, w = torch.randn(rows, 8), torch.randn(8, 8)
        torch.testing.assert_close(_results(graphed, x, w, n), _results(function, x, w, n))
    report = explain(graphed)
    assert not report.outside
    assert [trace.kind for trace in report.traces] == ["forward", "backward"] * (len(report.traces) // 2)
    assert all(len(trace.regions) == 1 and trace.regions[0].replays == trace.calls - 1 for trace in report.traces)


@pytest.mark.filterwarnings("ignore:The 'symbolic values' cache option")
def test_traces_for_any_size():
    """They have no operator for one size."""
    graphed = thunderfx(_times_a_number, backend="tape", dynamic=True, cache="symbolic values")
    with torch.no_grad():
        for rows, n in ((4, 3), (8, 5)):
            x, w = torch.randn(rows, 8), torch.randn(8, 8)
            torch.testing.assert_close(graphed(x, w, n), _times_a_number(x, w, n))
    assert explain(graphed).outside


def test_draws(backend, device):
    """The backward gets what the forward has drawn, and each call draws anew."""
    graphed = thunderfx(
        lambda w: torch.vmap(F.dropout, randomness="different")(w.exp()).sin(), backend=backend, dynamic=False
    )
    masks = []
    for _ in range(5):
        w = torch.zeros(8, 8, device=device, requires_grad=True)
        y = graphed(w)
        y.sum().backward()
        masks.append(y.detach() != 0)
        torch.testing.assert_close(w.grad, torch.where(masks[-1], 2 * torch.cos(torch.full_like(w, 2)), 0))
    assert not explain(graphed).outside and len({str(mask.tolist()) for mask in masks}) == len(masks)


@pytest.mark.parametrize(
    "fn",
    [
        # The backward reads the conjugate of what the forward returned: a view, which strides alone do not make.
        lambda x, w: torch.view_as_real(torch.exp(torch.view_as_complex((x @ w).view(4, 4, 2)))),
        # Inductor gets what takes the result of `split` apart, and so `split`.
        lambda x, w: torch.view_as_real(torch.mul(*torch.fft.fft(x @ w).split(4, -1))),
    ],
    ids=["a conjugate", "parts"],
)
def test_complex_numbers(fn):
    graphed = thunderfx(fn, backend="tape", dynamic=False)
    for _ in range(4):
        x, w = torch.randn(4, 8), torch.randn(8, 8)
        for found, expected in zip(_results(graphed, x, w), _results(fn, x, w)):
            torch.testing.assert_close(found, expected)
    assert all(region["replays"] for region in regions(graphed))
    assert {part.operator for part in explain(graphed).outside} <= {"split"}


def test_a_backward_twice():
    graphed = thunderfx(_one, backend="tape", dynamic=False)
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    for _ in range(3):
        total = graphed(x, w).sum()
        (first,) = torch.autograd.grad(total, w, retain_graph=True)
        first = first.clone()
        (second,) = torch.autograd.grad(total, w)
        same(first, second)


def test_a_piece_goes_with_what_has_it(monkeypatch):
    made = []

    def kept(*args):
        run = _runs(*args)
        made.append(weakref.ref(run))
        return run

    monkeypatch.setattr("thunder_cg.dynamo.pieces._runs", kept)
    graphed = thunderfx(_one, backend="tape", dynamic=False)
    for _ in range(3):
        graphed(torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)).sum().backward()
    assert len(made) == 2 and all(each() is not None for each in made)
    del graphed
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in made] == [None, None]


def _apart_in_a_checkpoint(x):
    return torch.utils.checkpoint.checkpoint(torch.vmap(torch.exp), x * 2, use_reentrant=False).sin()


def _there_and_back(x):
    window = torch.ones(8)
    return torch.istft(torch.stft(x.sin(), 8, 2, window=window, return_complex=True), 8, 2, window=window) * 2


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (lambda x: (x * 2).data.mul_(3) + x, {}, "it returns a view of what it gets"),
        (_there_and_back, {}, "a CUDA graph may be unable to hold aten.index_put"),
        (lambda x: x / x.mean(), {}, "it returns what mean returns, a 0-dim tensor"),
        (lambda x: x / x.mean(), {"cache": "symbolic values", "dynamic": True}, 'with cache="symbolic values"'),
        (lambda x: torch.vmap(torch.exp)(x), {}, "Thunder traces nothing around it"),
        (_apart_in_a_checkpoint, {}, "it takes wrap_body_0, which Dynamo's graph holds itself"),
        pytest.param(lambda x: x[x > 0].sum(0, keepdim=True) * x, {}, "it has sizes that depend on", marks=nightly),
    ],
)
def test_what_stays_apart(function, options, reason):
    graphed = thunderfx(function, backend="tape", **{"dynamic": False, **options})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for _ in range(3):
            x = torch.randn(2, 32, requires_grad=True)
            torch.testing.assert_close(graphed(x), function(x))
    report = explain(graphed)
    assert report.outside and all(part.apart for part in report.outside)
    assert f"why: its piece is in no graph: {reason}" in str(report)


def test_a_piece_in_the_trace_is_captured_as_strict_ops_wants():
    graphed = thunderfx(_one, backend="tape", dynamic=False, strict="ops")
    for _ in range(3):
        graphed(torch.randn(4, 8), torch.randn(8, 8))
    assert explain(graphed).joined


def test_a_module(backend, device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.outer(torch.vmap(self.inner)(x.sin()).relu()).tanh()

    net = Net().to(device)
    graphed = thunderfx(net, backend=backend, dynamic=False)
    for _ in range(4):
        x = torch.randn(4, 8, device=device)
        net.zero_grad()
        graphed(x).sum().backward()
        found = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(x).sum().backward()
        torch.testing.assert_close(found, [p.grad for p in net.parameters()])
    assert not explain(graphed).outside
    assert [len(trace.regions) for trace in explain(graphed).traces] == [1, 1]


def _scaled_by_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x * (x.abs().mean().item() + 1.0)


def _scaled_twice_by_its_mean(x: torch.Tensor) -> torch.Tensor:
    number = x.abs().mean().item() + 1.0
    return torch.tanh(torch.tanh(x * number) * 2) * (number * 2)


def _scaled_by_an_integer(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * (x.abs().sum().long().item() + 1)


@pytest.mark.filterwarnings("ignore:Thunder computes another gradient")  # of 0-dim tensors on the CPU: not here
@pytest.mark.parametrize(
    "scaled",
    [
        _scaled_by_its_mean,
        *(pytest.param(fn, marks=nightly) for fn in (_scaled_twice_by_its_mean, _scaled_by_an_integer)),
    ],
)
def test_a_number_read_from_a_tensor_of_the_graph_in_training(scaled):
    x = torch.rand(4, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = thunderfx(lambda x: scaled(torch.tanh(x)), backend="tape")
        for factor in (1, 2, 3, 4):
            given, other = ((x * factor).requires_grad_() for _ in range(2))
            result, expected = compiled(given), scaled(torch.tanh(other))
            result.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(given.grad, other.grad)


@torch.library.custom_op("pieces::fill_with_seven", mutates_args=("x",))
def fill_with_seven(x: torch.Tensor) -> None:
    x.fill_(7.0)


fill_with_seven.register_fake(lambda x: None)


@pytest.mark.filterwarnings("ignore:Thunder computes another gradient")
@pytest.mark.parametrize("write", [lambda x: x.fill_(7.0), torch.ops.pieces.fill_with_seven], ids=["PyTorch's", "own"])
def test_a_number_that_is_read_before_the_tensor_is_written(write):
    """A read where the number is used would find another one. Thunder raises, with and without graphs."""

    def scaled(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        number = factor.item()
        write(factor)
        return torch.sin(torch.tanh(x) * (number + 1.0)) + factor

    x, factors = torch.rand(4, 8, requires_grad=True), (torch.tensor(3.0), torch.tensor(3.0))
    expected = scaled(x, factors[0])
    with torch._dynamo.config.patch(capture_scalar_outputs=True), suppress(RuntimeError):
        torch.testing.assert_close(thunderfx(scaled, backend="tape")(x, factors[1]), expected)
