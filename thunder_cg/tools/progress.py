"""A progress bar in one line."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24


class Progress:
    """Shows how much of a known number of ticks is done, and what is under way.

    A terminal shows a bar in one line. A file gets a line for each new stage.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._done = 0
        self._start = time.monotonic()
        self._shown = ""

    def more(self, ticks: int) -> None:
        """Adds `ticks` to the total."""
        self._total += ticks

    def tick(self, stage: str, ticks: int = 1) -> None:
        """Counts `ticks` more, and shows the stage."""
        self._done = min(self._total, self._done + ticks)
        if not ticks:
            return
        seconds = int(time.monotonic() - self._start)
        filled = WIDTH * self._done // max(1, self._total)
        clock = f"{seconds // 60}:{seconds % 60:02}"
        if self._stream.isatty():
            line = f"[{'#' * filled:{WIDTH}}] {self._done}/{self._total} {clock} {stage}"[:118]
            self._stream.write(f"\r{line:118}")
        elif stage.partition(": turn")[0] != self._shown:
            self._shown = stage.partition(": turn")[0]
            self._stream.write(f"{self._done}/{self._total} {clock} {stage}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the bar, so that something else can be printed."""
        if self._stream.isatty():
            self._stream.write(f"\r{'':118}\r")
            self._stream.flush()
