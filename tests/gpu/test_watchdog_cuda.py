"""The watchdog on a GPU: it sees work that does not end, and breaks nobody's capture."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from thunder_cg.compat import cuda, distributed
from thunder_cg.runtime.cuda import watchdog as module
from thunder_cg.runtime.cuda.watchdog import Watchdog

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


class Group:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> tuple[Watchdog, list[str]]:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    monkeypatch.setattr(distributed, "timeout", lambda group: 0.5)
    messages: list[str] = []
    return Watchdog(torch.cuda.Event(), messages.append, partial(cuda.leave_captures_alone, 0)), messages


def sleep_on_gpu(seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        torch.cuda._sleep(200_000_000)  # about 0.1 s


def test_what_takes_too_long_is_reported(dog: Any) -> None:
    watchdog, messages = dog
    sleep_on_gpu(2.0)
    watchdog.watch([Group()], torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert messages and "rank 0 of 2" in messages[0]


def test_what_ends_is_not_and_captures_go_on(dog: Any) -> None:
    """Captures in the global mode, which forbids all threads to ask for events."""
    watchdog, messages = dog
    x = torch.ones(1000, device="cuda")
    for _ in range(20):
        watchdog.watch([Group()], torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            y = x + 1
            time.sleep(0.03)
        graph.replay()
        assert bool((y == 2).all())
    assert not messages
