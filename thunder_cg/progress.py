"""What goes on, in one line of a terminal: the bar of a tool, and what a call that takes long is busy with."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

WIDTH = 24  # of a bar
AFTER = 2.0  # seconds; what is over sooner is not shown
EVERY = 0.25  # seconds


class Stage:
    """Says on a terminal what is under way while the body of a ``with`` runs, if that takes longer than `AFTER`.

    Stages may be nested, and each thread may have some: the newest one is shown, as soon as the oldest is old enough.
    It never raises, and does nothing where nobody looks: see `terminal`.

    Args:
        what: returns the text. Another thread calls it.
        began: when that began, in seconds of ``time.perf_counter``; now if None.
    """

    def __init__(self, what: Callable[[], str], began: float | None = None) -> None:
        self._what, self._began = what, began
        self.stream: TextIO | None = None  # that shows it
        self.began = 0.0

    def __enter__(self) -> None:
        self.stream = terminal()
        if self.stream is not None:
            self.began = time.perf_counter() if self._began is None else self._began
            _line.begin(self)

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            _line.end(self)

    def __str__(self) -> str:
        return f"{self._what()}, {int(time.perf_counter() - self.began)} s"


def is_shown(began: float) -> bool:
    """Whether a stage that begins here, as a part of what began at that time, is shown at once."""
    return terminal() is not None and _line.is_due(began)


def terminal() -> TextIO | None:
    """Standard error, if it is a terminal, and somebody wants to see what goes on. That of a notebook is none.

    Of several processes, the first rank writes to the terminal, or the one that has started the others.
    """
    with suppress(AttributeError, ValueError):  # there is no standard error, or it is closed
        if not sys.stderr.isatty() or multiprocessing.parent_process() is not None:
            return None
        variables = os.environ.get
        is_first = variables("RANK", "0") == variables("LOCAL_RANK", "0") == "0"
        return sys.stderr if is_first and not variables("TQDM_DISABLE") and variables("TERM") != "dumb" else None
    return None


class _StatusLine:
    """The line. Its thread runs only while there are stages."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.bar: Progress | None = None  # on standard error; a stage is shown behind it
        self._stages: list[Stage] = []  # of all threads, in the order in which they began
        self._shown: TextIO | None = None  # where a stage is shown
        self._thread: threading.Thread | None = None

    def begin(self, stage: Stage) -> None:
        with self.lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._watch, name="thunder_cg progress", daemon=True)
                with suppress(RuntimeError):  # the process ends, or may have no more threads
                    self._thread.start()  # it waits for the lock
            self._stages.append(stage)
            self._draw()

    def end(self, stage: Stage) -> None:
        with self.lock:
            self._stages.remove(stage)
            if not self._stages and self._shown is not None:
                with suppress(Exception):  # see `_draw`
                    _write(self._shown, "" if self.bar is None else self.bar.line())
                self._shown = None

    def is_due(self, began: float) -> bool:
        with self.lock:
            return time.perf_counter() - min([began, *(each.began for each in self._stages)]) >= AFTER

    def _watch(self) -> None:
        while True:
            with self.lock:
                if not self._stages:
                    self._thread = None
                    return
                self._draw()
            time.sleep(EVERY)

    def _draw(self) -> None:
        stage = self._stages[-1]
        if not self.is_due(stage.began) or stage.stream is None:
            return
        with suppress(Exception):  # the stream is closed, or cannot encode the text; the call goes on
            self._shown = stage.stream
            _write(stage.stream, str(stage) if self.bar is None else self.bar.line(str(stage)))


_line = _StatusLine()


def clear_bar() -> None:
    """Removes the bar that a terminal shows, if one does, so that something else can be printed."""
    if _line.bar is not None:
        _line.bar.clear()


class Progress:
    """Shows how much of a known number of ticks is done, and what is under way.

    A terminal shows a bar in one line. A file gets a line for each new stage.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._start = time.monotonic()
        self._stage = ""

    def more(self, ticks: int) -> None:
        """Adds `ticks` to the total."""
        self._total += ticks

    def tick(self, stage: str, ticks: int = 1) -> None:
        """Counts `ticks` more, and shows the stage if there are any."""
        self._done = min(self._total, self._done + ticks)
        if ticks:
            self.show(stage)

    def show(self, stage: str) -> None:
        """Shows the stage, and counts nothing."""
        before, self._stage = self._stage, stage
        if self._stream.isatty():
            with _line.lock:
                _line.bar = self if self._stream is sys.stderr else _line.bar
                _write(self._stream, self.line())
        elif stage.partition(": turn")[0] != before.partition(": turn")[0]:
            self._stream.write(f"{self._done}/{self._total} {self._clock()} {stage}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Removes the bar, so that something else can be printed."""
        if self._stream.isatty():
            with _line.lock:
                _line.bar = None if _line.bar is self else _line.bar
                _write(self._stream, "")

    def line(self, stage: str | None = None) -> str:
        """The bar, and behind it what is under way."""
        bar = "#" * (WIDTH * self._done // max(1, self._total))
        stage = self._stage if stage is None else stage
        return f"[{bar:{WIDTH}}] {self._done}/{self._total} {self._clock()} {stage}"

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._start)
        return f"{seconds // 60}:{seconds % 60:02}"


def _write(stream: TextIO, line: str) -> None:
    """Puts the text in the place of the line.

    It has one column less than the terminal, because a full line would wrap. The cursor is in its first column then, so
    that what others print begins there.
    """
    width = min(118, shutil.get_terminal_size().columns - 1)
    stream.write(f"\r{line[:width]:{width}}\r")
    stream.flush()
