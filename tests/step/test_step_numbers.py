"""Many steps end where uncaptured Thunder ends, bit for bit: 200 on a GPU, 30 of smaller models on the tape."""

from __future__ import annotations

import copy

import pytest
import thunder
import torch
from models import GPT, ResNet
from support import same, same_state
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from thunder_cg import cudagraph_transform, executors, explain, graphed_step


class Recomputed(nn.Module):
    """A GPT whose blocks are computed again in the backward."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens):
        x = self.gpt.tokens(tokens)
        for block in self.gpt.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.gpt.head(self.gpt.norm(x))


def gpt(device, **options):
    return GPT(**({"layers": 4, "width": 64, "heads": 4} if device == "cuda" else {"width": 16, "heads": 2}), **options)


def tokens(device):
    batch = torch.randint(0, 64, (4, 17), device=device)
    return batch[:, :-1], batch[:, 1:].flatten()


def images(device):
    return torch.randn(4, 3, 8, 8, device=device), torch.randint(0, 10, (4,), device=device)


CASES = {  # a model, its batch, its dtype, whether under autocast
    "gpt": (lambda device: gpt(device, dropout=0.1), tokens, torch.float32, False),
    "gpt, bfloat16": (lambda device: gpt(device, dropout=0.1), tokens, torch.bfloat16, False),
    "resnet": (lambda device: ResNet(), images, torch.float32, False),
    "recomputed, autocast": (lambda device: Recomputed(gpt(device)), tokens, torch.float32, True),
}


def loop(model, parameters, device, autocast):
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=device == "cuda")

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(x)
            loss = cross_entropy(logits.flatten(0, -2).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    return step, optimizer


def train(case, device, steps, compiled, model, wrap):
    _, batch, dtype, autocast = CASES[case]
    torch.manual_seed(1)
    step, optimizer = loop(compiled, [*model.parameters()], device, autocast)
    step = wrap(step)
    losses = []
    for _ in range(steps):
        x, y = batch(device)
        losses.append(step(x.to(dtype) if x.is_floating_point() else x, y).detach())
    return step, torch.stack(losses), optimizer.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_many_steps(deterministic, backend, device, case):
    torch.manual_seed(0)
    make, _, dtype, _ = CASES[case]
    model = make(device).to(device, dtype)
    twin = copy.deepcopy(model)
    steps = 200 if device == "cuda" else 30
    transform = cudagraph_transform(backend=backend)
    _, *expected = train(case, device, steps, thunder.jit(twin), twin, lambda step: step)
    graphed, *found = train(
        case,
        device,
        steps,
        thunder.jit(model, transforms=[transform]),
        model,
        lambda step: graphed_step(step, backend=backend),
    )
    same(found, expected)
    same_state(model, twin)
    assert graphed.captures == 1 and graphed.replays >= steps - 4, explain(graphed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("fused", [False, True])
def test_a_replay_is_one_launch(fused):
    """The batch is copied in by nodes of the graph, and the loss out of it."""
    model = gpt("cuda").cuda()
    options = {"executors": executors()} if fused else {}
    compiled = thunder.jit(model, transforms=[cudagraph_transform()], **options)
    step = graphed_step(loop(compiled, [*model.parameters()], "cuda", False))
    batch = tokens("cuda")
    batch = batch[0].contiguous(), batch[1]
    for _ in range(6):
        step(*batch)
    marker = torch.ones(8, device="cuda")
    alone = launches(marker.add_, 1)
    assert alone, "the profiler has to see a kernel that is launched by itself"
    both = launches(lambda: (marker.add_(1), step(*batch)))
    # The profiler may not see the launch of the graph, which is one of the driver's.
    assert step.replays >= 4 and [name for name in both if "GraphLaunch" not in name] == alone, (both, explain(step))
    assert len(both) <= len(alone) + 1


def launches(run, *args):
    """What the host launches or copies, as the profiler sees it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(*args)
        torch.cuda.synchronize()
    names = [event.name for event in found.events() if event.name.startswith("cu")]
    return [name for name in names if any(kind in name for kind in ("Launch", "Memcpy", "Memset"))]
