"""Memory of graphs on a GPU: what the ledger says is what PyTorch and the driver say, and all of it comes back."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import thunder
import torch
from models import mlp
from support import programs, replays, same, same_state, training_step, twice

from thunder_cg import cudagraph_transform, executors, explain, graphed_step, release
from thunder_cg.runtime.cuda import streams
from thunder_cg.tools.measuring import memory_peaks, new_segments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
MB = 2**20


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats()["reserved_bytes.all.current"])


def taken() -> int:
    """Bytes of the device that the process, or another one, has."""
    reserved()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture
def quiet():
    """No graph is alive, and no workspace, in whoever's memory: what comes is the test's."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    streams.CaptureStream.forget_workspaces()


def fn(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.relu(x * 2) + 1)


@pytest.mark.parametrize("trains", [False, True])
def test_the_ledger_adds_up_to_what_pytorch_and_the_driver_say(quiet, trains):
    transform = cudagraph_transform()
    x = torch.randn(32768, 1024, device="cuda")  # 128 MB, so that what the driver rounds to is less than one percent
    # Kernels are loaded, and cuBLAS has its handles, before anything is counted.
    other = thunder.jit(mlp(4, 1024).cuda(), transforms=[cudagraph_transform()])
    model = thunder.jit(mlp(4, 1024).cuda(), transforms=[transform])

    def call(jfn, times):
        for _ in range(times):
            with torch.set_grad_enabled(trains):
                y = jfn(x)
            if trains:
                y.square().mean().backward()
                jfn.zero_grad(set_to_none=True)

    call(other, 4)
    release(other)
    before, taken_before = reserved(), taken()
    call(model, 4)
    memory = explain(model).memory
    grown, taken_grown = reserved() - before, taken() - taken_before
    assert replays(model) > 0 and memory.pools == transform._shared.arenas.nbytes() > 200 * MB
    assert memory.workspaces > 0
    assert memory.pools + memory.workspaces == pytest.approx(grown, rel=0.01)
    assert memory.pools + memory.workspaces + memory.graphs == pytest.approx(taken_grown, rel=0.01)
    call(model, 2)
    release(model)
    assert reserved() <= before + 2 * MB
    assert taken() <= taken_before + 4 * MB


def test_the_ledger_of_a_step_adds_up(quiet):
    x = torch.randn(32768, 1024, device="cuda")
    models = [thunder.jit(mlp(4, 1024).cuda(), transforms=[cudagraph_transform()]) for _ in range(2)]
    other, step = (graphed_step(training_step(model, 1e-3)) for model in models)
    for _ in range(4):  # kernels are loaded, and cuBLAS has its handles, before anything is counted
        other(x)
    release(other)  # with the workspaces of the user's own stream, which the capture frees as well
    before, taken_before = reserved(), taken()
    torch.cuda.reset_peak_memory_stats()  # so that a call in Python raises it, which shows what the step needs
    for _ in range(4):
        step(x)
    memory = explain(step).memory
    grown, taken_grown = reserved() - before, taken() - taken_before
    assert step.replays >= 2 and memory.pools > 200 * MB, step.in_python
    assert memory.pools + memory.workspaces == pytest.approx(grown, rel=0.01)
    assert memory.pools + memory.workspaces + memory.graphs == pytest.approx(taken_grown, rel=0.01)
    (recording,) = memory.recordings
    (region,) = recording.regions
    assert recording.gradients == sum(4 * parameter.numel() for parameter in models[1].parameters())
    assert (region.copied_in, region.copied_out) == (128 * MB, 4)
    assert 512 * MB < recording.needs <= 1.02 * memory.pools
    release(step)
    models[1].zero_grad(set_to_none=True)  # the gradients are the caller's
    assert reserved() <= before + 2 * MB
    assert taken() <= taken_before + 4 * MB


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_a_budget_is_kept_by_a_step(quiet):
    budget = 96 * MB
    model = mlp(2, 1024).cuda()
    plain, jitted = twice(model, cudagraph_transform(memory_budget=1))  # the step's graphs are all that there are
    plain_step, step = training_step(plain, 1e-3), graphed_step(training_step(jitted, 1e-3), memory_budget=budget)
    for _ in range(2):
        for rows in (512, 1024, 16384):  # a batch of 16384 rows has 64 MB
            x = torch.randn(rows, 1024, device="cuda")
            for _ in range(4):
                same(plain_step(x).detach(), step(x).detach())
                memory = explain(step).memory
                assert memory.pools <= memory.budget == budget, step.in_python
    same_state(plain, jitted)
    assert step.replays >= 4, step.in_python
    assert any(reason.startswith("memory_budget is 100,663,296 bytes, and its") for reason in step.in_python)


def test_all_memory_comes_back_and_the_next_calls_are_right(quiet):
    plain, graphed = twice(mlp(4, 1024).cuda(), cudagraph_transform(debug=True))
    x = torch.randn(4096, 1024, device="cuda")
    before = reserved()
    for _ in range(2):
        losses = []
        for _ in range(4):
            results = [jfn(x).square().mean() for jfn in (plain, graphed)]
            for result in results:
                result.backward()
            losses.append(results)
        same(*([row[i].detach() for row in losses] for i in (0, 1)))
        same_state(plain, graphed)
        for jfn in (plain, graphed):
            jfn.zero_grad(set_to_none=True)
        assert reserved() > before + 32 * MB
        release(graphed)  # although all losses live
        assert reserved() <= before + 2 * MB
    y = graphed(x)
    release(graphed)
    y.square().mean().backward()
    plain(x).square().mean().backward()
    same_state(plain, graphed)


def test_workspaces_go_with_the_last_model(quiet):
    x = torch.randn(256, 1024, device="cuda")
    before = reserved()
    models = [thunder.jit(mlp(2, 1024).cuda(), transforms=[cudagraph_transform()]) for _ in range(2)]
    for model in models:
        for _ in range(4):
            model(x).sum().backward()
    assert all(explain(model).memory.workspaces > 0 for model in models)
    expected = [model(x).detach() for model in models]
    del models[0], model
    gc.collect()
    for _ in range(3):  # what the other one's graphs use is still theirs
        torch.empty(64 * MB, dtype=torch.uint8, device="cuda").fill_(255)
        same(expected[1], models[0](x).detach())
    release(models[0])
    for _ in range(4):
        same(expected[1], models[0](x).detach())
    del models[0]
    assert reserved() <= before + 2 * MB


def test_a_first_warm_up_has_workspaces_where_tensors_were(quiet):
    """In a process of its own, in which nothing else runs that could need them."""
    code = """
import thunder, torch
from thunder_cg import cudagraph_transform
from thunder_cg.runtime.cuda.streams import CaptureStream

def fn(x, w):
    return torch.relu(x * 2).sum(0, keepdim=True)[:, :4096] @ w

x, w = torch.randn(512, 65536, device="cuda"), torch.randn(4096, 4096, device="cuda")
plain, jitted = thunder.jit(fn), thunder.jit(fn, transforms=[cudagraph_transform()])
peaks, results = [], []
for each in (plain, jitted):
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    results.append(each(x, w))
    peaks.append(torch.cuda.max_memory_reserved())
assert CaptureStream._cleared == 1
assert peaks[1] <= peaks[0] + 6 * 2**20, peaks
for _ in range(4):
    results.append(jitted(x, w))
assert all(torch.equal(results[0], each) for each in results)
assert sum(each.workspace_nbytes() for each in CaptureStream._all) > 2**20
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_workspaces_stay_while_somebody_else_has_graphs(quiet):
    weight = torch.randn(512, 512, device="cuda")
    result = weight @ weight
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result.copy_(weight @ weight)
    expected = weight @ weight
    model = thunder.jit(mlp(2, 64).cuda(), transforms=[cudagraph_transform()])
    for _ in range(4):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
    cleared = streams.CaptureStream._cleared
    release(model)
    assert streams.CaptureStream._cleared == cleared
    torch.empty(64 * MB, dtype=torch.uint8, device="cuda").fill_(255)
    graph.replay()
    same(expected, result)


def test_a_budget_is_kept(quiet):
    budget = 96 * MB
    transform = cudagraph_transform(memory_budget=budget)
    plain, jitted = twice(fn, transform)
    for at in range(4):
        for megabytes in (4, 8, 12, 16, 64):  # of one tensor; three are needed, of which one is the copy of the input
            x = torch.randn(megabytes * MB // 4, device="cuda")
            for _ in range(4):
                same(plain(x), jitted(x))
                assert transform._shared.arenas.nbytes() <= budget, (at, megabytes)
    assert replays(jitted) > 20
    reasons = [reason for program in programs(jitted) for reason in program.counts.fallbacks]
    assert reasons and all(reason.startswith("memory_budget is 100,663,296 bytes, and its") for reason in reasons)


def test_a_share_of_the_device():
    transform = cudagraph_transform(memory_budget=0.5)
    total = torch.cuda.get_device_properties(0).total_memory
    assert transform._shared.arenas.budget(torch.device("cuda", 0)) == total // 2


def test_training_takes_no_more_memory_than_without_graphs(quiet):
    """Where gradients are most of it: they are in the memory of activations, as without graphs."""
    x = torch.randn(8192, 2048, device="cuda")

    def peak(**jit):
        torch.manual_seed(0)
        model = thunder.jit(mlp(16, 2048).cuda(), **jit)
        before = reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
        most = torch.cuda.max_memory_reserved() - before
        gradients = [p.grad.clone() for p in model.parameters()]
        return most, gradients

    plain, expected = peak()
    graphed, found = peak(transforms=[cudagraph_transform()])
    same(expected, found)
    assert plain > 1000 * MB
    assert graphed <= 1.05 * plain, (graphed, plain)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_step_takes_no_more_memory_than_without_graphs(quiet, fused):
    """What is reserved: the optimizer's state is not spread over what the first backward has used.

    Beside that, a step's graph has a workspace of cuBLAS: RESULTS.md has the numbers of larger models.
    """
    x = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)

    def peak(is_graphed, **jit):
        torch.manual_seed(0)
        before = reserved()
        torch.cuda.reset_peak_memory_stats()
        options = {**jit, **({"executors": executors()} if fused else {})}
        model = thunder.jit(mlp(12, 2048).to("cuda", torch.bfloat16), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=True)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = graphed_step(step, modules=[model], optimizers=[optimizer]) if is_graphed else step
        losses = [call(x).item() for _ in range(6)]
        assert not is_graphed or call.replays
        return torch.cuda.max_memory_reserved() - before, losses

    plain, expected = peak(False)
    graphed, found = peak(True, transforms=[cudagraph_transform()])
    assert fused or found == expected  # Inductor may take other kernels when it compiles again
    assert plain > 500 * MB
    assert graphed <= 1.1 * plain, (graphed, plain)


def test_what_a_benchmark_measures_of_memory_does_not_depend_on_what_ran_before(quiet):
    """Of two tensors in one segment the first is freed: the next one would go there."""
    reserved()
    sizes = 6 * MB, MB // 2
    before = [[torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes] for _ in range(2)]
    del before[0]
    device = torch.device("cuda")
    with new_segments(device), memory_peaks(device) as peaks:
        found = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    assert len(found) == 2 and peaks.allocated == sum(sizes) / 1e6
    assert peaks.reserved == (20 + 2) * MB / 1e6  # a segment for tensors of 1 to 10 MiB, and one for smaller ones
