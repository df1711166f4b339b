"""What a backward's fusions may write over: saved values that nothing needs any more, as the logits of a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Op
from thunder_cg.analysis.region_io import RegionIO


def alone(saved: Set[str], seen: Set[str], aliasing: Aliasing) -> frozenset[str]:
    """Of what a forward saves: names that share memory with nothing else that is saved, nor with what is ``seen``."""
    sets = aliasing.sets
    count = Counter(sets[name] for name in saved if name in sets)
    return frozenset(name for name in saved - seen if count[sets.get(name, "")] == 1)


def donated(ops: Sequence[Op], io: RegionIO, aliasing: Aliasing, saved: Set[str]) -> list[tuple[str, ...]]:
    """For each of a region's ``ops``, the inputs whose memory it may write over, since nothing reads it afterwards.

    Args:
        saved: names of what the forward left in the arena, each in memory of its own.
    """
    sets = aliasing.sets
    needed = aliasing.sets_of([*io.alive, *(each.name for each in io.outputs)])
    count = Counter(sets[each.name] for each in io.inputs)
    last = {each: i for i, op in enumerate(ops) for each in aliasing.reads[op.index]}
    found: list[tuple[str, ...]] = [()] * len(ops)
    for each in io.inputs:
        of = sets[each.name]
        if each.name not in saved or each.written or each.aliased or of in needed or count[of] > 1:
            continue
        op = ops[last[of]]
        names = [name for name in op.names if sets.get(name) == of]
        if op.is_fusion and op.executor == "inductor" and names == [each.name]:
            found[last[of]] += (each.name,)
    return found
