"""The capture of one region, in one call: its ops become a graph, which has run nothing yet."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from thunder_cg.compat.tensors import storage_id, version
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.backend import sentinels
from thunder_cg.runtime.call import Call
from thunder_cg.runtime.failures import listed
from thunder_cg.runtime.guards import Guard, OverlapGuard
from thunder_cg.runtime.inputs import place, with_buffers
from thunder_cg.runtime.lent import Lent
from thunder_cg.runtime.lent_results import Lending
from thunder_cg.runtime.outputs import Outputs
from thunder_cg.runtime.recording import RegionGraph
from thunder_cg.runtime.tensors import is_plain, is_sparse, overlaps_itself

if TYPE_CHECKING:
    from thunder_cg.runtime.region import RuntimeRegion


class RegionCapture:
    """Captures one region in one call.

    Attributes:
        inputs: the tensors among the region's arguments. What its kernels get as numbers comes after them.
        in_pool: the positions of those in the arena's memory, which are what a call of the recording makes there.
        static: the positions of all that a replay finds at the same address, so that nothing is copied.
    """

    def __init__(self, region: RuntimeRegion, call: Call, args: Sequence[Any]) -> None:
        assert call.recording is not None
        self._region, self._call, self._recording = region, call, call.recording
        self._pool = call.memory.pool(region.device)
        self.inputs = inputs = args[: len(region.input_names)]
        self.in_pool = region.in_pool(call, inputs)
        named = [(i, name) for i, name in enumerate(region.input_names) if inputs[i] is not None]
        self.static = self.in_pool | {i for i, name in named if call.program.is_static(name, self._recording)}

    def run(self, *, verifies: bool) -> tuple[RegionGraph, list[Any]]:
        """The graph, and the results that have an address."""
        region, program = self._region, self._call.program
        check_inputs(region, self.inputs, self.static)
        placing = partial(place, self._pool, self.inputs, self.static, self._passed_twice())
        verifier = program.verifier
        check = verifier.record(region, self._pool, self.inputs, placing, self.in_pool) if verifies else None
        copied, buffers = placing()
        operators = listed([f"{op.name} {program.ops.place(op)}" for op in region.ops])
        graph = RegionGraph(copied, region.written, f"{region.name} of {program.label}", operators)
        graph.scalars = slice(len(region.input_names), None)
        graph.check = check
        if program.backend.runs_captures:
            graph.copy_in(self.inputs)
        return graph, self._capture(graph, buffers)

    def _capture(self, graph: RegionGraph, buffers: list[Any]) -> list[Any]:
        """Records the ops into ``graph``; returns the results that have an address."""
        region, call, pool = self._region, self._call, self._pool
        function = region.function_in_arena(call, self.inputs)
        inputs = with_buffers(region.take(call, self.inputs, self.in_pool), buffers)
        buffers.clear()  # the list of inputs alone owns them, so that their memory is reused after their last use
        aliased = region.aliased_inputs(inputs, self.in_pool)
        # `aliased` keeps inputs: a result with the address of one would be taken for a view of it. `written` keeps what
        # is copied back after a replay, so that its memory is not reused on the way.
        written = {i: inputs[i] for i in region.written}
        versions = {i: version(t) for i in region.written - self.in_pool if not (t := written[i]).is_inference()}
        produced: list[Any] = []
        saved = {*map(storage_id, call.owned.values()), *map(storage_id, self._recording.owned.values())}
        lends_gradients = region.lends_gradients(call)
        lending = Lending(call.memory, pool) if region.lends_results(call) else None

        def may_lend(tensors: list[torch.Tensor]) -> Set[int]:
            own = pool.owned(tensors) - saved if lends_gradients or lending is not None else set()
            return own if lending is None else lending.choose([each for each in tensors if storage_id(each) in own])

        def sources(results: Sequence[Any]) -> list[torch.Tensor]:
            for output, result in zip(region.io.outputs, results):
                if is_sparse(result):
                    problem = f"{region.describe(output.name)} has the layout {result.layout}, which no replay can fill"
                    raise CaptureRefused(problem)
            produced.extend(results)
            graph.outputs = Outputs(produced, aliased, region.are_copied_out, region.device, pool.alias, may_lend)
            return graph.sources()

        try:
            scalars = sentinels(len(region.io.scalars))
            inputs += scalars
            graph.graph, results = pool.capture(function, [inputs], graph.targets, sources, scalars)
        finally:
            if inputs:  # the function, which empties the list, was not called
                call.owned.update((region.input_names[i], inputs[i]) for i in self.in_pool)
        del results
        lent, graph.outputs.lent = graph.outputs.lent, {}
        if lending is not None:
            graph.lent_results = lending.results(lent, call.program.pair)
        elif lent:
            graph.lent = Lent(lent, call.program.pair.stop_lending)
        graph.outputs.disown()
        graph.touched = frozenset(i for i, before in versions.items() if version(written[i]) != before)
        return produced

    def complete(self, graph: RegionGraph, produced: Sequence[Any]) -> None:
        """Gives the graph the check of its arguments, and the addresses of its results."""
        graph.guarded, graph.guard = self._late_guard()
        graph.fixed = [self._pool.alias(p) if i in graph.outputs.fixed else None for i, p in enumerate(produced)]

    def _passed_twice(self) -> dict[int, int]:
        """Inputs that are the same tensor as another one, and that one. A guard checks that they stay so."""
        first: dict[int, int] = {}
        found: dict[int, int] = {}
        apart = self.in_pool | self._region.written
        read = [i for i, each in enumerate(self.inputs) if each is not None and i not in apart]
        for i in sorted(read, key=lambda i: i not in self.static):  # what is static comes first
            if (other := first.setdefault(id(self.inputs[i]), i)) != i and i not in self.static:
                found[i] = other
        return found

    def _late_guard(self) -> tuple[tuple[int, ...], Guard | None]:
        """The check of what did not exist when the call began, because an eager operator makes it."""
        names, written = self._region.input_names, self._region.written
        apart = [i for i in range(len(names)) if i not in self.in_pool]
        late = [i for i in apart if names[i] not in self._call.program.inputs]
        if not late:
            return (), None
        known = {id(self.inputs[i]) for i in apart if i not in late}
        late = apart if written or any(id(self.inputs[i]) in known for i in late) else late
        position = {i: p for p, i in enumerate(late)}
        guard = Guard(
            [self.inputs[i] for i in late],
            [position[i] for i in late if i in self.static],
            frozenset(position[i] for i in written if i in position),
        )
        return tuple(late), guard


def check_inputs(region: RuntimeRegion, inputs: Sequence[Any], static: Set[int]) -> None:
    """Raises an error for inputs that no graph of the region may have."""
    for i, (name, value) in enumerate(zip(region.input_names, inputs)):
        if not is_plain(value):
            raise TypeError(f"{region.describe(name)} is a {type(value).__name__}, not a plain tensor")
        # The seed of an attention that ran without a graph is on the host, whatever the trace says.
        if value is not None and value.device != region.device:
            raise CaptureRefused(f"{region.describe(name)} is on {value.device}, and the graph on {region.device}")
        if i in region.written and i not in static and overlaps_itself(value):
            raise ValueError(f"{region.describe(name)} is written in place and overlaps itself")
    if region.written and not OverlapGuard(inputs, static, region.written).admits(inputs):
        raise ValueError("an input that is written in place shares memory with another")
