"""Loops of papers whose step is graphed: they end where the same loops end without graphs, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from support import sgd
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from torch.nn.functional import cross_entropy, mse_loss, normalize, softplus

CALLS = 9


def second_order_meta_learning(twins, graphed):
    """MAML: the gradient goes through two updates of parameters that are in no module."""
    model = twins.model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = sgd(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        fast = dict(model.named_parameters())
        for _ in range(2):
            loss = cross_entropy(functional_call(model, fast, (x,)), y)
            found = torch.autograd.grad(loss, [*fast.values()], create_graph=True)
            fast = {name: value - 0.1 * each for (name, value), each in zip(fast.items(), found)}
        loss = cross_entropy(functional_call(model, fast, (x * 2,)), y)
        loss.backward()
        optimizer.step()
        return loss

    return step, lambda _: [*model.parameters()]


def hessian_vector_products(twins, graphed):
    """Forward over reverse, with parameters that each step replaces."""
    model = twins.model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    state = {name: each.detach().clone() for name, each in model.named_parameters()}

    def step(x, y):
        directions = {name: torch.randn_like(each) for name, each in state.items()}

        def loss_of(parameters):
            return cross_entropy(functional_call(model, parameters, (x,)), y)

        gradients, curvature = jvp(grad(loss_of), (state,), (directions,))
        for name in state:
            state[name] = state[name] - 0.1 * gradients[name] - 0.01 * curvature[name].abs()
        return loss_of(state)

    return step, lambda _: [*state.values()]


def gradients_of_each_sample(twins, graphed):
    """DP-SGD: clips the gradient of each sample, and adds noise."""
    model = twins.model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = sgd(model.parameters())

    def loss_of(parameters, x, y):
        return cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    def step(x, y):
        parameters = {name: each.detach() for name, each in model.named_parameters()}
        gradients, losses = vmap(grad_and_value(loss_of), (None, 0, 0))(parameters, x, y)
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
        factor = (0.5 / (norms + 1e-6)).clamp(max=1)
        for name, each in model.named_parameters():
            each.grad = torch.einsum("b,b...->...", factor, gradients[name]) + 0.01 * torch.randn_like(each)
        optimizer.step()
        return losses.mean()

    return step, lambda _: [*model.parameters()]


def a_queue_of_keys(twins, graphed):
    """MoCo: a buffer that is written where a tensor points to, and an average that gets other memory."""
    query = twins.model(nn.Linear(4, 6))
    key = copy.deepcopy(query).requires_grad_(False)
    optimizer = sgd(query.parameters())
    queue = normalize(torch.randn(6, 20, device=twins.device), dim=0)
    at = torch.zeros((), dtype=torch.long, device=twins.device)

    def step(x, y):
        with torch.no_grad():
            for mine, other in zip(key.parameters(), query.parameters()):
                mine.data = 0.9 * mine.data + 0.1 * other.data
            keys = normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
        queries = normalize(query(x), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.clone()], 1)
        loss = cross_entropy(logits / 0.07, y * 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.index_copy_(1, (at + torch.arange(len(x), device=at.device)) % 20, keys.T.contiguous())
        at.copy_((at + len(x)) % 20)
        return loss

    return step, lambda _: [*query.parameters(), *key.parameters(), queue, at]


def flat_parameters(twins, graphed):
    """All parameters are views of one tensor, and so are their gradients."""
    model = twins.model(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    parameters, start = [*model.parameters()], 0
    flat = nn.utils.parameters_to_vector(parameters).detach().clone()
    gradient, momentum = torch.zeros_like(flat), torch.zeros_like(flat)
    for each in parameters:
        stop = start + each.numel()
        each.data, each.grad = flat[start:stop].view_as(each), gradient[start:stop].view_as(each)
        start = stop

    def step(x, y):
        gradient.zero_()
        loss = cross_entropy(model(x), y)
        loss.backward()
        momentum.mul_(0.9).add_(gradient)
        flat.sub_(momentum, alpha=0.1)
        return loss, gradient.norm()

    return step, lambda _: [flat, gradient, *parameters]


def adversaries_in_turn(twins, graphed):
    """Two steps of two networks that share both, one of them in every second call, with a penalty of gradients."""
    maker, judge = twins.model(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), twins.model(nn.Linear(4, 8), nn.Tanh())
    of_maker, of_judge = sgd(maker.parameters()), sgd(judge.parameters())

    def make(x):
        of_maker.zero_grad()
        loss = softplus(-judge(maker(torch.randn_like(x)))).mean()
        loss.backward()
        of_maker.step()
        return loss

    make = graphed(make)

    def step(x, y):
        with torch.no_grad():
            made = maker(torch.randn_like(x))
        between = torch.lerp(x, made, torch.rand_like(x[:, :1])).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        loss = softplus(judge(made)).mean() + softplus(-judge(x)).mean() + mse_loss(slope.norm(dim=1), y * 0.0 + 1)
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        return loss

    def after(x):
        made = make(x) if after.calls % 2 else None
        after.calls += 1
        return [made, *maker.parameters(), *judge.parameters()]

    after.calls = 0
    return step, after


@pytest.mark.parametrize(
    "make",
    [
        second_order_meta_learning,
        hessian_vector_products,
        gradients_of_each_sample,
        a_queue_of_keys,
        flat_parameters,
        adversaries_in_turn,
    ],
)
def test_loops_of_papers(step_twins, make):
    def run(graphed):
        fn, after = make(step_twins, graphed)
        step, found = graphed(fn), []
        for _ in range(CALLS):
            x, y = step_twins.batch()
            seen = [step(x, y), *after(x)]
            found.append(torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), seen))
        return found, step

    step = step_twins.both(run)
    assert step.captures == 1 and step.replays >= 5, step.in_python
