"""How users reach the transform: thunder.jit, thunder.compile, thunderfx, executors, and what they see of it."""

from __future__ import annotations

import re
import warnings
from functools import partial

import pytest
import thunder
import torch
from support import programs, regions, replays, same, same_state
from thunder.dynamo import thunderfx
from thunder.recipes import BaseRecipe
from torch import nn

from thunder_cg import BackendError, CUDAGraphPlugin, OptionError, cudagraph_transform, explain
from thunder_cg.runtime import skip_reasons

CALLS = 5


def mlp(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Breaks(nn.Module):
    """Two graph breaks and a buffer that is written in each part."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        h = torch.relu(self.first(x)) * 2
        torch._dynamo.graph_break()
        self.count[0] = h.sum().detach()
        h = self.second(h) + self.count.sum()
        torch._dynamo.graph_break()
        return torch.tanh(h).sum() + h.mean()


def test_regions_show_in_the_trace(transform, device):
    jfn = thunder.jit(mlp().to(device), transforms=[transform()])
    jfn(torch.randn(2, 8, device=device))
    trace = thunder.last_traces(jfn)[-1]
    (region,) = [s for s in trace.bound_symbols if s.sym.name == "CUDAGraph1"]
    assert region.sym.executor is thunder.extend.get_executor("cudagraph")
    assert [s.sym.name for s in region.subsymbols] == ["linear", "tanh", "linear"]
    assert "= CUDAGraph1(" in str(trace)
    assert [s.sym.name for s in thunder.last_backward_traces(jfn)[-1].bound_symbols if s.sym.is_fusion] == [
        "cudagraph_begin_backward",
        "cudagraph_inputs",
        "CUDAGraph2",
        "cudagraph_end_call",
    ]


def test_a_backward_whose_saved_state_was_replaced_runs_eagerly(transform, device):
    jfn = thunder.jit(lambda x: torch.tanh(torch.tanh(x) * 2), transforms=[transform()])
    x = torch.randn(4, 4, device=device, requires_grad=True)
    gradient = torch.ones(4, 4, device=device)
    expected = torch.autograd.grad(jfn(x), x, gradient)
    (entry,) = thunder.compile_stats(jfn).interpreter_cache
    for _ in range(3):
        _, (tensors, others) = entry.computation_fn(x)
        same(expected, tuple(entry.backward_fn([[*tensors], [*others]], [gradient])))
    forward, backward = programs(jfn)
    assert (
        backward.counts.fallbacks == {skip_reasons.NO_FORWARD.problem: 3}
        and backward.counts.calls == 4
        and not forward.counts.fallbacks
    )
    same(expected, torch.autograd.grad(jfn(x), x, gradient))


def test_the_executor_can_be_named(transform, device):
    x = torch.randn(4, 4, device=device)
    jfn = thunder.jit(lambda x: torch.tanh(x * 2) + 1, executors=["cudagraph", "torch"], transforms=[transform()])
    for _ in range(3):
        same(torch.tanh(x * 2) + 1, jfn(x))
    assert replays(jfn) == 2
    alone = thunder.jit(lambda x: torch.tanh(x * 2) + 1, executors=["cudagraph", "torch"])
    with pytest.warns(UserWarning, match="captures nothing"):
        alone(x)


@pytest.mark.parametrize("by", ["name", "instance"])
@pytest.mark.nightly_after(1)
def test_plugin_of_thunder_compile(backend, device, monkeypatch, by):
    if by == "name" and (backend == "cuda") != torch.cuda.is_available():
        pytest.skip("by name, the plugin takes the machine's own backend")
    if backend == "tape":  # Inductor would take a minute for what it compiles for a CPU, of which this asks nothing
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = mlp().to(device)
    plain = thunder.jit(model)
    plugin = "cudagraph" if by == "name" else CUDAGraphPlugin(backend=backend, debug=True)
    with pytest.raises(OptionError, match=r"CUDAGraphPlugin\(debgu=True\): .* did you mean debug=\?"):
        CUDAGraphPlugin(debgu=True)
    with pytest.raises(OptionError, match="backend='gpu'"):
        CUDAGraphPlugin(backend="gpu")
    graphed = thunder.compile(model, recipe=BaseRecipe(fuser="torch.compile"), plugins=[plugin])
    for _ in range(CALLS):
        x = torch.randn(4, 8, device=device)
        torch.testing.assert_close(plain(x), graphed(x))
    assert replays(graphed) == CALLS - 1


@pytest.mark.nightly
def test_thunderfx_with_graph_breaks(transform, device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Breaks().to(device)
    torch.manual_seed(0)
    module = Breaks().to(device)
    reference = thunderfx(plain)
    graphed = thunderfx(module, transforms=[transform()])
    for step in range(CALLS + 2):
        x = torch.randn(4, 8, device=device)
        for model, owner in ((reference, plain), (graphed, module)):
            owner.zero_grad()
            loss = model(x)
            if step != 3:
                loss.backward()
        same_state(plain, module)
    assert module.count[1] == CALLS + 2
    assert replays(graphed) > 0
    torch._dynamo.reset()


def test_symbolic_values(twins, device):
    def fn(x, n):
        return torch.tanh(x * 2) * n + 1

    plain, graphed = twins(fn, jit={"cache": "symbolic values"})
    for n in range(1, 6):
        x = torch.randn(n, 4, device=device)
        same(plain(x, n), graphed(x, n))


def test_train_and_eval_traces(twins, device):
    plain, graphed = twins(nn.Sequential(mlp(), nn.Dropout(0.3), nn.BatchNorm1d(8)))
    for step in range(8):
        x = torch.randn(4, 8, device=device)
        outputs = []
        for model in (plain, graphed):
            model.train(step % 2 == 0)
            torch.manual_seed(step)
            with torch.set_grad_enabled(step % 4 != 3):
                outputs.append(model(x))
        same(outputs[0].detach(), outputs[1].detach())
    same_state(plain, graphed)
    assert len({trace["entry"] for trace in explain(graphed).to_dict()["traces"]}) == 3


def test_hooks_and_gradients_of_inputs(twins, device):
    plain, graphed = twins(mlp())
    seen = []
    for model in (plain, graphed):
        model.get_parameter("0.weight").register_hook(lambda g: seen.append(g.clone()) or g * 2)
    for _ in range(CALLS):
        x = torch.randn(4, 8, device=device)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for model, leaf in zip((plain, graphed), leaves):
            model(leaf).square().sum().backward()
        same(leaves[0].grad, leaves[1].grad)
        same_state(plain, graphed)
    same(seen[::2], seen[1::2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "metal"}, ["backend='metal'", "'tape'", "choose"]),
        ({"max_arenas": 0}, ["max_arenas=0", "at least 1"]),
        ({"verify": "always"}, ["verify='always'", '"first", a whole number of at least 1, or None', 'pass "first"']),
        ({"verify": 0}, ["verify=0", "at least 1"]),
        ({"verify": True}, ["verify=True"]),
        ({"verify": 0.5}, ["verify=0.5"]),
        ({"max_recordings": 2.5}, ["max_recordings=2.5", "whole number"]),
        ({"allow": "my_op"}, ["allow='my_op'", 'pass a list such as ["my_op"]']),
        ({"deny": [3]}, ["deny=[3]", "names"]),
        ({"allow": ["a"], "deny": ["a"]}, ["'a'", "deny="]),
        ({"strict": "yes"}, ["strict='yes'", "pass a bool"]),
        ({"memory_budget": 0}, ["memory_budget=0", "at least 1", "2 * 2**30 for 2 GiB, or 0.5"]),
        ({"memory_budget": 1.5}, ["memory_budget=1.5", "a float in (0, 1]"]),
        ({"memory_budget": True}, ["memory_budget=True"]),
    ],
)
def test_wrong_options(options, words):
    with pytest.raises(OptionError) as error:
        cudagraph_transform(**{"backend": "tape", **options})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(BackendError, match=r"torch.cuda.is_available\(\) is False.*backend=\"tape\""):
        cudagraph_transform(backend="cuda")


def test_nothing_to_capture(twins, device):
    plain, graphed = twins(lambda x: (x + 1,))
    for _ in range(3):
        x = torch.randn(4, device=device)
        same(plain(x), graphed(x))
    assert regions(graphed) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deny": ["torch.tahn"]}, "deny= names 'torch.tahn', .* did you mean 'torch.tanh'"),
        ({"allow": ["my_opp"]}, "allow= names 'my_opp', and the trace has no such operator$"),
        ({"deny": ["geluu"]}, "did you mean 'gelu'"),
        ({"deny": ["torch.tnah"]}, "did you mean 'torch.tanh'"),
        ({"deny": ["torch.nn.functional.tahn"]}, "did you mean 'torch.tanh'"),
        ({"deny": ["tanh"]}, None),
        ({"deny": ["atanh"]}, None),
        ({"deny": ["torch.sigmoid"]}, None),
    ],
    ids=[
        *("misspelt", "of nobody", "not in the trace", "letters swapped", "by its last part", "right", "another"),
        "another that Thunder writes out",
    ],
)
@pytest.mark.nightly_after(3)
def test_a_misspelt_name_is_a_warning_once(options, said):
    compiled = thunder.jit(lambda x: torch.tanh(x) * 2, transforms=[cudagraph_transform(backend="tape", **options)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 3):
            compiled(torch.ones(size))
    assert all(warning.filename == __file__ for warning in caught if "= names" in str(warning.message))
    found = [str(warning.message) for warning in caught if "= names" in str(warning.message)]
    assert len(found) == (said is not None) and (said is None or re.search(said, found[0]))


def test_a_copy_on_another_device_divides_no_region(transform, device):
    """Thunder takes it for a view, so where it is written, Thunder gives both tensors new names at once."""

    def fn(x, counter):
        moved = counter.to("meta")
        y = torch.sin(x)
        moved.add_(1)
        return y * counter, moved

    jfn = thunder.jit(fn, transforms=[transform()])
    x, counter = torch.randn(4, device=device), torch.ones(4, device=device)
    for _ in range(4):
        found, moved = jfn(x, counter)
        assert torch.equal(found, torch.sin(x)) and moved.is_meta
    (region,) = regions(jfn)
    assert region["replays"] >= 2
