"""A whole step as one call of each group that it communicates in.

Note [Steps that communicate]
    A step, whose whole graph holds its collectives, is one call in each of its groups, whatever is in it. What runs in
    it in Python is numbered within it. So ranks number alike, whether they replay the step or run it. Which groups it
    communicates in shows when it runs in Python: each group counts what PyTorch issues, and what programs do in it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager

from thunder_cg.compat import distributed
from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.errors import RanksDiffer
from thunder_cg.runtime.ranks.agreement import Round
from thunder_cg.runtime.ranks.groups import common_counters, counters, state_of
from thunder_cg.runtime.skip_reasons import GROUP_IS_GONE

_runs_a_step = threading.RLock()


class StepCall:
    """What a call of a step communicates in.

    Args:
        device_type: of the graphs.
        issued: in each group by now: collectives, by kind of device.

    Attributes:
        groups: oldest first.
        objection: to a graph of the step that holds that. It may pass if another thread may have communicated.
    """

    def __init__(self, device_type: str = "", issued: Sequence[tuple[ProcessGroup, Mapping[str, int]]] = ()) -> None:
        self._device_type, self._issued = device_type, issued
        self.groups: list[ProcessGroup] = []
        self.objection: RanksDiffer | None = None

    def look(self) -> None:
        """Finds what it has communicated in by now."""
        self.groups = []
        for group, issued in self._issued:
            now = distributed.progress(group) if distributed.is_alive(group) else {}
            kinds = {kind for kind, count in now.items() if count != issued.get(kind, 0)}
            state_of(group).end_call()
            if state_of(group).calls or kinds:
                self.groups.append(group)
                self.objection = self.objection or _objection(group, kinds, self._device_type)


@contextmanager
def call_of_step(device_type: str, votes: Round | None = None, *, is_capture: bool = False) -> Iterator[StepCall]:
    """Around a step that runs in Python, or that is captured: all that communicates in it is one call of each group.

    Args:
        device_type: of the graphs.
        votes: what this rank has said of the call.
        is_capture: then nothing has been communicated, so nothing counts.
    """
    groups = distributed.groups()
    if not groups:
        yield StepCall()
        return
    if not _runs_a_step.acquire(blocking=False):
        yield (call := StepCall())
        problem = "another thread runs a step, so it is not known what this one communicates"
        call.objection = RanksDiffer(problem, may_pass=True)
        return
    call = StepCall(device_type, [(group, distributed.progress(group)) for group in groups])
    try:
        with ExitStack() as inside:
            for each in (*map(state_of, groups), *common_counters()):
                inside.enter_context(each.within_next_call(is_capture=is_capture))
            try:
                yield call
            finally:
                call.look()
    finally:
        for each in counters(call.groups, call.groups) if not is_capture else ():
            each.count(None)
        if votes is not None:
            votes.withdraw(call.groups)
        _runs_a_step.release()


def _objection(group: ProcessGroup, kinds: Set[str], device_type: str) -> RanksDiffer | None:
    """That to what has been communicated in a group, on these kinds of devices."""
    if state_of(group).is_closed:
        return RanksDiffer(*GROUP_IS_GONE, may_pass=False)
    if state_of(group).keep_eager:
        problem = 'a module that communicates in the same group was compiled with capture_collectives="never"'
        return RanksDiffer(problem, "compile it without that option", may_pass=False)
    if "cpu" in kinds and device_type != "cpu":  # as gloo does, on behalf of a GPU, too
        problem = f"it communicates on the CPU, and its graph is on {device_type}"
        return RanksDiffer(problem, "do that outside of the step", may_pass=True)
    found = distributed.capture_problem(group, device_type)
    return None if found is None else RanksDiffer(*found, may_pass=False)
