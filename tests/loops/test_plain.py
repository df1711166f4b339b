"""A loop as people write it: an evaluation after each epoch, a schedule, clipping, a smaller last batch."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from support import replays, same, same_state
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from thunder_cg import cudagraph_transform, graphed_step


def loop(model, data, device, graphed=lambda step: step, epochs=4):
    """Trains, and returns the losses of all steps and all evaluations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=device == "cuda")
    schedule = StepLR(optimizer, 1, gamma=0.5)

    def step(x, labels):
        optimizer.zero_grad()
        loss = model(x, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    step = graphed(step)
    losses = []
    torch.manual_seed(2)
    for _ in range(epochs):
        model.train()
        losses += [step(x.to(device), labels.to(device)) for x, labels in DataLoader(data, 4, shuffle=True)]
        schedule.step()
        model.eval()
        with torch.no_grad():
            losses += [model(x.to(device), labels.to(device)) for x, labels in DataLoader(data, 7)]
    return losses, step


@pytest.mark.filterwarnings("ignore:graphed_step:UserWarning")
def test_a_plain_loop(net, data, backend, device):
    plain, captured, whole = (copy.deepcopy(net) for _ in range(3))
    transform = cudagraph_transform(backend=backend)
    plain = thunder.jit(plain)
    expected, _ = loop(plain, data, device)

    captured = thunder.jit(captured, transforms=[transform])
    found, _ = loop(captured, data, device)
    same(found, expected)
    same_state(captured, plain)
    assert replays(captured) > 40

    whole = thunder.jit(whole, transforms=[transform])
    found, step = loop(whole, data, device, lambda step: graphed_step(step, backend=backend))
    same(found, expected)
    same_state(whole, plain)

    assert step.calls == 24 and step.replays >= 12, step.in_python


@pytest.mark.nightly
def test_a_metric_of_torchmetrics(net, data, backend, device):
    """Its `update` counts its calls, and replaces tensors."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def train(model, graphed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro", validate_args=False).to(device)

        def step(x, labels):
            optimizer.zero_grad()
            scores = model(x)
            loss = torch.nn.functional.cross_entropy(scores, labels)
            loss.backward()
            optimizer.step()
            accuracy.update(scores.detach(), labels)
            return loss.detach()

        step, found = graphed(step), []
        torch.manual_seed(2)
        for _ in range(3):
            found += [step(x.to(device), labels.to(device)) for x, labels in DataLoader(data, 3)]
            found.append(accuracy.compute())
            accuracy.reset()
        return found, step

    expected, _ = train(copy.deepcopy(net), lambda step: step)
    found, step = train(net, lambda step: graphed_step(step, backend=backend))
    same(found, expected)
    assert step.replays >= 12, step.in_python
