"""What runs once a prologue's guard holds: a graph and nothing else where the whole trace is one region.

Each way takes the values that the guard looked up and returns the call's result, or `MISS`, and then
it has done nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from thunder import CacheEntry
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.torch_autograd import connect_to_autograd
from thunder.executors.torchex import no_autocast

from thunder_cg.analysis.ops import computing
from thunder_cg.errors import ReplayRefused
from thunder_cg.executor import executor
from thunder_cg.fastpath.accumulate import Accumulators, Keeper
from thunder_cg.fastpath.guards import GuardMismatch, PrologueGuard, Unsupported
from thunder_cg.runtime.call import Call, SavedState
from thunder_cg.runtime.code import Code
from thunder_cg.runtime.program import Program
from thunder_cg.runtime.recording import Guard, Recording, RegionGraph
from thunder_cg.runtime.skip_reasons import graph_is_retained

MISS = object()


class Compiled:
    """What Thunder made of one cache entry, and what the transform made of that.

    Args:
        options: thunder.jit's.
    """

    def __init__(self, entry: CacheEntry, forward: Program, backward: Program | None, options: dict[str, Any]) -> None:
        self.entry, self.forward, self.backward, self.options = entry, forward, backward, options
        trace = entry.epilogue_traces[-1]
        self.has_plain_epilogue = all(s.sym.id in (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN) for s in trace.bound_symbols)
        self.epilogue = (
            trace.python_callable(include_decorators=False) if self.has_plain_epilogue else entry.epilogue_fn
        )
        self._made: dict[str, int] | str
        try:  # in the first call already, and not in each that captures
            self._made = made_by_region(entry.computation_traces[-1])
        except Unsupported as error:
            self._made = str(error)

    @property
    def made(self) -> dict[str, int]:
        """The results of the forward's only region, and their positions. `Unsupported` if it is not all of the trace."""
        if isinstance(self._made, str):
            raise Unsupported(self._made)
        return self._made


class TracedFastPath:
    """The way that runs the computation as Thunder would, for any trace."""

    def __init__(self, compiled: Compiled, guard: PrologueGuard, values: list[Any]) -> None:
        self._entry = compiled.entry
        self._options = compiled.options
        self._pick_inputs, self._pick_passed_on = guard.picker(guard.inputs), guard.picker(guard.passed_on)
        self._tensors = Tensors(guard, list(guard.metadata), values)

    def __call__(self, values: list[Any]) -> Any:
        if not self._tensors.hold(values):
            return MISS
        entry = self._entry
        result = entry.computation_fn(*self._pick_inputs(values))
        if entry.backward_fn:
            data, (saved_tensors, saved_other) = result
            connect_to_autograd(
                backward_fn=entry.backward_fn,
                flat_args=data["flat_args"],
                flat_output=data["flat_output"],
                saved_tensors=saved_tensors,
                saved_other=saved_other,
                return_none_instead_of_grads=entry.return_none_instead_of_grads,
                disable_split_autograd=self._options.get("thunderfx_disable_split_autograd", False),
                is_differentiable_outputs=self._options.get("is_differentiable_outputs"),
            )
            result = data["output"]
        return entry.epilogue_fn(*self._pick_passed_on(values), *result)


class Tensors:
    """The check that tensors are what they were, which is what the prologue wants of them."""

    def __init__(self, guard: PrologueGuard, names: Sequence[str], values: list[Any]) -> None:
        names = [name for name in names if name in guard.place]
        self._pick = guard.picker(names)
        tensors = list(self._pick(values))
        for name, tensor in zip(names, tensors):
            try:
                guard.metadata[name].check(tensor)
            except AssertionError as error:
                raise GuardMismatch(f"{name}: {error}") from None
        self.is_empty = not names
        self._guard = Guard(tensors, (), frozenset()) if names else None

    def hold(self, values: list[Any]) -> bool:
        return self._guard is None or self._guard.holds(list(self._pick(values)))


class Result:
    """How the results of a region become what the caller gets."""

    def __init__(self, compiled: Compiled, guard: PrologueGuard, output: Sequence[Any], made: dict[str, int]) -> None:
        self._pick_passed_on = guard.picker(guard.passed_on)
        self._order = [made.get(name, -1) for name in _names_of(output)]
        if -1 in self._order:
            raise Unsupported("something is returned that the region does not make")
        self._epilogue = compiled.epilogue
        trace, plain = compiled.entry.epilogue_traces[-1], compiled.has_plain_epilogue
        names = [s.output.name for s in trace.bound_symbols if s.sym.id is PrimIDs.UNPACK_TRIVIAL]
        returned = trace.bound_symbols[-1].args[0] if plain else None
        at = names.index(returned.name) if isinstance(returned, Proxy) else -1
        self._single = at - len(guard.passed_on) if at >= len(guard.passed_on) else None  # all that is returned

    def expression(self, code: Code, found: Callable[[int], str]) -> str:
        """What `of` returns, given the expressions for the region's results."""
        results = [found(i) for i in self._order]
        if self._single is not None:
            return results[self._single]
        passed_on = f"*{code.name(self._pick_passed_on, 'passed_on')}(values)"
        return f"{code.name(self._epilogue, 'epilogue')}({', '.join([passed_on, *results])})"

    def of(self, values: list[Any], results: Sequence[Any]) -> Any:
        return self._epilogue(*self._pick_passed_on(values), *[results[i] for i in self._order])


class Region:
    """The region of a program that is one region, in one recording."""

    def __init__(self, program: Program, recording: Recording) -> None:
        part = recording.parts.get(program.kind)
        if part is None or not program.is_one_region or part.graphs[0] is None or part.graphs[0].guard is not None:
            raise Unsupported("the trace is not one region")
        self.guard: Guard = part.guard
        self.graph: RegionGraph = part.graphs[0]
        self._written = program.written
        self.inputs = program.regions[0].names
        if self.inputs != program.inputs:
            raise Unsupported("the region's inputs are not the trace's")
        self.stats = program.regions[0].stats

    def begins_with(self, tensors: Sequence[Any]) -> bool:
        """Has the guard hold for calls like the present one, with these tensors. Returns whether it does.

        Thunder turns autocast off before it comes to where the guard was made, and the C++ check of tensors depends on
        that.
        """
        if not torch._C._is_any_autocast_enabled():
            return True
        guard, tensors = self.guard, list(tensors)
        if not no_autocast(guard.holds)(tensors):
            return False
        self.guard = Guard(tensors, guard.static, self._written)
        return True


class TrainingFastPath:
    """A forward that one replay makes, and a node of autograd whose backward is one replay, too.

    What the forward saves in the arena does not travel through autograd: the node holds the call, and the call the
    arena. What it saves of the call's arguments does, so that a change before the backward raises.
    """

    def __init__(self, compiled: Compiled, guard: PrologueGuard, recording: Recording, values: list[Any]) -> None:
        program, trace = compiled.forward, compiled.entry.computation_traces[-1]
        if not torch.is_grad_enabled():  # as Thunder sometimes does; its outputs require grad nevertheless
            raise Unsupported("it has a backward, though no gradients are recorded")
        self._region = region = Region(program, recording)
        self._program = program
        self._recording = recording
        self._arena = recording.arena
        self._skip_reason = program.fast_path_skip_reason if program.samples else program.skip_reason
        self._pick = guard.picker(region.inputs)
        if not region.begins_with(self._pick(values)):
            raise GuardMismatch("it was recorded with other tensors")
        self._others = Tensors(guard, [n for n in guard.metadata if n not in region.inputs], values)
        inputs = region.inputs or ("",)
        data, (saved, kept) = trace.bound_symbols[-1].args
        made = compiled.made
        self._result = Result(compiled, guard, data["output"], made)
        self._outputs = [made.get(name, -1) for name in _names_of(data["flat_output"])]
        views = region.graph.outputs.view_sources()
        if any(i < 0 or i in views for i in self._outputs):
            raise Unsupported("an input, or a view of one, is returned")
        end = next(s for s in trace.bound_symbols if s.flat_proxy_outs and s.output is kept)
        if len(end.args) > 1:
            raise Unsupported("something else than tensors is saved")
        differentiable = compiled.options.get("is_differentiable_outputs")
        self._constant = [i for i, yes in enumerate(differentiable or ()) if not yes]
        # Autograd ties the outputs to the arguments, or to what an update in place made of them.
        arguments = _names_of(data["flat_args"])
        self._updated = [(position, made[name]) for position, name in enumerate(arguments) if name in made]
        self._pick_arguments = guard.picker([inputs[0] if name in made else name for name in arguments])
        self._saved = _Saved(_names_of(saved), made, guard, region.graph, views)
        assert compiled.backward is not None
        self._backward = _Backward(compiled, recording, frozenset(self._saved.passed))
        static = {region.inputs[i] for i in region.guard.static}
        parameters = [position for position, name in enumerate(arguments) if name in static]
        self._keeper = Keeper(program.regions[0].device, parameters)

    def __call__(self, values: list[Any]) -> Any:
        region, program = self._region, self._program
        tensors = list(self._pick(values))
        if (
            self._recording.dropped
            or self._skip_reason() is not None
            or torch._C._are_functorch_transforms_active()
            or not region.guard.holds(tensors)
            or not self._others.hold(values)
            or not self._arena.try_hold()
        ):
            return MISS
        call = Call.replaying(self._recording, program.kind)
        self._arena.enter()
        try:
            results = region.graph.replay(tensors)
        except ReplayRefused:
            call.release()
            return MISS
        program.calls += 1
        region.stats.replays += 1
        step = _Step(self._backward, call, self._saved, self._saved.passing(values, results), None)
        arguments = self._pick_arguments(values)
        if self._updated:
            arguments = list(arguments)
            for position, i in self._updated:
                arguments[position] = results[i]
        step = step._replace(accumulators=self._keeper.keep(arguments))
        _, *outputs = _apply(step, [results[i] for i in self._outputs], self._constant, *arguments)
        for i, output in zip(self._outputs, outputs):
            results[i] = output
        return self._result.of(values, results)

    def drop_caches(self) -> None:
        """Lets go of what is only kept to be fast."""
        self._keeper.drop()


class _Saved:
    """The tensors that a forward saves: at their addresses in the arena, or passed through autograd."""

    def __init__(
        self,
        names: Sequence[str],
        made: dict[str, int],
        guard: PrologueGuard,
        graph: RegionGraph,
        views: dict[int, int],
    ) -> None:
        self.template: list[Any] = []
        self.passed: list[int] = []  # positions of what autograd has
        self._from_values: list[int] = []
        self._from_results: list[int] = []
        late: list[int] = []
        constant = graph.outputs.constants()
        for position, name in enumerate(names):
            slot = made.get(name)
            fixed = graph.fixed[slot] if slot is not None else None
            self.template.append(constant.get(slot) if fixed is None and slot is not None else fixed)
            if slot is None:
                self.passed.append(position)
                self._from_values.append(guard.place[name])
            elif fixed is None and slot not in constant:
                late.append(position)
                self._from_results.append(slot)
        self.passed += late

    def passing(self, values: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """What autograd is to save, in the order of ``passed``."""
        return [*[values[i] for i in self._from_values], *[results[i] for i in self._from_results]]

    def all(self, passed: Sequence[Any]) -> list[Any]:
        """All saved tensors, in the order of the trace."""
        tensors = self.template.copy()
        for position, tensor in zip(self.passed, passed):
            tensors[position] = tensor
        return tensors


class _Backward:
    """The backward of one recording: one replay where it is one region, Thunder's function elsewhere."""

    def __init__(self, compiled: Compiled, recording: Recording, passed: frozenset[int]) -> None:
        self._passed = passed  # positions of the saved tensors that come from autograd
        self._varying: tuple[list[int], Guard] | None = None
        self._entry = compiled.entry
        self._program = program = compiled.backward
        self._may_replay = lambda: True
        if program is not None:
            verifies = program.options.verify is not None
            self._may_replay = program.may_replay_backward_unverified if verifies else program.may_replay_backward
        self._recording = recording
        self._region: Region | None = None
        self._is_known = False
        self._are_apart = False  # whether no gradients that a replay makes share memory

    def _look(self) -> None:
        """Once the backward has been captured, too, finds out whether a replay is all of it."""
        assert self._program is not None
        trace = self._entry.backward_traces[-1]
        self._is_known = self._program.kind in self._recording.parts
        try:
            region = Region(self._program, self._recording)
            self._sources = _sources(trace, region.inputs)
            made = made_by_region(trace)
            gradients = trace.bound_symbols[-1].args[0]
            self._gradients = [None if gradient is None else made[gradient.name] for gradient in gradients]
            given = [i for i in self._gradients if i is not None]
            self._are_apart = region.graph.outputs.is_plain and len(set(given)) == len(given)
            self._region = region
        except (Unsupported, KeyError):  # more than one region, or a gradient that the region does not make
            pass

    def _holds(self, tensors: list[Any]) -> bool:
        """The region's guard. What the forward left in the arena is checked once: it is at the same place each time."""
        if self._varying is not None:
            positions, guard = self._varying
            return guard.holds([tensors[i] for i in positions])
        assert self._region is not None
        whole = self._region.guard
        if not whole.holds(tensors):
            return False
        fixed = {i for i, (kind, position) in enumerate(self._sources) if kind == 0 and position not in self._passed}
        if whole.is_simple:
            positions = [i for i in range(len(tensors)) if i not in fixed]
            static = [n for n, i in enumerate(positions) if i in whole.static]
            self._varying = positions, Guard([tensors[i] for i in positions], static, frozenset())
        return True

    def is_alone(self) -> bool:
        """Whether no other call of the program is between its forward and the end of its backward."""
        return self._program is not None and self._program.is_alone(self._recording.arena)

    def run(self, call: Call, saved: list[Any], gradients: list[Any]) -> tuple[Sequence[Any], bool]:
        """The gradients of all arguments, and whether they are known to share no memory."""
        if not self._is_known:
            self._look()
        region, program, arena = self._region, self._program, call.arena
        assert program is not None
        if region is not None and arena is not None and not self._entry.return_none_instead_of_grads:
            found = (saved, gradients)
            tensors = [found[kind][i] for kind, i in self._sources]
            if self._may_replay() and self._holds(tensors):
                arena.enter()
                with suppress(ReplayRefused):
                    results = region.graph.replay(tensors)
                    program.calls += 1
                    region.stats.replays += 1
                    call.release()
                    return [None if i is None else results[i] for i in self._gradients], self._are_apart
        others = SavedState(())
        others.call = call
        result: Sequence[Any] = self._entry.backward_fn([saved, others], gradients)
        return [None] * len(result) if self._entry.return_none_instead_of_grads else result, False


class _Step(NamedTuple):
    """One call, for its node in the autograd graph."""

    backward: _Backward
    call: Call
    saved: _Saved
    passed: list[Any]
    accumulators: Accumulators | None


class _Node(torch.autograd.Function):
    """A call's node in the autograd graph.

    Its first output is a tensor of no device, as that of Thunder's own nodes is: autograd runs both on the thread that
    called ``backward``, one after the other. Of calls in flight, some go the short way and some do not, and gradients
    of one parameter are summed in the order in which nodes run.
    """

    @staticmethod
    def forward(ctx: Any, step: _Step, outputs: list[Any], constant: list[int], *arguments: Any) -> Any:
        # As Thunder does it: a saved view of an output would keep itself alive.
        ctx.save_for_backward(*[t.detach() if t is not None and t._base is not None else t for t in step.passed])
        ctx.step = step._replace(passed=[])
        if constant:
            ctx.mark_non_differentiable(*[outputs[i] for i in constant])
        return (torch.empty(0, device="meta"), *outputs)

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: Any) -> Any:
        if ctx.step is None:
            raise RuntimeError("this backward has failed, and what its forward saved is gone; run the forward again")
        backward, call, saved, _, accumulators = ctx.step
        in_bulk = accumulators is not None and not torch.is_grad_enabled() and not torch.is_anomaly_enabled()
        try:
            with torch.no_grad():  # so gradients are constants to a graph that is made of them, as Thunder's are
                found, are_apart = backward.run(call, saved.all(ctx.saved_tensors), list(gradients))
        except BaseException:
            if not graph_is_retained():
                ctx.step = None  # half a backward may have overwritten what the other half needs
            raise
        if in_bulk and backward.is_alone():
            found = accumulators.deliver(found, None if are_apart else gradients)
        return (None, None, None, *found)


_apply = super(torch.autograd.Function, _Node).apply  # what `apply` calls where no functorch transform is active


def _sources(trace: TraceCtx, names: Sequence[str]) -> list[tuple[int, int]]:
    """Of each tensor: 0 or 1, for saved or gradient, and its position there."""
    found: dict[str, tuple[int, int]] = {}
    kinds = {"C0": 0, "cotangents": 1}
    for symbol in trace.bound_symbols:
        if symbol.sym.id is PrimIDs.UNPACK_SEQUENCE and (kind := kinds.get(symbol.args[0].name)) is not None:
            for i, proxy in enumerate(symbol.output):
                if isinstance(proxy, Proxy):
                    found[proxy.name] = kind, i
    return [found[name] for name in names]


def made_by_region(trace: TraceCtx) -> dict[str, int]:
    """The results of a trace's only region, and their positions. Another transform may have put something beside it."""
    if others := [s.name_with_module() for s in computing(trace) if s.sym.executor is not executor]:
        raise Unsupported(f"the trace holds {', '.join(others[:3])} beside the region")
    regions = [s for s in trace.bound_symbols if _is_region(s)]
    if len(regions) != 1:
        raise Unsupported("the trace is not one region")
    return {proxy.name: i for i, proxy in enumerate(regions[0].flat_proxy_outs)}


def _is_region(symbol: BoundSymbol) -> bool:
    return symbol.sym.executor is executor and bool(symbol.subsymbols)


def _names_of(tree: Any) -> list[str]:
    return [leaf.name if isinstance(leaf, Proxy) else "" for leaf in tree_flatten(tree)[0]]
