"""Which collectives one launch makes, and how ranks compare what they launch.

Note [Coalesced collectives]
    Small collectives of one kind, group and dtype are issued together. A gather moves bits as they are. A reduction
    sums over ranks, and NCCL chooses the order of a sum by the size of a launch. Two numbers have one sum in either
    order, so reductions are coalesced in groups of two ranks only. All ranks coalesce alike, also in calls that run
    eagerly: what is launched together follows from the trace, too. It must not depend on the sizes of activations:
    `partition` weighs its orders by memory only where both launch the same together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import sha256

from thunder_cg.analysis.ops import Op, Ops, Value, process_groups
from thunder_cg.compat.distributed import ProcessGroup, ranks
from thunder_cg.compat.thunder import DistributedReduceOps

# Bytes of collectives that are coalesced. Each launch has a latency of some 20 us, in which a link of 400 GB/s moves as
# much. Larger launches would begin later, so less of them would run beside compute.
_COALESCED = 8 << 20
_GATHERS = frozenset({"torch_all_gather_prim_impl"})
ALL_REDUCE = "torch_all_reduce_prim_impl"
_REDUCTIONS = frozenset({ALL_REDUCE, "torch_reduce_scatter_prim_impl"})
_EXCHANGE = "collectives_all_to_all"


def fit_together(sizes: Iterable[int]) -> bool:
    """Whether collectives of these bytes are few enough for one launch."""
    return sum(sizes) <= _COALESCED


def coalesced(ops: Sequence[Op], values: Mapping[str, Value]) -> list[list[int]]:
    """The positions of all ops, those of collectives that one launch makes in one list."""
    launches: list[list[int]] = []
    last: Hashable = None
    total = 0
    for position, op in enumerate(ops):
        kind, mine = coalesced_kind(op, values), nbytes(op, values)
        if kind is not None and kind == last and fit_together((total, mine)):
            launches[-1].append(position)
            total += mine
        else:
            launches.append([position])
            last, total = kind, mine
    return launches


def described(ops: Sequence[Op], values: Mapping[str, Value], group: ProcessGroup) -> str:
    """A hash of what the ranks of a group have to launch alike: its collectives, what they take, which are together.

    So it is with those of groups that all these ranks are in. All else may differ, such as the size of a batch, and so
    may the sizes of what an exchange takes and gives.
    """
    members = {*ranks(group)}

    def is_of_all(op: Op) -> bool:
        return any(members.issubset(ranks(each)) for each in process_groups([op]))

    def taken(op: Op) -> list[tuple[str, int]]:
        tensors = [values[name] for name in op.inputs if values[name].kind == "tensor"]
        return [(str(value.dtype), 0 if op.id == _EXCHANGE else value.nbytes) for value in tensors]

    launches = [[ops[i] for i in launch if is_of_all(ops[i])] for launch in coalesced(ops, values)]
    said = [[(op.name, taken(op)) for op in launch] for launch in launches if launch]
    return sha256(repr(said).encode()).hexdigest()


def of_parallelism(ops: Ops) -> list[Op]:
    """The collectives of Thunder's own parallelism, which another op waits for; all others are the user's."""
    return [
        op
        for op in ops.ops
        if op.id in _GATHERS | _REDUCTIONS and any(ops.values[name].kind == "future" for name in op.outputs)
    ]


def coalesced_kind(op: Op, values: Mapping[str, Value]) -> Hashable:
    """What collectives that are coalesced have in common; None for an op that is launched by itself."""
    if op.id not in _GATHERS | _REDUCTIONS or any(values[name].kind != "future" for name in op.outputs):
        return None
    groups = process_groups([op])
    if len(groups) != 1 or (op.id in _REDUCTIONS and groups[0].size() != 2):
        return None
    operators = tuple(leaf for leaf in op.symbol.flat_args if isinstance(leaf, DistributedReduceOps))
    return op.id, groups[0], values[op.outputs[0]].dtype, operators


def nbytes(op: Op, values: Mapping[str, Value]) -> int:
    """What a collective holds while it is in flight."""
    return max((values[name].nbytes for name in op.names), default=0)
