"""Gradients that callers get in the arena's memory, as long as nobody holds them when the arena is used again."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from threading import Event, Thread

import pytest
import torch
from models import mlp
from support import on_threads, programs, replays, same, same_state, twice

from thunder_cg import cudagraph_transform, release
from thunder_cg.compat import cuda, distributed
from thunder_cg.runtime import tape
from thunder_cg.runtime.cuda.pool import CudaPool
from thunder_cg.runtime.cuda.streams import StreamOrder
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.region import RuntimeRegion


@pytest.fixture
def pair(backend, device):
    return twice(mlp(3, 16).to(device), cudagraph_transform(backend=backend))


def batch(device, i):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(i)).to(device)


def step(model, x):
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def both(pair, x, step=step):
    results = [step(model, x) for model in pair]
    same(*results)
    same_state(*pair)


def backward_of(model) -> Program:
    return next(program for program in programs(model) if program.kind == "backward")


def newest_backward(model) -> RegionGraph:
    return backward_of(model).newest_graph("CUDAGraph2")


def addresses(model):
    return [p.grad.data_ptr() for p in model.parameters()]


def lends(model):
    return backward_of(model).pair.lends


def test_the_usual_loop_copies_no_gradient(device, pair):
    graphed = pair[1]
    places = set()
    for i in range(6):
        both(pair, batch(device, i))
        if i > 1:
            places.add(tuple(addresses(graphed)))
    assert lends(graphed) and len(places) == 1
    assert newest_backward(graphed).nbytes_out == 0 and replays(graphed) == 10
    # Each parameter has a gradient of its own, whose storage has nothing else.
    for p in graphed.parameters():
        assert p.grad.untyped_storage().nbytes() < 2 * p.grad.numel() * p.grad.element_size() + 512


def test_gradients_that_gloo_holds_for_a_moment(device, pair, monkeypatch):
    """The loop has reduced them itself. They are not taken for held, for which a rank would capture anew, alone."""
    graphed, held = pair[1], []
    monkeypatch.setattr(distributed, "is_distributed", lambda: device == "cpu")
    monkeypatch.setattr(distributed.time, "sleep", lambda seconds: held.clear())
    for i in range(6):
        both(pair, batch(device, i))
        held += [p.grad.detach() for p in graphed.parameters()] if device == "cpu" else []
    assert lends(graphed) and replays(graphed) == 10


def fails_if(raises, gradient):
    if next(raises):
        raise ArithmeticError


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.nightly_after(1)
def test_what_a_backward_that_raises_leaves_in_the_queue_of_autograd(backend, device, others):
    """It is no loan that somebody holds, nor is another function's call in flight whose node is there."""
    pairs = [twice(mlp(2, 16).to(device), cudagraph_transform(backend=backend)) for _ in range(1 + others)]
    for models in zip(*pairs):
        raises = iter([False, False, False, True, False, False])
        next(models[-1].parameters()).register_hook(partial(fails_if, raises))
        for i in range(6):
            x = batch(device, i)
            for model in models:
                model.zero_grad(set_to_none=True)
                x = model(x)
            loss, x = x.square().mean(), None
            with pytest.raises(ArithmeticError) if i == 3 else nullcontext():
                loss.backward()
            del loss
    for pair in pairs:
        same_state(*pair)
        graphed = pair[1]
        assert lends(graphed) and len(backward_of(graphed).pair.arenas()) == 1
        assert [region.stats.captures for program in programs(graphed) for region in program.regions] == [1, 1]


def zero_after_the_forward(model, x):
    loss = model(x).square().mean()
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.detach()


def test_gradients_that_outlive_the_next_forward_are_copied(device, pair):
    for i in range(6):
        both(pair, batch(device, i), zero_after_the_forward)
    graphed = pair[1]
    assert not lends(graphed) and newest_backward(graphed).nbytes_out > 0 and replays(graphed) == 10


def test_accumulation(device, pair):
    for i in range(9):
        if i % 3 == 0:
            for model in pair:
                model.zero_grad(set_to_none=True)
        for model in pair:
            model(batch(device, i)).square().mean().backward()
        same_state(*pair)


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.nightly_after(1)
def test_an_evaluation_before_the_gradients_are_used(device, pair, at):
    graphed = pair[1]
    with torch.no_grad():
        for _ in range(3):
            same(*(model(batch(device, 9)) for model in pair))
    for i in range(6):
        both(pair, batch(device, i))
        if i >= at:
            with torch.no_grad():
                same(*(model(batch(device, 9)) for model in pair))
            same_state(*pair)
    assert not lends(graphed)


@pytest.mark.parametrize(
    "of",
    [torch.from_dlpack, lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)[1:], torch.Tensor.untyped_storage],
    ids=["of another library", "it", "alias", "view", "storage"],
)
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.nightly_after(2)
def test_what_is_kept_of_gradients_keeps_its_values(device, pair, of, at):
    kept, clones = [], []
    for i in range(8):
        both(pair, batch(device, i))
        if i == at:
            kept = [of(p.grad) for p in pair[1].parameters()]
            clones = [gradient.clone() for gradient in kept]
    assert [each.tolist() for each in kept] == [each.tolist() for each in clones]
    assert not lends(pair[1])


@pytest.fixture
def another_thread():
    stop = Event()
    thread = Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("another_thread")
@pytest.mark.parametrize("of", [torch.from_dlpack, torch.detach], ids=["of another library", "alias"])
def test_what_is_kept_beside_another_thread(device, pair, of):
    test_what_is_kept_of_gradients_keeps_its_values(device, pair, of, 1)


@pytest.mark.usefixtures("another_thread")
def test_gradients_are_moved_beside_another_thread(device, pair):
    """Those that parameters have. So the arena stays free, and there is one."""

    def late(model, x):  # they are held while the next forward runs
        loss = model(x).square().mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach()

    for i in range(8):
        both(pair, batch(device, i), late)
    forward, _ = programs(pair[1])
    assert replays(pair[1]) >= 4 and not lends(pair[1])
    assert len(forward.pair.arenas()) == 1 and not forward.counts.fallbacks


def test_results_of_autograd_grad(device, pair):
    kept = []
    for i in range(6):
        found = []
        for model in pair:
            found.append(torch.autograd.grad(model(batch(device, i)).square().mean(), [*model.parameters()]))
        kept.append(found)
    for found in kept:
        same(*found)


def test_writes_to_gradients_stay_in_the_step(device, pair):
    for i in range(6):
        both(pair, batch(device, i))
        for model in pair:
            for p in model.parameters():
                p.grad.mul_(2).add_(1)
        same_state(*pair)


def test_a_gradient_that_was_resized(device, pair):
    for i in range(8):
        both(pair, batch(device, i))
        if i in (1, 4):
            for model in pair:
                p = next(model.parameters())
                p.grad.resize_(p.grad.numel() * 4)
                p.grad = None


def test_no_memory_to_move_them(device, backend, pair, monkeypatch):
    def move(self, tensors):
        raise torch.OutOfMemoryError("a fault")

    for i in range(4):
        both(pair, batch(device, i))
    with monkeypatch.context() as patched:
        patched.setattr(tape.TapePool if backend == "tape" else CudaPool, "move", move)
        for i in range(3):
            for model in pair:  # gradients are held, and added to
                model(batch(device, i)).square().mean().backward()
            same_state(*pair)
    for i in range(4):
        both(pair, batch(device, i))


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("how", ["release", "delete", "collect"])
@pytest.mark.nightly_after(2)
def test_gradients_outlive_the_graphs(backend, device, how, at):
    plain, graphed = twice(mlp(3, 16).to(device), cudagraph_transform(backend=backend))
    for i in range(at):
        both((plain, graphed), batch(device, i))
    parameters, arenas = [*graphed.parameters()], [weakref.ref(each) for each in backward_of(graphed).pair.arenas()]
    if how == "release":
        release(graphed)
    elif how == "collect":
        graphed.cycle = graphed  # the garbage collector runs all destructors, in any order
    if how != "release":
        del graphed
        gc.collect()
    assert not any(arena() for arena in arenas)
    others = [torch.full((16, 16), 7.0, device=device) for _ in range(64)]
    for p, q in zip(plain.parameters(), parameters):
        same(p.grad, q.grad)
    del others


def test_it_goes_on_after_a_release(device, pair):
    for _ in range(2):
        for i in range(4):
            both(pair, batch(device, i))
        release(pair[1])
        same_state(*pair)


@pytest.mark.nightly
def test_two_layouts_take_turns(device, pair):
    for i in range(12):
        both(pair, batch(device, i)[: 4 - i % 2])
    assert lends(pair[1]) and replays(pair[1]) == 20


def test_calls_in_flight(device, pair):
    for i in range(5):
        for model in pair:
            model.zero_grad(set_to_none=True)
            losses = [model(batch(device, i + n)).square().mean() for n in range(3)]
            for loss in losses if i % 2 else reversed(losses):
                loss.backward()
        same_state(*pair)


@pytest.mark.parametrize("options", [{"verify": 2}, {"memory_budget": 2**30}])
def test_nothing_is_lent_where_it_would_not_do(backend, device, options):
    pair = twice(mlp(3, 16).to(device), cudagraph_transform(backend=backend, **options))
    for i in range(6):
        both(pair, batch(device, i))
    assert newest_backward(pair[1]).nbytes_out > 0


def test_debug_poisons_what_is_not_held(backend, device):
    pair = twice(mlp(3, 16).to(device), cudagraph_transform(backend=backend, debug=True))
    for i in range(6):
        both(pair, batch(device, i))
        same_state(*pair)
    assert lends(pair[1])


class Added(torch.nn.Module):
    """The gradient of the second parameter is a view of that of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        return (x * (self.first + self.second.view(4, 4))).sin()


def test_a_gradient_that_is_a_view_of_another(backend, device):
    pair = twice(Added().to(device), cudagraph_transform(backend=backend))
    for i in range(4):
        both(pair, batch(device, i)[:, :4])
        for model in pair:  # each has memory of its own
            for p in model.parameters():
                p.grad.mul_(2)
        same_state(*pair)


class SavedIsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return weight.view(4, 4) * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return x.reshape(16), gradient * x


class Scaled(Added):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        return SavedIsGradient.apply(self.scale, super().forward(x))


def test_a_gradient_that_the_recording_keeps_for_other_backwards(backend, device):
    losses = [torch.sum, lambda out: (out * out).sum(), lambda out: (out.t() * torch.arange(4.0, device=device)).sum()]
    pair = twice(Scaled().to(device), cudagraph_transform(backend=backend))
    kept, clones = [], []
    for i, loss in enumerate([0, 0, 1, 1, 1, 2, 2, 2, 0, 1]):
        for model in pair:
            model.zero_grad()
            losses[loss](model(batch(device, i)[:, :4])).backward()
        same_state(*pair)
        if i == 5:  # the third backward is warmed up in the recording of the others
            kept = [pair[1].scale.grad]
            clones = [gradient.clone() for gradient in kept]
        same(kept, clones)


def test_what_a_capture_has_lent_that_failed_is_owned(backend, device, monkeypatch):
    """Pools have let go of its memory by then."""
    pool = tape.TapePool if backend == "tape" else CudaPool
    pair = twice(mlp(3, 16).to(device), cudagraph_transform(backend=backend))
    admit, calls = RuntimeRegion._record, []

    def fails(self, call, args):
        results = admit(self, call, args)
        call.recording.incomplete |= call.program.kind == "backward"
        return results

    both(pair, batch(device, 0))
    with monkeypatch.context() as patched:
        patched.setattr(RuntimeRegion, "_record", fails)
        patched.setattr(pool, "disown", lambda self, tensors: calls.append(tensors))
        both(pair, batch(device, 1))
    assert lends(pair[1]) and not calls
    for i in range(4):
        both(pair, batch(device, i))
    assert lends(pair[1])


class PrivatePool:
    """In the place of the one of the caching allocator."""


def test_a_storage_keeps_its_private_pool_and_nothing_else_does(monkeypatch):
    monkeypatch.setattr(cuda, "disown", lambda tensors: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for end in ("freed", "moved"):
        pool = CudaPool.__new__(CudaPool)
        pool._private_pool, pool._index, pool._order = PrivatePool(), 0, StreamOrder(0)
        kept, held = weakref.ref(pool._private_pool), torch.ones(16)
        pool.disown([held])
        view = held.view(4, 4)
        pool.cycle, pool.held = pool, held  # the garbage collector runs all destructors at once, in any order
        if end == "moved":
            pool.move([held])
        del pool, held
        gc.collect(), gc.collect()
        is_kept = kept() is not None
        del view
        gc.collect()
        assert is_kept == (end == "freed") and kept() is None


def test_another_thread_leaves_what_is_held_where_it_is(device, pair):
    """The thread that holds it may be in the middle of an operator, which has read the address."""
    graphed = pair[1]
    for i in range(4):
        both(pair, batch(device, i))
    before, results = addresses(graphed), []
    for _ in range(3):
        on_threads(lambda: results.append(step_on_another(graphed, batch(device, 9))))
        assert addresses(graphed) == before
        same_state(*pair)
    same(results[0], results[-1])
    same(results[0], step_on_another(pair[0], batch(device, 9)))
    assert lends(graphed)


def test_what_a_thread_leaves_behind_is_moved(device, pair):
    for i in range(3):
        both(pair, batch(device, i))
    on_threads(lambda: both(pair, batch(device, 3)))
    for model in pair:
        model(batch(device, 4)).square().mean().backward()
    same_state(*pair)
    assert not lends(pair[1]) and len(backward_of(pair[1]).pair.arenas()) == 1


def step_on_another(model, x):
    return [each.clone() for each in torch.autograd.grad(model(x).square().mean(), [*model.parameters()])]


class Parts(torch.nn.Module):
    """Several regions, since its product of matrices is denied."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.weight = torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        h = (self.first(x).relu() @ self.weight.t()).tanh()
        return self.last(h.exp().sin())


@pytest.mark.nightly
def test_a_scratch_arena_leaves_alone_what_a_forward_in_flight_has_saved(backend, device):
    """Its graphs have views of that, which are not its own to poison."""
    transform = cudagraph_transform(backend=backend, deny=["matmul"], max_recordings=1)
    pair = twice(Parts().to(device), transform)
    x, small = torch.randn(4, 8, device=device), torch.randn(3, 8, device=device)
    in_flight = []
    for model in pair:
        torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
        in_flight.append(model(x.clone().requires_grad_()))
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)
        result = model(x)
        model(small.clone().requires_grad_()).square().mean().backward()
        model.zero_grad(set_to_none=True)
        result.sum().backward()  # laid out otherwise, so it runs eagerly
    same_state(*pair)
