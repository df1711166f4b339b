"""Functions of one transform whose forwards await their backwards share an arena. See Note [Shared arenas]."""

from __future__ import annotations

import random

import pytest
import thunder
import torch
from support import fast_path_calls, programs, replays, same
from torch import nn

from thunder_cg import explain
from thunder_cg.runtime import arena as arena_module
from thunder_cg.runtime.arena import Arena
from thunder_cg.runtime.pair import Pair


class Layer(nn.Module):
    """Saves what it makes in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return torch.tanh(self.second(torch.sin(self.first(x)) * 2))


@pytest.fixture
def chains(transform, device):
    """Compiles several layers with one transform, and the same layers without."""

    def make(count, **options):
        torch.manual_seed(0)
        shared = transform(**options)
        plain, graphed = [], []
        for _ in range(count):
            layer = Layer().to(device)
            twin = Layer().to(device)
            twin.load_state_dict(layer.state_dict())
            plain.append(thunder.jit(layer))
            graphed.append(thunder.jit(twin, transforms=[shared]))
        return plain, graphed

    return make


def arenas(graphed) -> set[Arena]:
    return {arena for layer in graphed for program in programs(layer) for arena in program.pair.arenas()}


def gradients(layers):
    found = [[each.grad for each in layer.parameters()] for layer in layers]
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return found


def batch(device, rows=4):
    return torch.randn(rows, 8, device=device)


def through(layers, x):
    """Each in an autograd graph of its own, as functions between graph breaks are."""
    for layer in layers:
        x = layer(x)
    return x


def test_a_chain_has_one_arena(chains, device):
    plain, graphed = chains(3)
    for _ in range(6):
        x = batch(device)
        for layers in (plain, graphed):
            through(layers, x).square().sum().backward()
        same(*map(gradients, (plain, graphed)))
    (arena,) = arenas(graphed)
    assert arena.is_shared and not arena.is_held()
    for layer in graphed:
        assert replays(layer) >= 8 and fast_path_calls(layer) >= 3, explain(layer)
        assert not any(trace.fallbacks for trace in explain(layer).traces)


def test_only_the_last_backward_lends(chains, device):
    """What others lent would be written over by it. The arena has no room for copies that leave."""
    _, graphed = chains(3)
    for _ in range(4):
        through(graphed, batch(device)).sum().backward()
        gradients(graphed)
    lent = [
        any(trace.lent for _, traces in program.recorded() for trace in traces)
        for layer in graphed
        for program in programs(layer)
    ]
    assert lent == [False, True, False, False, False, False]


def test_backwards_in_another_order(chains, device):
    """They were captured in one order, and come in another one: each runs beside those that wait, or not at all."""
    plain, graphed = chains(3)
    for orders in [(2, 1, 0)] * 3 + [(0, 1, 2), (1, 2, 0)] * 4 + [(2, 1, 0)] * 3:
        x = batch(device)
        for layers in (plain, graphed):
            losses = [layer(x).square().sum() for layer in layers]
            for i in orders:
                losses[i].backward()
        same(*map(gradients, (plain, graphed)))


@pytest.mark.parametrize("kept", [False, True])
def test_a_backward_that_never_comes(chains, device, kept):
    plain, graphed = chains(3)
    alive = []
    for step in range(8):
        x = batch(device)
        for layers in (plain, graphed):
            first, second, third = [layer(x).square().sum() for layer in layers]
            if step % 3 == 2:
                if kept:
                    alive.append(second)
                del second
                third.backward()
            else:
                (second + third).backward()
            first.backward()
        same(*map(gradients, (plain, graphed)))
        alive[:-2] = []


def test_a_layer_that_comes_later(chains, device, monkeypatch):
    """One call later, so that it is captured when the others replay: they are captured anew with it, once."""
    monkeypatch.setattr(arena_module, "LEAST_SEGMENT", 0)
    monkeypatch.setattr(arena_module, "_MUCH", 2**30)
    plain, graphed = chains(3)
    for step in range(10):
        x = batch(device)
        for layers in (plain, graphed):
            through(layers[: 3 if step else 2], x).square().sum().backward()
        same(*map(gradients, (plain, graphed)))
    assert len(arenas(graphed)) == 1
    assert [trace.captures for layer in graphed for trace in explain(layer).traces] == [2, 2, 2, 2, 1, 1]
    assert all(fast_path_calls(layer) >= 6 for layer in graphed)


def test_inference_between_forward_and_backward(chains, device):
    plain, graphed = chains(2)
    for _ in range(6):
        x = batch(device)
        results = []
        for layers in (plain, graphed):
            loss = layers[0](x).square().sum()
            with torch.no_grad():
                results.append(layers[1](x))
            loss.backward()
        same(*results)
        same(*map(gradients, (plain, graphed)))
    assert len(arenas(graphed)) == 1


def test_a_loss_that_is_kept_holds_no_arena(transform, device):
    """The last function saves nothing, so its backward does not continue its calls."""
    graphed = thunder.jit(lambda a, b: torch.stack([a, b]).sum(), transforms=[transform()])
    for _ in range(5):
        a, b = (torch.ones((), device=device, requires_grad=True) for _ in range(2))
        loss = graphed(a, b)
        loss.backward()
        assert a.grad == b.grad == 1 and loss == 2
        assert not any(arena.is_held() for arena in arenas([graphed]))
    assert replays(graphed) >= 6


def test_a_budget_spares_what_waiting_calls_replay(chains, device, monkeypatch):
    """Their memory is in use until their backwards are over, so to discard it gives nothing back."""
    plain, graphed = chains(3, memory_budget=24 * 1024)
    discarded, discard = [], Pair.discard_for_budget

    def note(pair, recording):
        discarded.append(recording.token in recording.arena.waiting_beside())
        discard(pair, recording)

    monkeypatch.setattr(Pair, "discard_for_budget", note)
    for rows in (2, 3, 4, 5) * 4:
        x = batch(device, rows)
        for layers in (plain, graphed):
            through(layers, x).square().sum().backward()
        same(*map(gradients, (plain, graphed)))
    assert not any(discarded)


@pytest.mark.parametrize("seed", [7, 11, 1, 0, 2, 3, 4, 5, 6, 8, 9, 10])
@pytest.mark.nightly_after(2)
def test_whatever_is_called(chains, device, seed):
    """Forwards, backwards, dropped losses and inference in random order, in three layers and with two sizes."""
    draw = random.Random(seed)
    plain, graphed = chains(3)
    waiting = []
    for _ in range(70):
        act = draw.choice(["forward", "forward", "backward", "backward", "newest", "drop", "infer", "clear"])
        i, rows = draw.randrange(3), draw.choice([4, 4, 6])
        x = batch(device, rows)
        if act == "forward" and len(waiting) < 5:
            waiting.append([layers[i](x).square().sum() for layers in (plain, graphed)])
            same(*waiting[-1])
        elif act in ("backward", "newest", "drop") and waiting:
            losses = waiting.pop(-1 if act == "newest" else draw.randrange(len(waiting)))
            for loss in losses if act != "drop" else ():
                loss.backward()
            del losses
        elif act == "infer":
            with torch.no_grad():
                same(*(layers[i](x) for layers in (plain, graphed)))
        elif act == "clear":
            same(*map(gradients, (plain, graphed)))
    same(*map(gradients, (plain, graphed)))
    assert sum(map(replays, graphed)) > 0
