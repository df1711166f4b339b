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
from thunder_cg.analysis.segments import Event, first_segment


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
    def of(cls, trace: PlannedTrace, ios: Sequence[RegionIO], forward: MemoryEstimate | None) -> MemoryEstimate:
        """The estimate for a trace and its regions' ``ios``.

        Args:
            forward: of a backward, the estimate of its forward.
        """
        ops, plan, aliasing, saved = trace.ops, trace.plan, trace.aliasing, trace.saved
        sets = aliasing.sets
        regions = [step for step in plan.steps if isinstance(step, Region)]
        memory = PeakMemory.of(ops, {region.device for region in regions}, aliasing)
        kept = {sets[name]: size for name, size in forward.saved.items() if name in sets} if forward else {}
        in_place = aliasing.sets_of(forward.saved_in_place) if forward else set()
        in_place |= aliasing.sets_of(name for name in ops.args if ops.values[name].static)
        results = [{sets[each.name] for each in io.outputs if each.name in sets} for io in ios]
        stays = {sets[each.name] for io in ios for each in io.outputs if not each.copied_out} | in_place
        new = {name: size for allocated in memory.allocates for name, size in allocated.items()}
        saved_sets = {sets[name]: name for name in sorted(saved) if sets.get(name) in new}
        copied_in = max((_copied_in(ops, io, aliasing, stays) for io in ios), default=0)
        captured = [op for region in regions for op in region.ops]
        # By names that the backward knows, too.
        named = {sets[name]: name for name in forward.saved if name in sets} if forward else saved_sets
        order = [*memory.events(captured), *((name, 0) for name in memory.returned - aliasing.sets_of(saved))]
        events = [(named.get(name, name), nbytes) for name, nbytes in order]
        return cls(
            without_graphs=memory.peak((op for step in plan.steps for op in step.ops), kept),
            regions=tuple(memory.peak(region.ops, {}, outputs) for region, outputs in zip(regions, results)),
            arena=memory.peak(
                captured, {name: size for name, size in kept.items() if name in in_place}, aliasing.sets_of(saved)
            )
            + copied_in,
            saved={name: new[memory] for memory, name in saved_sets.items()},
            saved_in_place={name for name in saved if sets.get(name) in stays},
            apart=memory.peak(captured, {}, frozenset()) + copied_in,
            events=events,
            first_segment=first_segment([*forward.events, *events] if forward else events),
            first_apart=first_segment([*memory.events(captured, frozenset())]) if forward else 0,
        )


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
