"""The watchdog, with events that never end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from thunder_cg.compat import distributed
from thunder_cg.runtime.cuda import watchdog as module
from thunder_cg.runtime.cuda.watchdog import Watchdog


class Group:
    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


class Event:
    def __init__(self, done: bool) -> None:
        self.done, self.looks = done, 0

    def query(self) -> bool:
        self.looks += 1
        return self.done


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    monkeypatch.setattr(distributed, "timeout", lambda group: 0.2)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_what_never_ends_is_reported(watched: Any) -> None:
    ended, messages = threading.Event(), []

    def end(message: str) -> None:
        messages.append(message)
        ended.set()

    event = Event(done=False)
    dog = Watchdog(lambda: event, end)
    start = time.monotonic()
    dog.watch([Group()])
    assert ended.wait(10) and time.monotonic() - start >= 0.2
    assert "rank 1 of 2" in messages[0] and "within 0.2 s" in messages[0] and event.looks > 2


def test_what_ends_is_not(watched: Any) -> None:
    events, messages = [], []

    def record() -> Event:
        events.append(Event(done=False))
        return events[-1]

    dog = Watchdog(record, messages.append)
    for _ in range(3):
        dog.watch([Group()])
    assert len(events) == 1  # one at a time
    events[0].done = True

    def another_is_watched() -> bool:
        dog.watch([Group()])
        return len(events) == 2

    wait_for(another_is_watched)
    events[1].done = True
    wait_for(lambda: events[1].looks)
    assert not messages


def test_without_the_driver_nothing_is_watched(watched: Any) -> None:
    def begin() -> None:
        raise RuntimeError("no driver")

    dog = Watchdog(lambda: Event(done=False), lambda message: None, begin)
    wait_for(lambda: not dog._is_idle)
    dog.watch([Group()])
    assert dog._events.empty()


@pytest.mark.parametrize("handling", ["3", "0"])
def test_how_a_process_ends(monkeypatch: pytest.MonkeyPatch, capsys: Any, handling: str) -> None:
    aborted = []
    monkeypatch.setattr(module.os, "abort", lambda: aborted.append(True))
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", handling)
    module._end_process("it hangs")
    assert "it hangs" in capsys.readouterr().err and bool(aborted) is (handling == "3")
