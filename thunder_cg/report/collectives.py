"""The collectives of a trace: bytes, group, whether a graph holds it, and whether it can overlap with compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import count

from thunder_cg.analysis.coalescing import coalesced
from thunder_cg.analysis.ops import Op, Ops, process_groups
from thunder_cg.analysis.partition import Region
from thunder_cg.compat.distributed import ProcessGroup
from thunder_cg.runtime.program import Program


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """One collective."""

    name: str  # "all_reduce", "reduce_scatter", "all_gather", "all_to_all" or "broadcast"
    nbytes: int  # of its whole tensor on this rank: of the input or of the result, whichever is larger
    group: str  # name of the process group
    ranks: int  # size of the group
    captured: bool  # whether a graph holds it
    launch: int  # collectives with one number are coalesced: one launch makes them
    overlaps: bool  # whether kernels are launched between its start and the wait, so that both may run at a time
    issued_by: int | None = None  # index of the op that starts it
    waited_by: int | None = None  # index of the first op that waits for its launch; None if the collective itself does


def collectives(program: Program) -> Iterator[CollectiveReport]:
    """In the order in which the plan runs them."""
    ops = program.ops
    captured = {index for region in program.regions if region.failure is None for index in region.planned.ops}
    order = [ops.ops[index] for step in program.plan.steps for index in step.ops]
    launches = _launches(program)
    futures: dict[int, set[str]] = {}  # of each launch
    for op in order:
        mine = futures.setdefault(launches[op.index], set())
        mine.update(name for name in op.outputs if ops.values[name].kind == "future")
    for place, op in enumerate(order):
        for group in process_groups([op]):
            launch, later = launches[op.index], order[place + 1 :]
            wait = _wait(futures[launch], later)
            yield CollectiveReport(
                name=op.name.removeprefix("torch_").removeprefix("collectives_").removesuffix("_prim_impl"),
                nbytes=max(_bytes(ops, op.inputs), _bytes(ops, op.outputs)),
                group=name_of(group),
                ranks=group.size(),
                captured=op.index in captured,
                launch=launch,
                overlaps=_overlaps(futures[launch], later),
                issued_by=op.index,
                waited_by=wait.index if wait is not None else None,
            )


def _launches(program: Program) -> dict[int, int]:
    """A number for each op's launch. Regions coalesce, also where they run eagerly."""
    ops, numbers = program.ops, count()
    launches: dict[int, int] = {}
    for step in program.plan.steps:
        mine = [ops.ops[index] for index in step.ops]
        together = coalesced(mine, ops.values) if isinstance(step, Region) else [[i] for i in range(len(mine))]
        for launch in together:
            launches |= dict.fromkeys((mine[i].index for i in launch), next(numbers))
    return launches


def name_of(group: ProcessGroup) -> str:
    """As the user called it; else what torch calls it."""
    return group.group_name if group.group_desc in ("", "undefined") else group.group_desc


def _bytes(ops: Ops, names: Sequence[str]) -> int:
    return sum(ops.values[name].nbytes for name in dict.fromkeys(names))


def _wait(futures: Set[str], later: Sequence[Op]) -> Op | None:
    """The first op that takes one of the futures of a launch, which then waits for all of it."""
    return next((op for op in later if not futures.isdisjoint(op.inputs)), None)


def _overlaps(futures: Set[str], later: Sequence[Op]) -> bool:
    """Whether the launch returns futures, and an op that computes comes before the first one that takes one."""
    wait = _wait(futures, later)
    for op in later:
        if not futures or op is wait:
            return False
        rule = op.rule
        if not op.bookkeeping and (rule is None or (rule.launches_kernels and not rule.communicates)):
            return True
    return False
