"""Timers: the times between marks, run by run. The events of CUDA are stood in for."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from thunder_cg.runtime.backend import HostTimer
from thunder_cg.runtime.cuda.backend import EventTimer

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def made(monkeypatch) -> list:
    """The events that were made. Each record is a millisecond after the one before."""
    clock, events = itertools.count(), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.waited = False
            events.append(self)

        def record(self, stream: torch.device) -> None:
            assert stream is DEVICE
            self.at = next(clock)

        def synchronize(self) -> None:
            self.waited = True

        def elapsed_time(self, later: Event) -> float:
            return float(later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    return events


def test_each_run_is_waited_for_once_and_events_are_used_again(made):
    timer = EventTimer(DEVICE)
    assert timer.runs() == []
    for _ in range(2):
        for marks in (2, 0, 1):
            timer.start()
            for _ in range(marks):
                timer.mark()
        assert not any(event.waited for event in made)
        assert timer.runs() == [[1000.0, 1000.0], [], [1000.0]]
        assert sum(event.waited for event in made) == 3 and len(made) == 6
        for event in made:
            event.waited = False
    assert timer.runs() == []


def test_the_hosts_clock():
    timer = HostTimer()
    timer.start()
    time.sleep(0.002)
    timer.mark()
    timer.mark()
    ((first, second),) = timer.runs()
    assert first >= 2000 > second >= 0
    assert timer.runs() == []
