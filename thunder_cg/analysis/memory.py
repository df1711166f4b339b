"""Estimates of memory from the trace alone: what an order of its ops needs, with and without graphs.

An estimate knows the tensors of the trace. It does not know what a fusion or a library allocates inside, nor what the
allocator loses by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from thunder_cg.analysis.aliasing import Aliasing
from thunder_cg.analysis.ops import Ops
from thunder_cg.analysis.partition import PeakMemory, PlannedTrace, Region
from thunder_cg.analysis.region_io import RegionIO
from thunder_cg.analysis.segments import Event, first_segment, is_large


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """What one trace allocates, in bytes, on the devices that have regions."""

    # Memory that is new in a call that runs all ops eagerly. That of a backward counts what its forward has saved.
    without_graphs: int
    regions: tuple[int, ...]  # the same for the ops of each region alone
    arena: int  # what the graphs need in the arena: the values of the regions, and the copies of their inputs
    saved: Mapping[str, int]  # new memory that stays for the backward, by name; a name for each piece of memory
    saved_in_place: Set[str]  # names that stay for the backward where they are: in the arena, in parameters and buffers
    apart: int  # of a backward: as ``arena``, if what its forward saved is in other memory, and stays there
    events: Sequence[Event] = field(repr=False)  # what happens in the arena, in order
    first_segment: int  # that the arena should have; of a backward in the arena of its forward
    first_apart: int  # of a backward: that its own arena should have

    @classmethod
    def of(
        cls,
        trace: PlannedTrace,
        ios: Sequence[RegionIO],
        forward: MemoryEstimate | None,
        attributes: Set[str] = frozenset(),
    ) -> MemoryEstimate:
        """The estimate for a trace and its regions' ``ios``.

        Args:
            forward: of a backward, the estimate of its forward.
            attributes: arguments that are expected to stay where they are, besides parameters and buffers.
        """
        is_backward, forward = forward is not None, forward or _NOTHING
        ops, aliasing, sets = trace.ops, trace.aliasing, trace.aliasing.sets
        regions = [step for step in trace.plan.steps if isinstance(step, Region)]
        memory = PeakMemory.of(ops, {region.device for region in regions}, aliasing)
        captured = [op for region in regions for op in region.ops]
        # Memory is named by alias sets here. What the forward saved has its name there, and may stay where it is.
        before = {sets[name]: name for name in forward.saved if name in sets}
        before_nbytes = {each: forward.saved[name] for each, name in before.items()}
        static = {name for name in ops.args if ops.values[name].static or name in attributes}
        in_place = aliasing.sets_of(static | forward.saved_in_place)
        stays = in_place | aliasing.sets_of(each.name for io in ios for each in io.outputs if not each.copied_out)
        copied_in = max((_copied_in(ops, io, aliasing, stays) for io in ios), default=0)
        made = {each: nbytes for allocated in memory.allocates for each, nbytes in allocated.items()}
        saved = {sets[name]: name for name in sorted(trace.saved) if sets.get(name) in made}
        all_saved = aliasing.sets_of(trace.saved)
        # In the order of the arena, with names that forward and backward share.
        names = before if is_backward else saved
        ends = [(each, 0) for each in memory.returned - all_saved]
        events = [(names.get(each, each), nbytes) for each, nbytes in [*memory.events(captured), *ends]]
        results = [aliasing.sets_of(each.name for each in io.outputs) for io in ios]
        # Of inference, what is lent has segments of its own: see Note [Lent results] in runtime/lent_results.py.
        may_be_lent = [] if is_backward or saved else [e.name for io in ios for e in io.outputs if e.copied_out]
        apart = aliasing.sets_of(name for name in may_be_lent if is_large(ops.values[name].nbytes))
        in_arena = {each: nbytes for each, nbytes in before_nbytes.items() if each in in_place}
        return cls(
            without_graphs=memory.peak((op for step in trace.plan.steps for op in step.ops), before_nbytes),
            regions=tuple(memory.peak(region.ops, {}, outputs) for region, outputs in zip(regions, results)),
            arena=memory.peak(captured, in_arena, all_saved) + copied_in,
            saved={name: made[each] for each, name in saved.items()},
            saved_in_place={name for name in trace.saved if sets.get(name) in stays},
            apart=memory.peak(captured, {}, frozenset()) + copied_in,
            events=events,
            first_segment=first_segment([*forward.events, *(event for event in events if event[0] not in apart)]),
            first_apart=first_segment([*memory.events(captured, frozenset())]) if is_backward else 0,
        )


_NOTHING = MemoryEstimate(0, (), 0, {}, frozenset(), 0, (), 0, 0)  # before a forward


def parameter_gradients(forward: Ops, backward: Ops) -> int:
    """Bytes of the gradients that a backward returns for parameters: callers keep these, and no others for long."""
    gradients = backward.ops[-1].symbol.args[0]
    return sum(
        backward.values[gradient.name].nbytes
        for name, gradient in zip(forward.args, gradients)
        if gradient is not None and forward.values[name].static
    )


def _copied_in(ops: Ops, io: RegionIO, aliasing: Aliasing, stays: Set[str]) -> int:
    """Bytes of a region's inputs that are copied to the arena: not of what stays where it is."""
    return sum(ops.values[each.name].nbytes for each in io.inputs if aliasing.sets[each.name] not in stays)
