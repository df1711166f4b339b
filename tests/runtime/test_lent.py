"""Gradients that callers get in the arena's memory, as long as nobody holds them when the arena is used again."""

from __future__ import annotations

import gc

import pytest
import torch
from models import mlp
from support import programs, replays, same, same_state, twice

from thunder_cg import cudagraph_transform, release
from thunder_cg.runtime import tape
from thunder_cg.runtime.cuda.pool import CudaPool
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import RegionGraph


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
    "of", [lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)[1:]], ids=["it", "alias", "view"]
)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_what_is_kept_of_gradients_keeps_its_values(device, pair, of, at):
    kept, clones = [], []
    for i in range(8):
        both(pair, batch(device, i))
        if i == at:
            kept = [of(p.grad) for p in pair[1].parameters()]
            clones = [gradient.clone() for gradient in kept]
    same(kept, clones)


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
@pytest.mark.parametrize("how", ["release", "delete"])
def test_gradients_outlive_the_graphs(device, pair, how, at):
    plain, graphed = pair
    for i in range(at):
        both(pair, batch(device, i))
    parameters = [*graphed.parameters()]
    if how == "release":
        release(graphed)
    else:
        del graphed, pair
        gc.collect()
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
