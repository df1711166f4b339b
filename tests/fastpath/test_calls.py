"""A call that goes around Thunder's dispatch gives what Thunder's own way gives."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import thunder
import torch
from models import Linear
from support import fast_path_calls, no_fast_path, same, same_state
from thunder.core.trace import from_trace
from thunder.core.transform_common import Transform
from thunder.dynamo import thunderfx
from thunder.executors import torch_autograd
from torch import nn

from thunder_cg import explain

CALLS = 6


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(4, 4)
        self.second = Linear(4, 4)

    def forward(self, x, *, k=1.0):
        return self.second(torch.tanh(self.first(x)) * k) * 2


class Several(nn.Module):
    """Nested results, one of them twice, one a view of another, one that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(4, 4)

    def forward(self, x):
        y = torch.tanh(self.first(x)) * 2
        return {"y": y, "more": (y * 3, y.argmax(-1)), "again": y, "view": y.t()}


class Halves(nn.Module):
    """Two regions, with an operator in between that no graph may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(4, 4)

    def forward(self, x):
        y = torch.tanh(self.first(x)) * 2
        n = y.detach().sum().item()
        return torch.tanh(y * n) * 2


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Linear(4, 4)

    def forward(self, x):
        x.mul_(2)
        return torch.tanh(self.first(x)) * 2


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.tanh(x @ self.weight) * 2, self.weight.t(), x.view(-1)


def batches(device, count=CALLS):
    return [torch.randn(5, 4, device=device) for _ in range(count)]


def traits(tensor):
    return tensor.requires_grad, tensor.is_leaf, tensor.grad_fn is None, tensor.is_inference()


def test_inference(twins, device):
    plain, graphed = twins(MLP())
    with torch.no_grad():
        for x in batches(device):
            same(plain(x, k=2.0), graphed(x, k=2.0))
    assert fast_path_calls(graphed) == CALLS - 2 and no_fast_path(graphed) == [None]
    assert thunder.cache_hits(plain) == thunder.cache_hits(graphed) == CALLS - 1


def test_training(twins, device):
    plain, graphed = twins(MLP())
    for x in batches(device):
        for model in (plain, graphed):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            model.leaf = leaf
        assert traits(y) == (True, False, False, False)
        same(plain.leaf.grad, graphed.leaf.grad)
        same_state(plain, graphed)
    assert fast_path_calls(graphed) == CALLS - 2 and no_fast_path(graphed) == [None]
    forward, backward = graphed._lc_cs.interpreter_cache[0].computation_traces, thunder.last_backward_traces(graphed)
    assert forward[-1].get_provenance() is not None and backward


@pytest.mark.nightly
def test_buffers(twins, device):
    plain, graphed = twins(nn.Sequential(Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Linear(4, 4)))
    for step, x in enumerate(batches(device, 4 * CALLS)):
        for model in (plain, graphed):
            model.train(step % 3 != 0)
            torch.manual_seed(step)
            with torch.set_grad_enabled(step < 2 * CALLS):
                y = model(x)
                if step < 2 * CALLS:
                    y.square().sum().backward()
        same_state(plain, graphed)
    assert fast_path_calls(graphed) >= 4 * CALLS - 8


def test_several_results(twins, device):
    plain, graphed = twins(Several())
    for x in batches(device):
        a, b = (model(x) for model in (plain, graphed))
        for outputs in (a, b):
            (outputs["more"][0].sum() + outputs["view"].square().sum()).backward()
        same(
            [t.detach() for t in (a["y"], *a["more"], a["view"])], [t.detach() for t in (b["y"], *b["more"], b["view"])]
        )
        assert b["y"] is b["again"] and not b["more"][1].requires_grad
        same_state(plain, graphed)
    assert fast_path_calls(graphed) == CALLS - 2


def test_several_regions_go_through_the_trace(twins, device):
    plain, graphed = twins(Halves())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for x in batches(device):
                a, b = plain(x), graphed(x)
                same(a.detach(), b.detach())
                if grad:
                    a.sum().backward()
                    b.sum().backward()
                    same_state(plain, graphed)
    assert fast_path_calls(graphed) >= CALLS
    assert all(reason and "one region" in reason for reason in no_fast_path(graphed))


def test_views(twins, device):
    """Made without autograd, as in a trace, though the fast path runs under the caller's grad mode."""
    plain, graphed = twins(Views(), jit={"disable_torch_autograd": True})
    for x in batches(device):
        a, b = plain(x), graphed(x)
        same([t.detach() for t in a], [t.detach() for t in b])
        assert [traits(t) for t in a] == [traits(t) for t in b]
        assert b[2].data_ptr() == x.data_ptr()
    assert fast_path_calls(graphed) == CALLS - 2


@pytest.mark.filterwarnings("ignore::thunder_cg.WrongGradientWarning")
def test_arguments_written_in_place(twins, device):
    plain, graphed = twins(InPlace())
    for x in batches(device):
        a, b = (x.clone().requires_grad_() * 1 for _ in range(2))
        for model, y in ((plain, a), (graphed, b)):
            version = y._version
            model(y).sum().backward()
            assert y._version > version
        same(a.detach(), b.detach())
        same_state(plain, graphed)
    assert fast_path_calls(graphed) > 0
    for model in (plain, graphed):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            model(x.clone().requires_grad_())


@pytest.mark.parametrize(
    "finish",
    [
        lambda y, m: [y.sum().backward(), y.sum().backward()],
        lambda y, m: [y.sum().backward(retain_graph=True), y.sum().backward()],
        lambda y, m: torch.autograd.grad(y.sum(), list(m.parameters())),
        lambda y, m: y.sum().backward(inputs=[m.get_parameter("first.weight")]),
        lambda y, m: y.mul_(2).sum().backward(),
        lambda y, m: [m.get_parameter("second.weight").detach().mul_(1), y.sum().backward()],
        lambda y, m: [y.register_hook(lambda g: g * 3), y.retain_grad(), y.sum().backward(), y.grad][1:],
        lambda y, m: torch.autograd.grad(y.square().sum(), m.get_parameter("first.bias"), create_graph=True)[0],
        lambda y, m: y.backward(torch.ones(3, 3, device=y.device)),
    ],
    ids=[
        "twice",
        "retained",
        "grad",
        "inputs",
        "output written",
        "weight written",
        "hook",
        "create graph",
        "wrong gradient",
    ],
)
@pytest.mark.nightly_after(2)
def test_backward(twins, device, finish):
    plain, graphed = twins(MLP())
    for x in batches(device):
        results = []
        for model in (plain, graphed):
            model.zero_grad()
            try:
                results.append(finish(model(x), model))
            except RuntimeError as error:
                results.append(str(error)[:40])
        same(*(each.detach() if isinstance(each, torch.Tensor) else each for each in results))
        same_state(plain, graphed)
    assert fast_path_calls(graphed) == CALLS - 2


class Counts(Transform):
    """Puts an effect of its own into each trace."""

    def __init__(self, effect) -> None:
        self.effect = effect

    def transform_trace_post_optimization(self, computation_trace, **kwargs):
        trace = from_trace(computation_trace)
        *symbols, last = computation_trace.bound_symbols
        trace.bound_symbols = [*symbols, self.effect.bind(last.flat_proxy_args[0], output=None), last]
        return trace


def test_what_another_transform_adds(transform, device):
    seen = []
    executor = thunder.extend.OperatorExecutor("counting")
    thunder.extend.register_executor(executor)
    try:
        effect = executor.register_operator("count", fn=lambda x: seen.append(1), meta=lambda x: None)
        graphed = thunder.jit(MLP().to(device), transforms=[transform(), Counts(effect)])
        for x in batches(device):
            graphed(x).sum().backward()
    finally:
        thunder.extend.deregister_executor(executor)
    assert len(seen) == 2 * CALLS
    assert "count" in str(no_fast_path(graphed)[0])


def test_nothing_is_kept(twins, device):
    _, graphed = twins(MLP())
    kept = []
    for x in (*batches(device), *(x[:2] for x in batches(device))):  # two entries of Thunder's cache
        leaf = x.clone().requires_grad_()
        y = graphed(leaf)
        y.sum().backward()
        kept += [weakref.ref(leaf), weakref.ref(y), weakref.ref(leaf.grad)]
        del leaf, y
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    old = weakref.ref(graphed._overrides_parameters["first.weight"])
    graphed._overrides_parameters["first.weight"] = nn.Parameter(torch.randn(4, 4, device=device))
    graphed._model.first.weight = None
    graphed(x.clone().requires_grad_()).sum().backward()
    gc.collect()
    assert old() is None
    kept = [weakref.ref(t) for t in (graphed, graphed._model, graphed._forward_fn, *graphed.parameters())]
    del graphed
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_each_recording_has_its_fast_path(twins, device):
    plain, graphed = twins(MLP())
    with torch.no_grad():
        for rows in (2, 3, 5, 2, 3, 5):
            for _ in range(4):
                x = torch.randn(rows, 4, device=device)
                same(plain(x), graphed(x))
    assert fast_path_calls(graphed) == 6 + 12


@pytest.mark.parametrize("kind", ["jit", "one node", "thunderfx"])
@pytest.mark.parametrize("penalty", [True, False])
@pytest.mark.nightly_after(2)
def test_second_derivatives(transform, device, kind, penalty):
    """They raise, where uncaptured Thunder takes gradients for constants in most of these cases."""
    options = {"thunderfx_disable_split_autograd": True} if kind == "one node" else {}
    model = MLP().to(device)
    if kind == "thunderfx":
        graphed = thunderfx(model, transforms=[transform()])
    else:
        graphed = thunder.jit(model, transforms=[transform()], **options)
    for x in batches(device):  # a warm-up and a capture, through Thunder's nodes, and then the fast path's
        y, expected = graphed(x), model(x)
        gradients = [
            torch.autograd.grad(each.square().sum() if penalty else each.sum(), model.first.weight, create_graph=True)
            for each in (y, expected)
        ]
        torch.testing.assert_close(*(each.detach() for (each,) in gradients))
        with pytest.raises(RuntimeError, match=r"no second derivatives.*do not compile what is differentiated twice"):
            gradients[0][0].square().sum().backward()
    assert fast_path_calls(graphed) > 0
    assert "as Thunder has no second derivatives, with and without graphs" in str(explain(graphed))


def test_the_one_node_that_thunder_makes_in_a_capture(twins, device, monkeypatch):
    plain, graphed = twins(MLP())
    monkeypatch.setattr(torch_autograd, "is_cudagraph_capturing", lambda: True)
    for x in batches(device):
        for model in (plain, graphed):
            model.zero_grad()
            model(x).sum().backward()
        same_state(plain, graphed)


def test_below_autograd(twins, device):
    plain, graphed = twins(MLP())
    for step, x in enumerate(batches(device, 2 * CALLS)):
        with torch._C._AutoDispatchBelowAutograd() if step % 3 == 2 else nullcontext():
            a, b = plain(x), graphed(x)
        same(a.detach(), b.detach())
        assert traits(a) == traits(b)
    assert fast_path_calls(graphed) > 0


class Named(nn.Module):
    """Names of arguments that generated functions use for something else. Thunder itself cannot have ``cotangents``."""

    def __init__(self) -> None:
        super().__init__()
        self.thunder_module = nn.Linear(4, 4)

    def forward(self, values, thunder_module, cudagraph_check_parameters, args, kwargs=None):
        y = torch.tanh(self.thunder_module(values)) * values
        return y * thunder_module * cudagraph_check_parameters + args[0] * kwargs["kwargs"]


@pytest.mark.parametrize("trains", [True, False])
def test_names_of_arguments(twins, device, trains):
    plain, graphed = twins(Named())
    for x in batches(device):
        for model in (plain, graphed):
            model.x = x.clone().requires_grad_(trains)
            with torch.set_grad_enabled(trains):
                model.y = model(model.x, x + 1, x + 2, [x + 3], kwargs={"kwargs": 2.0})
            if trains:
                model.y.sum().backward()
        same_state(plain, graphed)
        same(plain.y.detach(), graphed.y.detach())
    assert fast_path_calls(graphed) == CALLS - 2


@pytest.mark.parametrize("trains", [True, False])
def test_it_is_freed_without_the_garbage_collector(twins, device, trains):
    """As without the transform, once the cycles that Thunder's tracing leaves behind have been collected."""
    for model in twins(MLP()):
        for step in range(6):
            if step == 4:
                gc.collect()
                gc.disable()
            with torch.set_grad_enabled(trains):
                y = model(torch.randn(5, 4, device=device))
                if trains:
                    y.sum().backward()
                del y
    kept = [weakref.ref(t) for t in (model, model._model, model._forward_fn, *model.parameters())]
    try:
        assert fast_path_calls(model) == 4
        del model
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()
