"""A progress bar in one line."""

from __future__ import annotations

import shutil
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
        """Counts `ticks` more, and shows the stage if there are any."""
        self._done = min(self._total, self._done + ticks)
        if ticks:
            self.show(stage)

    def show(self, stage: str) -> None:
        """Shows the stage, and counts nothing."""
        seconds = int(time.monotonic() - self._start)
        filled = WIDTH * self._done // max(1, self._total)
        clock = f"{seconds // 60}:{seconds % 60:02}"
        if self._stream.isatty():
            line = f"[{'#' * filled:{WIDTH}}] {self._done}/{self._total} {clock} {stage}"
            width = self._columns()
            self._stream.write(f"\r{line[:width]:{width}}")
        elif stage.partition(": turn")[0] != self._shown:
            self._shown = stage.partition(": turn")[0]
            self._stream.write(f"{self._done}/{self._total} {clock} {stage}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Removes the bar, so that something else can be printed."""
        if self._stream.isatty():
            self._stream.write(f"\r{'':{self._columns()}}\r")
            self._stream.flush()

    @staticmethod
    def _columns() -> int:
        """The width of the line: one less than the terminal's, because a full line would wrap."""
        return min(118, shutil.get_terminal_size().columns - 1)
