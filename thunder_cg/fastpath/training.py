"""The training fast path: a forward that one replay makes, and a node of autograd whose backward is one replay, too.

What the forward saves in the arena does not travel through autograd: the node holds the call, and the call the arena.
What the forward saves of the call's arguments does, so that a change before the backward raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from thunder_cg.analysis.undefined import undefined_too
from thunder_cg.compat.autograd import backward_keeps_graph, function_apply, raising_if_differentiated
from thunder_cg.compat.settings import functorch_is_active, is_below_autograd
from thunder_cg.compat.tensors import autograd_base
from thunder_cg.compat.thunder import CollectionProxy, PrimIDs, Proxy, TraceCtx
from thunder_cg.errors import NO_SECOND_DERIVATIVES, ReplayRefused
from thunder_cg.fastpath.accumulate import Accumulators, Keeper
from thunder_cg.fastpath.compiled import CallResult, Compiled, MetadataGuard, OnlyRegion, names_of, results_of_region
from thunder_cg.fastpath.guard import PrologueGuard
from thunder_cg.fastpath.state import MISS, Unsupported
from thunder_cg.runtime.call import Call, SavedState
from thunder_cg.runtime.guards import Guard
from thunder_cg.runtime.recording import Recording, RegionGraph, TraceRecording


class TrainingFastPath:
    """A call that autograd records. It takes the values that the guard looked up, and may return `MISS`.

    `Unsupported` if the trace is not one region, or does what a single node of autograd cannot show; `GuardMismatch` if
    the recording is not for the call that ``values`` are of.
    """

    def __init__(self, compiled: Compiled, guard: PrologueGuard, recording: Recording, values: list[Any]) -> None:
        program, trace = compiled.forward, compiled.entry.computation_traces[-1]
        if not torch.is_grad_enabled():  # as Thunder sometimes does; its outputs require grad nevertheless
            raise Unsupported("the trace has a backward, though no gradients are recorded")
        if compiled.entry.return_none_instead_of_grads:
            raise Unsupported("gradients are kept until they are synchronized")
        self._region = region = OnlyRegion(program, recording.forward)
        self._program = program
        self._recording = recording
        self._arena = recording.arena
        self._may_take_fast_path = program.may_take_fast_path
        self._pick = guard.picker(region.inputs)
        region.adapt_guard(list(self._pick(values)))
        self._others = MetadataGuard(guard, [n for n in guard.metadata if n not in region.inputs], values)
        inputs = region.inputs or ("",)
        data, (saved, saved_state) = trace.bound_symbols[-1].args
        made = compiled.results
        self._result = CallResult(compiled, guard, data["output"])
        self._outputs = [made.get(name, -1) for name in names_of(data["flat_output"])]
        views = region.graph.outputs.view_sources
        if any(i < 0 or i in views for i in self._outputs):
            raise Unsupported("an input, or a view of one, is returned")
        end = next(s for s in trace.bound_symbols if s.flat_proxy_outs and s.output is saved_state)
        if len(end.args) > 1:
            raise Unsupported("something else than tensors is saved for the backward")
        differentiable = compiled.options.get("is_differentiable_outputs")
        self._constant = [i for i, yes in enumerate(differentiable or ()) if not yes]
        # Autograd ties the outputs to the arguments, or to what an update in place made of them.
        arguments = names_of(data["flat_args"])
        self._updated = [(position, made[name]) for position, name in enumerate(arguments) if name in made]
        self._pick_arguments = guard.picker([inputs[0] if name in made else name for name in arguments])
        self._saved = SavedTensors(names_of(saved), made, guard, region.graph)
        self._backward = BackwardReplay(compiled, recording, frozenset(self._saved.passed))
        is_split = not compiled.options.get("thunderfx_disable_split_autograd", False)
        self._apply: Callable[..., Any] = function_apply(ThunderOutputFunction if is_split else ThunderFunction)
        static = {region.inputs[i] for i in region.guard.static}
        parameters = [position for position, name in enumerate(arguments) if name in static]
        self._keeper = Keeper(program.regions[0].device, parameters)
        self.drop_caches = self._keeper.drop  # of the autograd nodes that are only kept to be fast

    def __call__(self, values: list[Any]) -> Any:
        region, program = self._region, self._program
        tensors = list(self._pick(values))
        if (
            self._recording.dropped
            or not self._may_take_fast_path()
            or functorch_is_active()
            or is_below_autograd()
            or not region.guard.holds(tensors)
            or not self._others.holds(values)
            or not self._arena.try_hold(region.beside, region.spared)
        ):
            return MISS
        call = Call.replaying(program, self._recording)
        self._arena.enter()
        try:
            results = region.replay(tensors)
        except ReplayRefused:
            call.release()
            return MISS
        passed = self._saved.passing(values, results)
        arguments = self._pick_arguments(values)
        if self._updated:
            arguments = list(arguments)
            for position, i in self._updated:
                arguments[position] = results[i]
        node = NodeState(self._backward, call, self._saved, self._keeper.keep(arguments))
        given = [results[i] for i in self._outputs]
        if self._backward.routes and not self._backward.zeros:
            self._backward.zeros = [
                partial(torch.zeros, each.shape, dtype=each.dtype, device=each.device) for each in given
            ]
        outputs = self._apply(node, passed, given, self._constant, *arguments)[-len(given) :]
        for i, output in zip(self._outputs, outputs):
            results[i] = output
        if not program.is_continued:
            call.release()
        elif self._arena.is_shared:
            call.await_backward()
        return self._result.of(values, results)


class SavedTensors:
    """The tensors that a forward saves: at their addresses in the arena, or passed through autograd."""

    def __init__(self, names: Sequence[str], made: dict[str, int], guard: PrologueGuard, graph: RegionGraph) -> None:
        self.template: list[Any] = []
        self.passed: list[int] = []  # the positions of those that pass through autograd
        self._from_values: list[int] = []
        self._from_results: list[int] = []
        late: list[int] = []
        constant = graph.outputs.constants
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
        return [values[i] for i in self._from_values] + [results[i] for i in self._from_results]

    def all(self, passed: Sequence[Any]) -> list[Any]:
        """All saved tensors, in the order of the trace."""
        tensors = self.template.copy()
        for position, tensor in zip(self.passed, passed):
            tensors[position] = tensor
        return tensors


class BackwardGraph:
    """One backward of a recording, for one layout of its inputs, that a single replay makes.

    ``passed`` are the positions of the saved tensors that come from autograd. `Unsupported` if the backward is more
    than one region, KeyError if the region does not make all gradients.
    """

    def __init__(self, compiled: Compiled, recorded: TraceRecording, passed: frozenset[int]) -> None:
        assert compiled.backward is not None
        trace = compiled.entry.backward_traces[-1]
        self._region = region = OnlyRegion(compiled.backward, recorded)
        self.sources = _backward_sources(trace, region.inputs)
        made = results_of_region(trace)
        gradients = trace.bound_symbols[-1].args[0]
        self._gradients = [None if gradient is None else made[gradient.name] for gradient in gradients]
        given = [i for i in self._gradients if i is not None]
        # Whether no gradients that a replay makes share memory.
        self.are_apart = region.graph.are_apart and len(set(given)) == len(given)
        self._passed = passed
        self._varying: tuple[list[int], Guard] | None = None
        self.recorded = recorded

    def holds(self, tensors: list[Any]) -> bool:
        """The region's guard. What the forward left in the arena is checked once: it is at the same place each time."""
        if self._varying is not None:
            positions, guard = self._varying
            return guard.holds([tensors[i] for i in positions])
        whole = self._region.guard
        if not whole.holds(tensors):
            return False
        fixed = {i for i, (kind, position) in enumerate(self.sources) if kind == 0 and position not in self._passed}
        if whole.is_simple:
            positions = [i for i in range(len(tensors)) if i not in fixed]
            static = [n for n, i in enumerate(positions) if i in whole.static]
            self._varying = positions, Guard([tensors[i] for i in positions], static, frozenset(), whole.settings)
        return True

    def replay(self, tensors: list[Any]) -> list[Any]:
        """The gradients of all arguments. `ReplayRefused` if nothing ran."""
        results = self._region.replay(tensors)
        return [None if i is None else results[i] for i in self._gradients]


class BackwardReplay:
    """The backwards of one recording: one replay where the backward is one region, Thunder's function elsewhere."""

    def __init__(self, compiled: Compiled, recording: Recording, passed: frozenset[int]) -> None:
        assert compiled.backward is not None
        self._compiled = compiled
        self._entry = compiled.entry
        program = compiled.backward
        self._recording = recording
        self._passed = passed
        self._may_replay = program.may_replay_backward
        self._recorded: list[TraceRecording] | None = None
        self._graphs: list[BackwardGraph] = []
        self.routes = program.routes
        self.zeros: list[Callable[[], torch.Tensor]] = []  # for gradients of the results, if some may be undefined
        # Whether no other call of the program is between its forward and the end of its backward.
        self.is_alone = partial(program.pair.is_alone, recording.arena)

    def _known_graphs(self) -> list[BackwardGraph]:
        recorded = self._recording.backwards
        if recorded is not self._recorded:  # another backward has been captured since
            self._recorded, self._graphs = recorded, []
            with suppress(Unsupported, KeyError):
                self._graphs = [BackwardGraph(self._compiled, each, self._passed) for each in recorded]
        return self._graphs

    def run(self, call: Call, saved: list[Any], gradients: list[Any]) -> tuple[Sequence[Any], bool]:
        """The gradients of all arguments, and whether they are known to share no memory."""
        arena, discards, collections = call.arena, self._entry.return_none_instead_of_grads, (saved, gradients)
        if arena is not None and not discards and self._may_replay():
            for graph in self._known_graphs():
                tensors = [collections[kind][i] for kind, i in graph.sources]
                recorded = graph.recorded
                if graph.holds(tensors) and call.resume(recorded.beside) and call.try_hold_scratch(recorded.scratch):
                    arena.enter()
                    with suppress(ReplayRefused):
                        results = graph.replay(tensors)
                        call.trace = recorded
                        call.release()
                        return results, graph.are_apart
        result: Sequence[Any] = self._entry.backward_fn([saved, SavedState.of(call)], gradients)
        return [None] * len(result) if discards else result, False


class NodeState(NamedTuple):
    """What a call's node in the autograd graph needs for its backward."""

    backward: BackwardReplay
    call: Call
    saved: SavedTensors
    accumulators: Accumulators


class ThunderOutputFunction(torch.autograd.Function):
    """A call's node in the autograd graph, under the name that the node of an output has in Thunder.

    Its first output is a tensor of no device, as that of Thunder's own nodes is: autograd runs both on the thread that
    called ``backward``, one after the other. So gradients of one parameter are summed in the same order, whichever of
    the calls in flight took the fast path.

    Note [The thread of a node]
        Autograd runs a node on the thread of its device, and one of no device on the thread that called ``backward``.
        A node there hands its gradients one by one to the device's thread, which goes on with each at once. FSDP2 has
        a node that comes after a module's, and reduces the gradients of the parameters: it could run before they have
        any, and reduce nothing. With thunderfx, Thunder's node runs on the device's thread, which is done with a node
        before it goes on, and accumulates gradients before all else. So ours runs there, too.

    Note [Nodes that get nothing]
        After gradients were handed over in bulk, autograd still runs the node of each parameter, on the thread of its
        device. To wake that thread for each of 149 parameters took 1.2 to 2.1 ms on an H100's host, and to run them on
        the thread that called ``backward`` 0.5. Autograd asks which thread it is to be when our node returns, and then
        puts back the settings of before our node, so this one holds for these nodes alone.

    Note [Second derivatives]
        Thunder's backward cannot be differentiated. Where Thunder's own nodes return constants, the gradient of a
        gradient would be zero without a word, so a backward through what ours return, and through what Thunder's
        return for a captured function, raises (`undefined.py:connect`).
    """

    @staticmethod
    def forward(ctx: Any, node: NodeState, passed: list[Any], outputs: list[Any], constant: list[int], *_: Any) -> Any:
        _keep(ctx, node, passed, outputs, constant)
        return (torch.empty(0, device="meta"), *outputs)

    @staticmethod
    def backward(ctx: Any, _: Any, *gradients: Any) -> Any:
        found = _run_backward(ctx, gradients)
        if all(gradient is None for gradient in found):
            torch.autograd.set_multithreading_enabled(False)  # see Note [Nodes that get nothing]
        return found


class ThunderFunction(ThunderOutputFunction):
    """The same for ``thunderfx_disable_split_autograd``: see the notes above."""

    @staticmethod
    def forward(ctx: Any, node: NodeState, passed: list[Any], outputs: list[Any], constant: list[int], *_: Any) -> Any:
        _keep(ctx, node, passed, outputs, constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _run_backward(ctx, gradients)


def _keep(ctx: Any, node: NodeState, passed: list[Any], outputs: list[Any], constant: list[int]) -> None:
    """What the backward needs, in the node, and which outputs have no gradient."""
    # As Thunder does it: a saved view of an output would keep itself alive.
    ctx.save_for_backward(*[t.detach() if t is not None and autograd_base(t) is not None else t for t in passed])
    ctx.node = node
    if node.backward.routes:
        ctx.set_materialize_grads(False)
    if constant:
        ctx.mark_non_differentiable(*[outputs[i] for i in constant])


def _run_backward(ctx: Any, gradients: Sequence[Any]) -> Any:
    if ctx.node is None:
        ctx.saved_tensors  # noqa: B018  (it raises if the backward has ended)
        raise RuntimeError("this backward has failed, and what its forward saved is gone; run the forward again")
    backward, call, saved, accumulators = ctx.node
    defined, is_partial = gradients, bool(backward.routes) and any(gradient is None for gradient in gradients)
    try:
        with torch.no_grad():
            if is_partial:
                gradients = [
                    zeros() if gradient is None else gradient for gradient, zeros in zip(gradients, backward.zeros)
                ]
            found, are_apart = backward.run(call, saved.all(ctx.saved_tensors), list(gradients))
            if is_partial:
                found = undefined_too(found, backward.routes, defined)
    except BaseException:
        if not backward_keeps_graph():
            ctx.node = None  # half a backward may have overwritten what the other half needs
        raise
    if torch.is_grad_enabled():
        found = raising_if_differentiated(found, NO_SECOND_DERIVATIVES)
    elif not torch.is_anomaly_enabled() and backward.is_alone(call.token):
        found = accumulators.deliver(found, None if are_apart else gradients)
    if not backward_keeps_graph():
        ctx.node = None  # the loss may live on, and must not keep the recording
    return (None, None, None, None, *found)


def _backward_sources(trace: TraceCtx, names: Sequence[str]) -> list[tuple[int, int]]:
    """Of each tensor: 0 if the forward saved it, 1 if it is the gradient of an output, and its position there.

    A backward trace gets two collections, under names of Thunder's: what was saved, which is the collection of tensors
    and one of other values, and the gradients. What the collections hold may have any name, such as an argument's.
    """
    kinds: dict[str, int] = {}  # by the name of a collection
    sources: dict[str, tuple[int, int]] = {}
    for symbol in trace.bound_symbols:
        if symbol.sym.id is PrimIDs.UNPACK_TRIVIAL and symbol.output.name == "cotangents":
            kinds["cotangents"] = 1
        elif symbol.sym.id is PrimIDs.UNPACK_SEQUENCE and isinstance(collection := symbol.args[0], CollectionProxy):
            if collection.name == "saved_for_backward":
                kinds[symbol.output[0].name] = 0
            elif (kind := kinds.get(collection.name)) is not None:
                sources.update((p.name, (kind, i)) for i, p in enumerate(symbol.output) if isinstance(p, Proxy))
    return [sources[name] for name in names]
