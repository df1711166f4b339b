"""Whatever fails, wherever: the call's result is right, and nothing is left behind.

Every test compares with uncaptured Thunder, bit for bit: results, gradients, buffers, and what the generators draw next.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import faults
import pytest
import thunder
import torch
from faults import (
    Broken,
    FaultyRegion,
    Switch,
    exception,
    failed_launch,
    forget,
    host_sync,
    out_of_memory,
    programs,
    transfer,
)
from support import regions, replays, same, same_state, shortcuts, twice
from torch import nn

from thunder_cg import CaptureError, explain
from thunder_cg.errors import ReplayRefused
from thunder_cg.runtime import copies, cuda, recording, tape
from thunder_cg.runtime.recording import Outputs, RegionGraph


class Net(nn.Module):
    """Views, a write to a buffer, random draws, matrix products, several outputs that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x):
        h = torch.tanh(torch.matmul(x, self.weight))
        self.total.add_(h.detach().sum(0))
        y = torch.exp(h.view(-1, 2, 2).transpose(1, 2))
        z = nn.functional.dropout(h, 0.5) * 2
        return y, y.view(-1), z.t(), h.sum()


class Other(nn.Module):
    """What has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(nn.functional.dropout(self.first(x), 0.5)) * 2


class Twins:
    """A model without and with graphs, in step, and another pair that has to work after each fault."""

    def __init__(self, make: Callable[..., Any], device: str, model: nn.Module, *, trains: bool = True, **options: Any):
        self.device = device
        self.trains = trains
        self.plain, self.graphed = make(model, **options)
        self.others = make(Other())
        self.steps = 0
        self.call(self.others)
        self.call()  # compiles
        self.faulty = [FaultyRegion(region) for program in programs(self.graphed) for region in program.regions]
        self.start()

    def start(self) -> None:
        """As if nothing had been called yet."""
        forget(self.graphed)
        self.sync()

    def sync(self) -> None:
        self.graphed.load_state_dict(self.plain.state_dict())

    def step(self, model: Any) -> list[torch.Tensor]:
        torch.manual_seed(self.steps)
        x = torch.randn(6, 4, device=self.device).requires_grad_(self.trains)
        model.zero_grad()
        with torch.set_grad_enabled(self.trains):
            results = model(x)
            results = results if isinstance(results, tuple) else (results,)
            if self.trains:
                sum((i + 1) * result.sum() for i, result in enumerate(results)).backward()
        follows = torch.rand(4, device=self.device)
        grad = [x.grad] if self.trains else []
        return [*(result.detach() for result in results), *grad, follows]

    def call(self, pair: tuple[Any, Any] | None = None) -> None:
        """One call of both: equal results, gradients, buffers and random draws."""
        plain, graphed = pair or (self.plain, self.graphed)
        self.steps += 1
        same(self.step(plain), self.step(graphed))
        same_state(plain, graphed)

    def fails(self, kind: type[Exception]) -> Exception:
        """One call that raises."""
        self.steps += 1
        with pytest.raises(kind) as caught:
            self.step(self.graphed)
        caught.value.__traceback__ = None  # which holds the frames of the call
        return caught.value

    def after(self) -> None:
        """The program goes on, and nothing is lost."""
        for _ in range(2):
            self.call()
        other = self.others[1]
        forget(other)
        before = replays(other)
        for _ in range(3):
            self.call(self.others)
        assert replays(other) >= before + 4
        gc.collect()
        assert not any(arena.is_held() for arena in faults.arenas(self.graphed))

    def bytes(self) -> int:
        """Memory in use when all recordings are gone."""
        forget(self.graphed)
        forget(self.others[1])
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        return sum(arena.nbytes() for arena in faults.arenas(self.graphed))


@pytest.fixture
def pair(twins, device):
    def make(model, **options):
        pair = Twins(twins, device, model, **options)
        gc.collect()
        gc.freeze()  # all that is there by now, so that the many collections take little time
        return pair

    yield make
    gc.unfreeze()


def failure(twins: Twins, number: int) -> str:
    return str(regions(twins.graphed)[number]["failure"])


KINDS = {
    "exception": (exception, "Broken: a fault"),
    "memory": (out_of_memory, "OutOfMemoryError: out of memory on"),
    "sync": (host_sync, "(makes the host wait|not permitted|capturing)"),
    "transfer": (transfer, "(makes the host wait|not permitted|capturing)"),
    "launch": (failed_launch, "invalid|INVALID"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trace", [0, 1], ids=["forward", "backward"])
def test_an_op_fails_in_a_capture(pair, kind, trace):
    fault, reason = KINDS[kind]
    twins = pair(Net())
    faulty, base = twins.faulty[trace], None
    ops = faulty.region.region.ops
    assert len(ops) >= 8
    for position, index in enumerate(ops):
        twins.start()
        twins.call()
        faulty.arm(position, fault, times=99 if kind in ("sync", "transfer") else 1)
        twins.call()
        assert faulty.switch.hits >= 1
        report = programs(twins.graphed)[trace].ops
        name, line = report.ops[index].name, report.line(report.ops[index])
        assert line is not None and "test_faults.py:" in line
        assert f"{name} at {line}: " in failure(twins, trace) and re.search(reason, failure(twins, trace))
        assert failure(twins, trace) in str(explain(twins.graphed))
        before = replays(twins.graphed)
        twins.after()
        faulty.switch.disarm()
        if kind == "memory":  # which may be there next time
            assert replays(twins.graphed) == before + 4 and failure(twins, trace) == "None"
        else:
            assert replays(twins.graphed) == before + 2 and "None" not in failure(twins, trace)
        base = twins.bytes() if base is None else base
        assert twins.bytes() == base
