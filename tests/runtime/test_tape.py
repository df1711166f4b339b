"""The tape behaves as a CUDA graph does: fixed addresses, no Python, no syncs, nothing executed at capture."""

from __future__ import annotations

import sys
import types
from functools import partial

import pytest
import torch
from torch import nn

from thunder_cg.errors import CaptureRefused, ReplayRefused
from thunder_cg.runtime.tape import TapeBackend

CPU = torch.device("cpu")


@pytest.fixture
def pool():
    return TapeBackend().pool(CPU)


def test_replay_reads_and_writes_the_captured_addresses(pool):
    x = nn.Parameter(torch.arange(4.0), requires_grad=False)
    graph, (y,) = pool.capture(lambda t: [torch.sin(t) * 2], [x.detach()])
    x.copy_(torch.ones(4))
    graph.replay()
    expected = torch.sin(torch.ones(4)) * 2
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    x.data = torch.zeros(4)  # another address, which the graph does not have
    graph.replay()
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_a_storage_that_has_got_other_memory(pool):
    """As FSDP2 frees and allocates those of parameters. What the addresses are of now may be another parameter."""
    x = torch.ones(4)
    graph, _ = pool.capture(lambda t: [t[2:] * 2], [x.detach()])
    graph.replay()
    for nbytes in (0, 1 << 20):
        x.untyped_storage().resize_(nbytes)
        with pytest.raises(ReplayRefused, match="has other memory now"):
            graph.replay()


def test_a_result_may_be_expanded(pool):
    """A fusion may return one, in new memory."""
    x = torch.arange(3.0)
    fusion = TapeBackend().fusion(lambda t: (t * 2).unsqueeze(1).expand(3, 4))
    graph, (y,) = pool.capture(lambda t: [fusion(t)], [x])
    x.add_(1)
    graph.replay()
    torch.testing.assert_close(y, (x * 2).unsqueeze(1).expand(3, 4), rtol=0, atol=0)


def test_capture_executes_nothing(pool):
    x = torch.zeros(4)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    graph, (y,) = pool.capture(lambda t: [t.add_(1).mul_(torch.rand(4))], [x])
    assert torch.equal(x, torch.zeros(4)) and torch.equal(torch.get_rng_state(), before)
    graph.replay()
    torch.manual_seed(0)
    torch.testing.assert_close(x, torch.rand(4), rtol=0, atol=0)
    assert y.data_ptr() == x.data_ptr()


def test_capture_undoes_writes_that_no_schema_shows(pool):
    x, mean, variance = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    graph, _ = pool.capture(lambda *t: [*torch.batch_norm_update_stats(*t, 0.5)], [x, mean, variance])
    assert torch.equal(mean, torch.zeros(3)) and torch.equal(variance, torch.ones(3))
    graph.replay()
    torch.testing.assert_close(mean, x.mean(0) / 2)


@pytest.mark.parametrize("view", ["reshape(-1)", "narrow(0, 1, 2)", "chunk(3)[1]", "unflatten(1, (2, 2))", "mT"])
def test_views_are_views_in_inference_mode(pool, view):
    """Some composite operators make views themselves, others leave that to their parts."""
    take, x = eval(f"lambda t: t.{view}"), torch.zeros(3, 4)
    pool.forget(torch.zeros(4).untyped_storage())  # memory that operators reuse
    with torch.inference_mode():
        (warm,) = pool.warm_up(lambda t, copier: [take(t)], [x])
        _, (captured,) = pool.capture(lambda t: [take(t)], [x])
    assert warm._base is x and captured._base is x


def test_replay_skips_python(pool):
    calls = []
    graph, _ = pool.capture(lambda t: [calls.append(1) or t + 1], [torch.zeros(2)])
    graph.replay()
    assert calls == [1]


def test_arguments_that_are_one_object_stay_one(pool):
    x = torch.ones(2)
    call = TapeBackend().fusion(lambda a, b: a + (a is b))
    graph, (y,) = pool.capture(lambda t: [call(t, t)], [x])
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [6, 6]


def test_a_kernel_sees_the_grad_mode_of_its_capture(pool):
    """Without gradients, an LSTM on a CPU gives its backward no workspace."""
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)

    def train(t):
        y = lstm(t)[0]
        return [y.detach(), *torch.autograd.grad(y.square().mean(), lstm.parameters())]

    graph, results = pool.capture(train, [x])
    x.mul_(2)
    expected = train(x)
    graph.replay()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    assert all(each.grad_fn is None for each in results)


def test_a_fusion_is_one_call(pool):
    seen = []

    def fusion(t):
        seen.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return t * 3

    x = torch.ones(2)
    call = TapeBackend().fusion(fusion)
    graph, (y,) = pool.capture(lambda t: [call(t) + 1], [x])
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [7, 7] and seen == [None, None]


class CompiledFxGraph:
    """Stands for Inductor's: no dispatch mode sees what it computes."""

    source_code = ""

    def __call__(self, inputs):
        return [torch.from_numpy(inputs.pop().numpy() * 3)]


INDUCTOR = "torch._inductor.output_code"


def test_what_inductor_has_compiled_is_one_call(pool, monkeypatch):
    graph_class = type("Graph", (CompiledFxGraph,), {"__call__": CompiledFxGraph.__call__})
    monkeypatch.setitem(sys.modules, INDUCTOR, types.SimpleNamespace(CompiledFxGraph=graph_class))
    call = graph_class()
    fusion = TapeBackend().fusion(lambda t: call([t])[0])
    for each in (lambda t: call([t])[0], fusion):
        x = torch.ones(2)
        graph, (y,) = pool.capture(lambda t, f=each: [f(t) + 1], [x])
        x.fill_(2)
        graph.replay()
        assert y.tolist() == [7, 7] and graph.counts() == {"op": 2}
    assert call([x])[0].tolist() == [6, 6]
    graph_class.source_code = "torch.ops._c10d_functional.all_reduce_.default(buf0)"
    with pytest.raises(CaptureRefused, match="communicates"):
        pool.capture(lambda t: call([t]), [x])


def test_inductor_that_a_capture_loads(pool, monkeypatch):
    """What it computed until then was not seen."""
    monkeypatch.delitem(sys.modules, INDUCTOR, raising=False)
    loads = partial(monkeypatch.setitem, sys.modules, INDUCTOR, types.SimpleNamespace(CompiledFxGraph=CompiledFxGraph))
    with pytest.raises(CaptureRefused, match="Inductor was loaded"):
        pool.capture(lambda t: [t * 2, loads()], [torch.ones(2)])


@pytest.mark.parametrize(
    "fn",
    [
        lambda t: t.sum().item(),
        lambda t: torch.nonzero(t),
        lambda t: t[t > 0],
        lambda t: t.index_put_((t > 0,), t[:1] * 2),
        lambda t: torch.unique(t),
        lambda t: torch.equal(t, t),
        lambda t: t + torch.tensor([1.0, 2.0]),
        lambda t: torch.linalg.svd(t.view(1, 2)),
        lambda t: torch.rand(2, generator=torch.Generator()),
    ],
)
def test_it_refuses_what_cuda_refuses(pool, fn):
    x = torch.ones(2)
    with pytest.raises(CaptureRefused):
        pool.capture(fn, [x])
    assert torch.equal(x, torch.ones(2))
    graph, (y,) = pool.capture(lambda t: [t + 1], [x])  # the failed capture left nothing behind
    graph.replay()
    assert y.tolist() == [2, 2]


def test_a_tensor_without_memory_is_no_work(pool):
    """As the derivative of a forward makes one to know a shape."""
    graph, (y,) = pool.capture(lambda t: [t + t.to("meta").dim()], [torch.ones(2)])
    graph.replay()
    assert y.tolist() == [2, 2] and graph.counts() == {"op": 1}


def test_poison_fills_what_was_captured(pool):
    x = torch.ones(2)
    graph, (y,) = pool.capture(lambda t: [t + 1], [x])
    pool.poison()
    assert y.isnan().all() and torch.equal(x, torch.ones(2))
    graph.replay()
    assert y.tolist() == [2, 2]
    assert pool.nbytes() == y.untyped_storage().nbytes()
