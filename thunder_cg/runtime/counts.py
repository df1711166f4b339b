"""What is counted of a program and of its regions, for `explain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat


@dataclass(slots=True)
class Stats:
    """Counts of one region. Bytes are those of the last recording, per call."""

    captures: int = 0
    replays: int = 0
    eager_runs: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    verified: int = 0
    capture_seconds: float = 0.0  # of all captures, on the host


@dataclass(eq=False)
class Counts:
    """What a program counts; by default, that it was never called."""

    calls: int = 0
    eager_calls: int = 0
    warm_ups: int = 0
    warm_up_seconds: float = 0.0
    fast_path_calls: int = 0  # that went around Thunder's dispatch
    remark: str | None = None  # what the user should know besides
    fallbacks: Counter[str] = field(default_factory=Counter)  # eager calls by their reasons
    stats: Sequence[Stats] = ()  # of the regions

    def restore(self, earlier: Counts) -> None:
        """Counts on from there; what regions copy stays as it is."""
        for mine, stats in zip(self.stats, earlier.stats or repeat(Stats())):
            for name in ("captures", "replays", "eager_runs", "verified", "capture_seconds"):
                setattr(mine, name, getattr(stats, name))
        vars(self).update({**vars(earlier), "stats": self.stats})
