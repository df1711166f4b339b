"""Turns of processes that work at once, and measure one at a time, with the machine to itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Those of all processes that are given the same folder.

    Ranks of a group wait for each other on the GPU. So they cannot be stopped wherever they are, as `Workers` does it:
    a kernel that waits would take its part of the GPU all the time. They wait before their next piece of work.
    """

    def __init__(self, folder: Path) -> None:
        self._gate, self._room = folder / "gate", folder / "room"

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Nobody measures inside. It begins after those who wait to measure have measured."""
        with self._room.open("w") as room:
            with _locked(self._gate):
                fcntl.flock(room, fcntl.LOCK_SH)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else is at work or measures inside. It begins when those at work have done their pieces."""
        with _locked(self._gate), _locked(self._room):
            yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
