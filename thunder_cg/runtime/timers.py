"""The host's clock, for runs of regions. A backend has a timer of its own for what its device does."""

from __future__ import annotations

import time
from itertools import pairwise


class HostTimer:
    """The host's clock: on a CPU, an operator has run when its call returns."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def start(self) -> None:
        self._runs.append([time.perf_counter_ns()])

    def mark(self) -> None:
        self._runs[-1].append(time.perf_counter_ns())

    def runs(self) -> list[list[float]]:
        runs, self._runs = self._runs, []
        return [[(later - earlier) / 1000 for earlier, later in pairwise(run)] for run in runs]
