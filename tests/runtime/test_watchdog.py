"""The watchdog, with events that never end."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
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
    def __init__(self) -> None:
        self.done, self.looks = True, 0

    def record(self, stream: Any) -> None:
        self.done, self.looks = False, 0

    def query(self) -> bool:
        self.looks += 1
        return self.done


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    monkeypatch.setattr(distributed, "timeout", lambda group: 0.2)
    return monkeypatch


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

    event = Event()
    dog = Watchdog(event, end)
    start = time.monotonic()
    dog.watch([Group()], None)
    assert ended.wait(10) and time.monotonic() - start >= 0.2
    assert "rank 1 of 2" in messages[0] and "within 0.2 s" in messages[0] and event.looks > 1


def test_the_last_of_many_replays_is_watched(watched: Any) -> None:
    """Those before it are done, and it is launched while the thread still thinks of them."""
    messages: list[str] = []
    event = Event()
    dog = Watchdog(event, messages.append)
    for _ in range(20):
        dog.watch([Group()], None)
        event.done = True
        time.sleep(0.003)
    dog.watch([Group()], None)
    wait_for(lambda: messages)


class Replays(threading.Event):
    """Knows whether it is waited for."""

    awaited = False

    def set(self) -> None:
        self.awaited = False
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        self.awaited = not self.is_set()
        return super().wait(timeout)


def test_what_ends_is_not(watched: Any) -> None:
    messages: list[str] = []
    event, clock, replays = Event(), SimpleNamespace(now=0.0), Replays()
    watched.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    watched.setattr(module, "threading", SimpleNamespace(Event=lambda: replays, Thread=threading.Thread))
    dog = Watchdog(event, messages.append)
    for _ in range(9):  # longer than the time-out, and the host launches all the time
        dog.watch([Group()], None)
        wait_for(lambda: event.looks > 2)  # of which one has seen the replay
        clock.now += 0.15
    event.done = True
    wait_for(lambda: replays.awaited and not replays.is_set())  # so it does not look any more
    assert not messages


def test_without_the_driver_nothing_is_watched(watched: Any) -> None:
    warned: list[str] = []
    watched.setattr(module.warnings, "warn", lambda message, stacklevel: warned.append(message))

    def begin() -> None:
        raise RuntimeError("no driver")

    event = Event()
    dog = Watchdog(event, lambda message: None, begin)
    wait_for(lambda: warned)
    assert "no driver" in warned[0]
    dog.watch([Group()], None)
    time.sleep(0.1)
    assert not event.looks


@pytest.mark.parametrize(
    ("variable", "handling"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        *((f"{each}_ASYNC_ERROR_HANDLING", "0") for each in ("TORCH_NCCL", "NCCL")),
    ],
)
def test_how_a_process_ends(monkeypatch: pytest.MonkeyPatch, capsys: Any, variable: str, handling: str) -> None:
    aborted = []
    monkeypatch.setattr(module.os, "abort", lambda: aborted.append(True))
    monkeypatch.setenv(variable, handling)
    module._end_process("it hangs")
    assert "it hangs" in capsys.readouterr().err and bool(aborted) is (handling == "3")
