"""What only CUDA can show: streams, memory, broken captures."""

from __future__ import annotations

import gc
import sys

import pytest
import thunder
import torch
from models import GPT, mlp
from support import on_threads, regions, replays, same, same_state, same_training, twice
from torch import nn

from thunder_cg import cudagraph_transform, explain
from thunder_cg.runtime.arena import Arena, Arenas
from thunder_cg.runtime.cuda import CudaBackend
from thunder_cg.tools.bench.cases import cases
from thunder_cg.tools.bench.measure import of_subject, subject

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
MB = 2**20


def big(width=1024):
    return mlp(6, width)


def twin(model, **options):
    return twice(model.cuda(), cudagraph_transform(**options))


def reserved():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_user_streams():
    plain, graphed = twin(big(64), debug=True)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for step in range(30):
        x = torch.randn(64, 64, device="cuda")
        expected = plain(x)
        stream = streams[step % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
            y = graphed(x)
            y.square().sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        same(expected.detach(), y.detach())
        expected.square().sum().backward()
    torch.cuda.synchronize()
    same_state(plain, graphed)
    assert replays(graphed) > 30


def test_concurrent_streams_hold_different_memory():
    """Two streams at once, a call in flight on each: the second must not start before the first released its arena."""
    _, graphed = twin(big(256), debug=True)
    model = graphed._model
    x = [torch.randn(256, 256, device="cuda") for _ in range(2)]
    with torch.no_grad():
        for _ in range(3):
            graphed(x[0])
        expected = [graphed(t).clone() for t in x]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(50):
            results = []
            for stream, t in zip(streams, x):
                with torch.cuda.stream(stream):
                    results.append(graphed(t))
            torch.cuda.synchronize()
            same(expected, results)
    assert model is not None


def test_draws_on_two_streams():
    """The first graph is at its matrix products when the second is launched, and only then draws."""

    def fn(x):
        y = x
        for _ in range(30):
            y = torch.matmul(y, x) * 1e-3
        return torch.rand_like(y) + y * 0

    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    plain = [thunder.jit(fn) for _ in streams]
    graphed = [thunder.jit(fn, transforms=[cudagraph_transform()]) for _ in streams]  # with arenas of their own
    x = torch.randn(2048, 2048, device="cuda")
    for _ in range(6):
        found = []
        for compiled in (plain, graphed):
            torch.manual_seed(3)
            torch.cuda.synchronize()
            results = []
            for fn_of_stream, stream in zip(compiled, streams):
                with torch.cuda.stream(stream):
                    results.append(fn_of_stream(x))
            torch.cuda.synchronize()
            found.append(results)
        same(*found)
    assert all(replays(compiled) >= 4 for compiled in graphed)


@pytest.mark.parametrize("what", ["arena", "capture"])
def test_draws_that_wait_while_a_capture_begins(what):
    """PyTorch sets the seed of all graphs when a capture begins. That has to wait until a launched graph has drawn."""

    def fn(x):
        return torch.rand_like(x * 2 + 1) + x * 3

    backend, device = CudaBackend(), torch.device("cuda", 0)
    pool = backend.pool(device)
    plain, graphed = thunder.jit(fn), thunder.jit(fn, transforms=[cudagraph_transform()])
    x = torch.randn(1024, 1024, device="cuda")
    pool.capture(lambda args: [args[0] + 1], [[x]])
    for _ in range(3):
        graphed(x)
    torch.manual_seed(3)
    expected = plain(x)
    torch.manual_seed(3)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)
        found = graphed(x)
    if what == "arena":
        backend.pool(device).close()
    else:
        pool.capture(lambda args: [args[0] + 1], [[x]])
    torch.cuda.synchronize()
    same(expected, found)
    assert replays(graphed) == 3
    pool.close()


def test_memory_is_filled_before_it_is_used(deterministic):
    """With deterministic algorithms, PyTorch fills new memory, here on a stream that is busy."""
    pool = CudaBackend().pool(torch.device("cuda", 0))
    pool.memory(1)
    with torch.cuda.stream(pool._capture_stream.stream):
        torch.cuda._sleep(500_000_000)
    memory = pool.memory(4096).zero_()
    torch.cuda.synchronize()
    assert not memory.any()
    pool.close()


def test_ids_of_pools_are_ordinary_numbers():
    """Python keeps numbers up to 256 alive by itself, and no others. See `pool_segments`."""
    for _ in range(257):
        torch.cuda.graph_pool_handle()
    pool = CudaBackend().pool(torch.device("cuda", 0))
    before = [sys.getrefcount(number) for number in pool._private_pool.id]
    memory = pool.memory(3 * MB)
    for _ in range(3):
        assert pool.nbytes() >= 3 * MB
        pool.poison()
    del memory
    pool.poison()
    assert [sys.getrefcount(number) for number in pool._private_pool.id] == before
    other = torch.empty(3 * MB, device="cuda")  # is no memory of the pool's
    assert pool.nbytes() < torch.cuda.memory_reserved()
    del other
    pool.close()
    assert pool.nbytes() == 0


def test_memory_of_dropped_models_comes_back():
    """Each model leaves no more behind than the first one: test_memory_cuda.py looks at workspaces of cuBLAS."""
    x = torch.randn(256, 1024, device="cuda")
    shared = cudagraph_transform()
    at_first, before = reserved(), None
    for _ in range(4):
        model = thunder.jit(big().cuda(), transforms=[shared])
        for _ in range(4):
            model(x).sum().backward()
        assert replays(model) > 0
        del model
        if before is None:
            before = reserved()
            assert before < at_first + 200 * MB
        assert reserved() <= before + 2 * MB


def test_memory_of_old_recordings_comes_back():
    """Recordings of one arena share its memory: eight layouts take little more than one."""
    model = thunder.jit(big().cuda(), transforms=[cudagraph_transform(max_recordings=2)])
    rows = 4096  # 16 MB an activation
    with torch.no_grad():
        x = torch.randn(rows, 1024, device="cuda")
        for _ in range(4):
            model(x)
        before = reserved()
        base = torch.randn(rows * 1024 + 64, device="cuda")
        for i in range(1, 9):
            shifted = base[i * 2 : i * 2 + rows * 1024].view(rows, 1024)
            for _ in range(3):
                model(shifted)
        del base, shifted
        assert reserved() <= before + 48 * MB


@pytest.mark.parametrize(
    ("case", "limit"),
    [("training 16 x 512 tokens", 1.15), ("training 2 x 128 tokens", 1.8)],
    ids=["activations", "gradients"],
)
def test_peak_memory_of_training(case, limit):
    """Everything that the process reserves over the model, warm-up and capture included, against plain Thunder."""
    device = torch.device("cuda")
    (case,) = [c for c in cases(device, quick=False) if case in c.name]
    reserved = [of_subject(name, subject(case, device)).samples.reserved for name in ("thunder", "thunder_cg")]
    assert reserved[1] <= limit * reserved[0], reserved


def test_gradients_exist_once():
    """A training step of a model with small activations needs its parameters, its gradients and little more."""
    width, layers = 2048, 12
    x = torch.randn(8, width, device="cuda")
    found = []
    for transforms in ([], [cudagraph_transform()]):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).cuda()
        compiled = thunder.jit(model, transforms=transforms)
        before = reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            compiled(x).sum().backward()
        found.append(torch.cuda.max_memory_reserved() - before)
        del model, compiled
    assert found[1] <= max(found[0], layers * width * width * 4) + 128 * MB, (
        found
    )  # results that wait for a common copy, and workspaces of cuBLAS


def peak_of_training(parts, transforms):
    """MB reserved at most while functions in a row train, the first call included."""
    compiled = [thunder.jit(part, transforms=transforms) for part in parts]
    before = reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        y = torch.ones(4096, 1024, device="cuda")
        for part in compiled:
            part.zero_grad(set_to_none=True)
            y = part(y)
        y.square().mean().backward()
    return (torch.cuda.max_memory_reserved() - before) // MB


def test_a_large_function_among_small_ones_takes_no_more_memory():
    """Its backward uses the memory of what its forward saved, and lends its gradients, as if it were alone."""

    def peak(*transforms):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)]
        heads = [nn.Sequential(nn.Linear(1024, 256), nn.GELU(), nn.Linear(256, 1024)) for _ in range(3)]
        return peak_of_training([part.cuda() for part in (nn.Sequential(*layers), *heads)], transforms)

    plain, graphed = peak(), peak(cudagraph_transform())
    assert graphed <= 1.2 * plain, (plain, graphed)  # each arena has segments of its own


def test_memory_of_backwards_exists_once(monkeypatch):
    """Functions in a row, as graph breaks leave them, share what their backwards need for a while."""

    def peak(*transforms):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda() for _ in range(8)]
        return peak_of_training(parts, transforms)

    plain, shared = peak(), peak(cudagraph_transform())
    monkeypatch.setattr(Arena, "join", lambda self, pair, *, captures: False)
    monkeypatch.setattr(Arenas, "hold_scratch", lambda self, arena: None)
    apart = peak(cudagraph_transform())
    assert shared <= 1.1 * plain, (plain, shared, apart)
    assert apart - shared >= 6 * 64, (plain, shared, apart)  # a hidden layer is 64 MB


def test_a_broken_capture_leaves_nothing_behind():
    backend = CudaBackend()
    pool = backend.pool(torch.device("cuda", 0))
    x = torch.randn(1024, 1024, device="cuda")

    def draws(args):
        (t,) = args
        return [torch.rand_like(t) + t]

    graph, (before,) = pool.capture(draws, [[x]])
    for broken in (lambda a: [a[0] * a[0].sum().item()], lambda a: [a[0].cpu()], lambda a: 1 / 0):
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            pool.capture(broken, [[x]])
        torch.manual_seed(3)
        expected = torch.rand(1024, 1024, device="cuda")
        torch.manual_seed(3)
        graph.replay()
        same(expected + x, before)  # a graph made before still draws from the default generator
        follows = torch.rand(4, device="cuda")
        torch.manual_seed(3)
        torch.rand(1024, 1024, device="cuda")
        same(torch.rand(4, device="cuda"), follows)
        other, (y,) = pool.capture(draws, [[x]])
        other.replay()
        assert not torch.equal(y, before)
        del other, y
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # memory that other streams used is still freed
        block = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
        block.record_stream(torch.cuda.current_stream())
    del block, graph, before
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free = torch.cuda.memory_reserved()
    pool.close()
    assert reserved() < free


def test_poison_spares_what_is_owned():
    pool = CudaBackend().pool(torch.device("cuda", 0))
    owned = pool.memory(4096).fill_(1)
    freed = pool.alias(pool.memory(4096).fill_(1))
    pool.poison()
    assert owned.eq(1).all() and freed.eq(255).all()
    pool.close()


def test_twenty_steps_of_a_gpt(deterministic):
    plain, graphed = twin(GPT(layers=12, width=128, heads=4, vocab=512, block=64, dropout=0.1))
    _twenty_steps(plain, graphed, lambda: (torch.randint(0, 512, (4, 64), device="cuda"),) * 2)


def test_twenty_steps_of_a_resnet18(deterministic):
    torchvision = pytest.importorskip("torchvision")
    plain, graphed = twin(torchvision.models.resnet18(num_classes=10))
    _twenty_steps(plain, graphed, lambda: (torch.randn(8, 3, 64, 64, device="cuda"),))


def _twenty_steps(plain, graphed, batch):
    batches = [batch() for _ in range(20)]
    same_training(plain, graphed, batches, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    assert [r["captures"] for r in regions(graphed)] == [1, 1]
    assert [r["replays"] for r in regions(graphed)] == [19, 19]


def test_draws_on_several_threads():
    """PyTorch refuses draws while another thread captures, so warm-ups wait for captures."""

    def work() -> None:
        for _ in range(8):
            jfn = thunder.jit(
                lambda x: torch.sin(nn.functional.dropout(torch.cos(x) * 2, 0.5)) * 3,
                transforms=[cudagraph_transform()],
            )
            for rows in (8, 16, 8, 16, 8, 16):
                jfn(torch.ones(rows, 64, device="cuda"))

    on_threads(*[work] * 4)


def test_plans_of_fourier_transforms():
    """PyTorch drops plans from its cache and frees their tables, which a graph would read."""
    fn = lambda x: torch.sin(torch.fft.irfft(torch.fft.rfft(torch.cos(x) * 2))) * 2  # noqa: E731
    plain, graphed = twice(fn, cudagraph_transform())
    for _ in range(4):
        x = torch.randn(8, 1010, device="cuda")
        torch.backends.cuda.cufft_plan_cache.clear()
        same(plain(x), graphed(x))
    assert [r["replays"] for r in regions(graphed)] == [3, 3]


@pytest.mark.parametrize("shape", [(64, 64), (32, 8, 8), (64, 20, 20), (2, 300, 300)])
def test_libraries_of_solvers(shape):
    """PyTorch picks a library by the sizes, and not all can be captured. The other ops are captured anyway."""
    fn = lambda x: torch.sin(torch.linalg.slogdet(torch.cos(x * 2) + 3)[1] * 2) * 3  # noqa: E731
    plain, graphed = twice(fn, cudagraph_transform())
    for _ in range(4):
        x = torch.randn(shape, device="cuda")
        same(plain(x), graphed(x))
    assert regions(graphed) and all(r["replays"] == 3 and not r["failure"] for r in regions(graphed))


@pytest.mark.parametrize("trains", [False, True])
def test_threads_that_never_used_the_device(trains):
    """The driver crashes the process if the thread has no context, be it autograd's thread or one of the user's."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
    jmodel = thunder.jit(model, transforms=[cudagraph_transform(backend="cuda")])
    inputs = (torch.randn(4, 8, device="cuda"),)

    def call():
        with torch.set_grad_enabled(trains):
            result = jmodel(*inputs)
        if trains:
            result.backward(torch.ones(4, 1, device="cuda"))
        found.append(result.detach())

    found: list[torch.Tensor] = []
    for _ in range(3):
        call()
    for _ in range(2):
        on_threads(call)
    torch.cuda.synchronize()
    with torch.no_grad():
        expected = model(*inputs)
    assert len(found) == 5 and all(torch.allclose(y, expected, atol=1e-5) for y in found)
    assert explain(jmodel).traces[0].fast_path_calls >= 1


def test_a_training_step_in_a_graph_of_the_users():
    """Regions run their ops in somebody else's capture, and their backward makes no stream outside of it wait."""
    plain, graphed = twin(big(64))
    x = torch.randn(8, 64, device="cuda")

    def step(model):
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()

    for _ in range(4):
        step(plain)
        step(graphed)
    # In a user's capture, Thunder's backward runs on autograd's thread, where cuBLAS has to be ready.
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(graphed)
    x.normal_()
    graph.replay()
    step(plain)
    same_state(plain, graphed)
    for expected, found in zip(plain.parameters(), graphed.parameters()):
        same(expected.grad, found.grad)
