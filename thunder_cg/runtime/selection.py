"""``select="measured"``: regions whose graphs do not pay are left eager.

Note [Regions that pay]
    The first calls of a pair of programs run eagerly, and each region's ops are timed. Then calls warm up, capture and
    replay as they always do, and each region's replays are timed. So each call still runs everything once. Nothing is
    in an arena while the ops are timed, so that needs no more memory than an eager call does.

    The time of a run is the longer one of the device's and the host's, and the medians of all runs are compared. In
    doubt, a region stays captured. If some do not pay, all recordings of the pair are released, because graphs of other
    regions read what those handed them at fixed addresses. Calls warm up and capture anew without them, and replays are
    timed anew, as the others now copy more, until all regions that are left pay.

    Replays of a module that is one region go around Thunder's dispatch once all is timed, and eager calls never do. The
    host's time in a timed replay says nothing of that. So it does not count against such a region.

    Ranks time differently, and have to capture alike. So in a pair that communicates, nothing is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from thunder_cg.runtime.backend import Backend, HostTimer
from thunder_cg.runtime.call import Call, Mode

if TYPE_CHECKING:
    from thunder_cg.runtime.region import RuntimeRegion

_CALLS = 10  # that are timed eagerly, and as many replays
_FEW = 3  # runs of a region, below which nothing is known of it
_MOST_REPLAYS = 3 * _CALLS  # after which a backward, or a region that never replays, is not waited for
_MARGIN = 1.1  # by which a graph has to be slower than its ops


class Selection:
    """The times of the regions of one pair of programs, until it is known which of them pay."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._regions: list[RuntimeRegion] = []
        self._eager: dict[RuntimeRegion, _Times] = {}
        self._graph: dict[RuntimeRegion, _Times] = {}
        self._eager_calls = self._replays = 0  # of the forward
        self._is_one_region = True  # the forward, and the backward if there is one
        self._lock = threading.Lock()  # a thread that finds it taken times nothing

    def join(self, regions: Sequence[RuntimeRegion], *, is_one_region: bool) -> None:
        """Adds the regions of a program of the pair."""
        self._regions += regions
        self._is_one_region &= is_one_region

    def begin_eager(self, call: Call) -> bool:
        """Whether the call is to run eagerly and to be timed."""
        if self._eager_calls == _CALLS:
            return False
        self._eager_calls += 1
        call.selection = self
        return True

    def begin_replay(self, call: Call) -> None:
        """Has the call be timed, unless it is verified."""
        if not call.verifies:
            self._replays += 1
            call.selection = self

    def run(self, region: RuntimeRegion, call: Call, args: Sequence[Any]) -> Sequence[Any]:
        """Runs a region, and times that if the region as a whole replays, or runs eagerly."""
        mode = call.mode
        may_pay = mode in (Mode.REPLAY, Mode.EAGER) and not region.stays_eager
        is_timed = may_pay and not (call.verifies or self._backend.busy())
        if not is_timed or not self._lock.acquire(blocking=False):
            return region.run_untimed(call, args)
        try:
            known = self._graph if mode is Mode.REPLAY else self._eager
            if region not in known:
                known[region] = _Times(self._backend, region)
            times = known[region]
            times.start()
            results = region.run_untimed(call, args)
            if call.mode is mode:  # otherwise it began as a replay, and fell back
                times.stop()
            return results
        finally:
            self._lock.release()

    def is_complete(self) -> bool:
        """Whether enough replays were timed to decide."""
        if self._lock.locked():  # a region is being timed: by another thread, or it has called this function
            return False
        waiting = (r for r in self._regions if not r.stays_eager and (r in self._graph or r in self._eager))
        counts = [self._graph[r].count if r in self._graph else 0 for r in waiting]
        return self._replays >= (_CALLS if all(count >= _CALLS for count in counts) else _MOST_REPLAYS)

    def leave_eager(self, *, has_dispatch: bool) -> list[RuntimeRegion]:
        """Leaves the regions eager that do not pay, and returns them. The others are timed anew if there are any.

        Args:
            has_dispatch: whether the forward is of a module, which may have fast paths.
        """
        goes_around = has_dispatch and self._is_one_region
        losing = []
        with self._lock:
            for region, replayed in self._graph.items():
                if region not in self._eager or region.stays_eager:
                    continue
                eager, graph = self._eager[region].medians(), replayed.medians()
                if eager is None or graph is None:
                    continue
                as_graph = graph[0] - graph[1] if goes_around else max(graph)
                if as_graph >= _MARGIN * max(eager):
                    region.leave_eager(max(as_graph, 0.0), max(eager), is_whole=self._is_one_region)
                    losing.append(region)
            self._replays = 0
            self._graph.clear()
        return losing


class _Times:
    """What the runs of a region took, on the device and on the host, in microseconds."""

    def __init__(self, backend: Backend, region: RuntimeRegion) -> None:
        self._timers = (backend.timer(region.device), HostTimer())
        self._runs: tuple[list[float], list[float]] = ([], [])
        self.count = 0

    def start(self) -> None:
        for timer in self._timers:
            timer.start()

    def stop(self) -> None:
        self.count += 1
        for timer in reversed(self._timers):
            timer.mark()

    def medians(self) -> tuple[float, float] | None:
        """Of the device's times and of the host's; None of too few. Waits for the last run."""
        for known, timer in zip(self._runs, self._timers):
            known += [took for run in timer.runs() for took in run]
        return (median(self._runs[0]), median(self._runs[1])) if len(self._runs[0]) >= _FEW else None
