"""Gradients in bulk: where something could tell the difference, autograd's own way stays, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import thunder
import torch
from models import Linear
from support import same
from torch import nn

from thunder_cg.fastpath import accumulate
from thunder_cg.fastpath.accumulate import Accumulators

Body = Callable[[Any, nn.Module, torch.Tensor, dict[str, Any]], Any]


def plain(jmodel, model, x, state):
    model.zero_grad()
    jmodel(x).sum().backward()


def accumulated(jmodel, model, x, state):
    jmodel(x).sum().backward()


def some_inputs(jmodel, model, x, state):
    model.zero_grad()
    jmodel(x).sum().backward(inputs=list(model.parameters())[:1])


def grad(jmodel, model, x, state):
    return [g.sum().item() for g in torch.autograd.grad(jmodel(x).sum(), list(model.parameters()))]


def tensor_hook(jmodel, model, x, state):
    model.zero_grad()
    seen: list[float] = []
    handle = next(model.parameters()).register_hook(lambda g: seen.append(g.sum().item()) or g * 2)
    jmodel(x).sum().backward()
    handle.remove()
    return seen


def post_accumulate_hook(jmodel, model, x, state):
    model.zero_grad()
    seen: list[float] = []
    parameter = next(model.parameters())
    handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    jmodel(x).sum().backward()
    handle.remove()
    return seen


def hook_on_a_held_node(jmodel, model, x, state):
    """As data parallelism does it."""
    model.zero_grad()
    if not state:
        state["node"] = torch.autograd.graph.get_gradient_edge(next(model.parameters())).node
        state["seen"] = []
        state["node"].register_prehook(lambda g: state["seen"].append(g[0].sum().item()))
    jmodel(x).sum().backward()
    return list(state["seen"])


def hook_between_forward_and_backward(jmodel, model, x, state):
    model.zero_grad()
    seen: list[float] = []
    out = jmodel(x).sum()
    for node, _ in out.grad_fn.next_functions[0][0].next_functions:
        if node is not None and type(node).__name__ == "AccumulateGrad":
            node.register_prehook(lambda g: seen.append(g[0] is not None))
    out.backward()
    return all(seen)


def three_in_flight(jmodel, model, x, state):
    model.zero_grad()
    (jmodel(x).sum() + 2 * jmodel(x * 2).sum() + jmodel(x * 3).square().sum()).backward()


def other_uses_of_parameters(jmodel, model, x, state):
    model.zero_grad()
    (jmodel(x).sum() + sum(p.square().sum() for p in model.parameters())).backward()


def create_graph(jmodel, model, x, state):
    model.zero_grad()
    jmodel(x).sum().backward(create_graph=True)
    gradients = [each.grad.detach().clone() for each in model.parameters()]
    model.zero_grad()
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient


@pytest.mark.parametrize(
    ("body", "in_bulk"),
    [
        (plain, True),
        (other_uses_of_parameters, True),
        (accumulated, False),
        (some_inputs, False),
        (grad, False),
        (tensor_hook, False),
        (post_accumulate_hook, False),
        (hook_on_a_held_node, False),
        (hook_between_forward_and_backward, False),
        (create_graph, False),
    ],
)
@pytest.mark.nightly_after(2)
def test_bulk_only_where_nothing_can_tell(body: Body, in_bulk: bool, transform, device, monkeypatch) -> None:
    assert runs_in_bulk(body, transform, device, monkeypatch) == ({True} if in_bulk else {False})


def test_calls_in_flight_are_summed_in_autograds_order(transform, device, monkeypatch) -> None:
    """The last of them may deliver: the sum of the others is added to what it delivers."""
    assert True in runs_in_bulk(three_in_flight, transform, device, monkeypatch)


def test_tied_weights(transform, device, monkeypatch) -> None:
    """One node has several gradients to sum."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Linear(8, 8, bias=False), Linear(8, 8, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    assert True not in runs_in_bulk(plain, transform, device, monkeypatch, Tied)


def test_functions_that_share_a_parameter(transform, device, monkeypatch) -> None:
    """Their gradients of it are summed in autograd's order, as of one that is called three times."""

    class Scaled(nn.Module):
        def __init__(self, scale: nn.Parameter) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * self.scale) * 1.1

    taken = watch_deliveries(monkeypatch)
    found = []
    for transforms in ([], [transform()]):
        torch.manual_seed(0)
        scale = nn.Parameter(torch.rand(64, device=device) + 0.5)
        parts = [thunder.jit(Scaled(scale), transforms=transforms) for _ in range(3)]
        for _ in range(5):
            x = torch.randn(4, 64, device=device)
            scale.grad = None
            for part in parts:
                x = part(x)
            x.sum().backward()
            found.append(scale.grad.clone())  # nobody holds what is lent
    same(found[:5], found[5:])
    assert taken == [True] * 3  # of the first function, whose backward comes last


def watch_deliveries(monkeypatch) -> list[bool]:
    """Of each delivery from here on, whether gradients went in bulk."""
    taken: list[bool] = []
    deliver = Accumulators.deliver

    def watched(self, gradients, others):
        rest = deliver(self, gradients, others)
        taken.append(rest is not gradients)
        return rest

    monkeypatch.setattr(Accumulators, "deliver", watched)
    return taken


def runs_in_bulk(body: Body, transform, device, monkeypatch, kind=None, steps=6, taken=None) -> set[bool]:
    """Whether gradients went in bulk, over some steps, all of which are compared with plain Thunder."""
    taken = watch_deliveries(monkeypatch) if taken is None else taken

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = kind() if kind else nn.Sequential(Linear(8, 16), nn.GELU(), Linear(16, 4))
        return model.to(device)

    model, twin = make(), make()
    jmodel, jtwin = thunder.jit(model, transforms=[transform()]), thunder.jit(twin)
    state: dict[str, Any] = {}
    twin_state: dict[str, Any] = {}
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 8, device=device)
        assert body(jmodel, model, x, state) == body(jtwin, twin, x, twin_state)
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            assert (mine.grad is None) == (theirs.grad is None)
            if mine.grad is not None:
                same(mine.grad, theirs.grad)
    return set(taken) or {False}


def usual_loop(keep: Callable[[list[Any], torch.Tensor], Any]) -> Body:
    """The loss lives until the next step has its own; ``keep`` may have it live longer."""

    def body(jmodel, model, x, state):
        if "optimizer" not in state:
            state.update(optimizer=torch.optim.SGD(model.parameters(), lr=0.1), kept=[])
            state["scheduler"] = torch.optim.lr_scheduler.StepLR(state["optimizer"], 2)
        state["optimizer"].zero_grad(set_to_none=True)
        state["loss"] = loss = jmodel(x).mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        keep(state["kept"], loss)
        return loss.item()

    return body


def note_and_hook(kept: list[Any], loss: torch.Tensor) -> None:
    """A hook on something else, so that the nodes have to be looked at again."""
    kept.append(loss)
    loss.register_hook(lambda gradient: None)


LOOPS = {
    "loss until the next step": lambda kept, loss: None,
    "all losses": lambda kept, loss: kept.append(loss),
    "a metric": lambda kept, loss: kept.append(loss.detach()),
    "a hook on each loss": note_and_hook,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.nightly_after(2)
def test_the_usual_loop(loop: str, transform, device, monkeypatch) -> None:
    taken = watch_deliveries(monkeypatch)
    runs_in_bulk(usual_loop(LOOPS[loop]), transform, device, monkeypatch, steps=20, taken=taken)
    assert taken == [True] * 18


def test_a_hook_on_a_node_that_losses_hold(transform, device, monkeypatch) -> None:
    def body(jmodel, model, x, state):
        seen = state.setdefault("seen", [])
        if len(state.setdefault("losses", [])) == 6:
            node = torch.autograd.graph.get_gradient_edge(next(model.parameters())).node
            state["handle"] = node.register_prehook(lambda gradients: seen.append(gradients[0].sum().item()))
        if len(state["losses"]) == 10:
            state["handle"].remove()
            state["losses"][0].register_hook(lambda gradient: None)  # removing a hook does not show
        model.zero_grad()
        state["losses"].append(jmodel(x).sum())
        state["losses"][-1].backward()
        return list(seen)

    taken = watch_deliveries(monkeypatch)
    runs_in_bulk(body, transform, device, monkeypatch, steps=14, taken=taken)
    assert taken == [True] * 4 + [False] * 4 + [True] * 4


def test_a_loss_of_the_model_from_before_it_was_compiled(transform, device, monkeypatch) -> None:
    """Its graph holds the nodes, and whoever holds nodes may have given them hooks."""

    def body(jmodel, model, x, state):
        state.setdefault("before", model(x).sum())
        return plain(jmodel, model, x, state)

    assert runs_in_bulk(body, transform, device, monkeypatch) == {False}


def test_a_node_of_another_stream_that_a_loss_holds(transform, device, monkeypatch) -> None:
    """The node would run on its own stream, which nobody orders after the stream of a replay that sets the gradient."""
    current = [0]
    monkeypatch.setattr(accumulate, "_stream_of", lambda device: current[0])
    losses: list[torch.Tensor] = []

    taken = watch_deliveries(monkeypatch)
    model = nn.Sequential(Linear(8, 16), nn.GELU(), Linear(16, 4)).to(device)
    jmodel, x = thunder.jit(model, transforms=[transform()]), torch.randn(4, 8, device=device)

    def steps() -> list[bool]:
        taken.clear()
        for _ in range(4):
            model.zero_grad()
            loss = jmodel(x).sum()
            loss.backward()
            losses.extend([loss] if current[0] == 0 else [])
        return taken[-2:]

    assert steps() == [True, True]
    current[0] = 1
    assert steps() == [False, False]
    current[0] = 0
    assert steps() == [True, True]
    losses.clear()
    current[0] = 1
    assert steps() == [True, True]


@pytest.mark.parametrize("body", [plain, accumulated])
def test_nodes_that_get_nothing_run_on_the_calling_thread(body: Body, transform, device, monkeypatch) -> None:
    """Autograd chooses the thread right after our node; whoever called `backward` finds the setting as it was."""
    setting = torch.autograd.set_multithreading_enabled
    model = nn.Sequential(Linear(8, 16), nn.GELU(), Linear(16, 4)).to(device)
    jmodel = thunder.jit(model, transforms=[transform()])
    chosen: list[bool] = []
    for _ in range(6):
        chosen.clear()
        monkeypatch.setattr(torch.autograd, "set_multithreading_enabled", lambda on: (chosen.append(on), setting(on)))
        body(jmodel, model, torch.ones(4, 8, device=device), {})
        monkeypatch.undo()
        assert setting(True).prev
    assert chosen == ([False] if body is plain else [])
