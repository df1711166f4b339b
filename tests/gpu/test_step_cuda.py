"""Events and streams of the user's in a step."""

from __future__ import annotations

import gc

import pytest
import thunder
import torch
from support import training_step
from torch import nn

from thunder_cg import cudagraph_transform, explain, graphed_step
from thunder_cg.runtime.cuda.pool import CudaPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
_WORK = 2_000_000  # cycles of the GPU, about a millisecond


def run(of, between=lambda: None):
    """Seven calls of a step, and how each goes on: the graphed step, results, and the parameters."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, device="cuda")
    compiled = thunder.jit(model, transforms=[cudagraph_transform()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn(x):
        loss = of(compiled(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step, results = graphed_step(fn), []
    for _ in range(7):
        results.append(step(torch.randn(3, 4, device="cuda")))
        between()
    torch.cuda.synchronize()
    return step, torch.stack(results).tolist(), [*map(torch.Tensor.tolist, model.parameters())]


def recording(event, target):
    def of(y):
        target.copy_(y.detach()[0])
        torch.cuda._sleep(_WORK)
        target.mul_(2)
        event.record()
        return y

    return of


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
@pytest.mark.parametrize("external", [False, True])
def test_an_event_that_others_wait_for(external):
    """An external one is part of the graph. Of another one, no replay would tell."""
    event, target = torch.cuda.Event(external=external), torch.zeros(4, device="cuda")
    side, seen, expected = torch.cuda.Stream(), [], []

    def between():
        side.wait_event(event)
        with torch.cuda.stream(side):
            seen.append(target.clone())
        torch.cuda.current_stream().wait_stream(side)
        expected.append(target.clone())

    step, *_ = run(recording(event, target), between)
    assert torch.equal(torch.stack(seen), torch.stack(expected))
    if external:
        assert step.captures == 1 and step.replays >= 4
    else:
        said = " ".join(str(explain(step)).split())
        assert step.captures == 0 and "an event that is used outside of it, at test_step_cuda.py:" in said


def test_events_of_the_step_itself():
    """A branch of work on another stream, there and back."""
    side, weight = torch.cuda.Stream(), torch.full((4,), 2.0, device="cuda")

    def of(y):
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record()
        side.wait_event(before)
        with torch.cuda.stream(side):
            doubled = y * weight
            after.record()
        torch.cuda.current_stream().wait_event(after)
        return doubled

    step, *forked = run(of)
    assert step.captures == 1 and step.replays == 5
    assert forked == list(run(lambda y: y * weight)[1:])


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_a_stream_that_a_step_leaves_behind():
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def of(y):
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
        return y

    def between():
        current.wait_stream(side)
        torch.cuda.set_stream(current)

    step, *left = run(of, between)
    assert step.captures == 0 and "the current stream changed" in str(explain(step))
    assert left == list(run(lambda y: y)[1:])


def test_a_capture_that_leaves_another_stream_behind():
    """It ends where it began, fails with CUDA's reason, and the next one succeeds."""
    side = torch.cuda.Stream()

    def fn(x):
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(side)
        return [x * 2]

    pool, x = CudaPool(torch.device("cuda", 0)), torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="unjoined"):
        pool.capture(fn, [x])
    assert torch.cuda.current_stream() != side
    graph, (y,) = pool.capture(lambda x: [x * 3], [x])
    graph.replay()
    assert y.tolist() == [3.0] * 4


def test_gradients_before_the_capture_take_no_memory_beside_it():
    """Adam's state, the gradients and the activations are all that there is at a time, as without graphs."""
    peaks = []
    for graphed in (False, True):
        model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda()  # 16 MiB each
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, capturable=True)

        def fn(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step, x = graphed_step(fn) if graphed else fn, torch.randn(256, 2048, device="cuda")
        gc.collect()
        torch.cuda.empty_cache()
        before, before_reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            step(x)
        peaks.append((torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - before_reserved))
        if graphed:
            assert step.replays >= 2, step.in_python
            workspaces = explain(step).memory.workspaces
        del model, optimizer, step, fn
    for without, with_graphs in zip(*peaks):
        assert with_graphs - workspaces <= 1.05 * without


def test_memory_that_calls_in_python_have_cached():
    """It goes back to the device before the capture: beside the step's pool there is only what the step names."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
    x = torch.randn(16384, 1024, device="cuda")  # 64 MiB, as each activation
    fn = training_step(model)
    fn(x)  # both threads have workspaces of cuBLAS for their streams
    torch.cuda.empty_cache()
    before, step = torch.cuda.memory_reserved(), graphed_step(fn)
    for _ in range(6):
        step(x)
    assert step.replays
    memory = explain(step).memory
    assert torch.cuda.memory_reserved() - before - memory.pools - memory.workspaces < x.nbytes
