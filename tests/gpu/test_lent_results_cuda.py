"""Large results of inference on CUDA: what they take, and that no replay writes to what a stream still reads."""

from __future__ import annotations

import gc

import pytest
import thunder
import torch
from torch import nn

from thunder_cg import cudagraph_transform
from thunder_cg.runtime.cuda import streams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
MB = 2**20


def model_and_input():
    """A result of 256 MB, and 16 MB below it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 16384)).cuda().requires_grad_(False)
    return model, torch.randn(4096, 1024, device="cuda")


def peak(loop, *transforms):
    """MB reserved and allocated at most, the first call included."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # no graph is alive, and each loop makes its own
    streams.CaptureStream.forget_workspaces()
    torch.cuda.empty_cache()
    model, x = model_and_input()
    compiled = thunder.jit(model, transforms=transforms)
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loop(compiled, x)
    torch.cuda.synchronize()
    after = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
    return [(b - a) // MB for a, b in zip(before, after)]


def dropped(model, x):
    for _ in range(6):
        model(x)


def rebound(model, x):
    for _ in range(8):
        y = model(x)
    del y


@pytest.mark.parametrize("loop", [dropped, rebound])
def test_a_large_result_takes_no_memory_besides(loop):
    plain, graphed = peak(loop), peak(loop, cudagraph_transform())
    # Inputs of a graph are copied (16 MB), and segments are rounded.
    assert all(ours <= theirs + 64 for ours, theirs in zip(graphed, plain)), (plain, graphed)


def test_a_stream_still_reads_a_result_that_nobody_holds():
    """As `record_stream` has it: the allocator does not give the memory out before the stream is done."""
    model, x = model_and_input()
    graphed = thunder.jit(model, transforms=[cudagraph_transform()])
    with torch.no_grad():
        want = model(x)
        for _ in range(3):
            graphed(x)
        side, found = torch.cuda.Stream(), []
        for i in range(6):
            y = graphed(x * (i + 1))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)  # about 25 ms
                found.append(y.clone())
            y.record_stream(side)
            del y
        torch.cuda.synchronize()
        wanted = [model(x * (i + 1)) for i in range(6)]
    assert all(map(torch.equal, found, wanted)) and torch.equal(want, wanted[0])


def test_results_on_two_streams():
    model, x = model_and_input()
    graphed = thunder.jit(model, transforms=[cudagraph_transform()])
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        for i in range(10):
            stream = streams[i % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = graphed(x + i)
                equal = torch.equal(y, model(x + i))
            assert equal, i
            del y


def test_a_stream_still_reads_a_result_that_another_stream_is_to_replace():
    """Each stream gets results in turn; the first one lets go of its result while its kernels have yet to read it."""
    model, x = model_and_input()
    graphed = thunder.jit(model, transforms=[cudagraph_transform()])
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        for _ in range(6):
            y = graphed(x)  # two graphs take turns
        del y
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            y = graphed(x * 2)
        with torch.cuda.stream(second):
            z = graphed(x * 3)
        with torch.cuda.stream(first):
            torch.cuda._sleep(200_000_000)  # about 100 ms
            found = y.clone()
            del y
        with torch.cuda.stream(second):
            graphed(x * 4)
        torch.cuda.synchronize()
        assert torch.equal(found, model(x * 2)) and torch.equal(z, model(x * 3))


def test_looking_for_results_fills_no_memory():
    """Where algorithms are to be deterministic, PyTorch fills new tensors; gradients that are lent may be there."""
    x = torch.randn(4096, 4096, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        graphed = thunder.jit(lambda x: (x * 2.0 + 1.0) * 3.0, transforms=[cudagraph_transform()])
        for i in range(8):
            leaf = (x + i).requires_grad_()
            y = graphed(leaf)
            (gradient,) = torch.autograd.grad(y.sum(), leaf)
            del y
            with torch.no_grad():
                other = graphed(x)
            assert torch.equal(gradient, torch.full_like(x, 6.0)), i
            assert torch.equal(other, (x * 2.0 + 1.0) * 3.0), i
    finally:
        torch.use_deterministic_algorithms(False)
