"""The inference fast path: a call that is nothing but one replay, as one function that reads from top to bottom.

Once the kernels are a graph, a call's host time is what Python does around the launch. So all that the call needs is
bound to local names of the factory, and the C++ checks are called directly.

Note [Checks after the launch]
    A graph that draws no random numbers and writes only to its arena and to new memory does nothing that anybody could
    see. So what has nothing to do with memory is checked while the GPU works already: the state of the thread, settings
    of kernels, attributes of modules, and metadata of static tensors, whose addresses are checked before. If such a
    check fails, the results are dropped and the call takes Thunder's dispatch. From then on, that recording makes all
    checks first, since calls that alternate would have the GPU work in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any

from thunder_cg.compat.cuda import current_device
from thunder_cg.compat.guards import addresses_equal, tensor_guards
from thunder_cg.compat.tensors import empty_strided
from thunder_cg.compat.thunder import CacheEntry
from thunder_cg.compat.torch import IS_PROFILING, in_profile, profiler_state
from thunder_cg.errors import ReplayRefused
from thunder_cg.fastpath.compiled import CallResult, Compiled, MetadataGuard, OnlyRegion
from thunder_cg.fastpath.guard import PrologueGuard
from thunder_cg.fastpath.state import MISS, getter
from thunder_cg.runtime import skip_reasons
from thunder_cg.runtime.recording import Recording
from thunder_cg.runtime.tensors import ALIGNMENT

FastPath = Callable[..., Any]  # with a call's arguments; returns the call's result or MISS


def inference_fast_path(
    compiled: Compiled, guard: PrologueGuard, recording: Recording, values: list[Any], statistics: Any
) -> FastPath:
    """The function that only replays ``recording``: it takes a call's arguments, and returns its result or `MISS`.

    It is longer than a screen, since each function that it would be split into costs host time in every call.

    Args:
        values: what ``guard`` looked up for the present call, for which ``recording`` has to be.
        statistics: Thunder's, of the compiled module.

    Raises:
        Unsupported: the trace holds more than one region, or its results are not all the region's.
        GuardMismatch: the recording is not for the call that ``values`` are of.
    """
    program, entry, device = compiled.forward, compiled.entry, compiled.forward.regions[0].device
    backend, skip_reason, may_be_early = program.backend, skip_reasons.skip_reason, program.is_invisible
    counts = program.counts
    region = OnlyRegion(program, recording.forward)
    graph, stats, arena, collectives = region.graph, region.stats, recording.arena, program.collectives
    # The values of a call: its arguments, and parameters where they were.
    look_up, cache, parameters_key = guard.look_up, guard.parameters_cache, guard.parameters_key
    positional, keywords, sharing_is_expected = guard.positional, guard.keywords, guard.sharing_is_expected
    is_alone = keywords is not None and positional + len(keywords) == 1  # one argument shares no memory
    takes_all_values, pick_tensors = [*region.inputs] == [*guard.place], guard.picker(region.inputs)
    are_apart = guard.sharing_check(values, [region.inputs[i] for i in region.guard.static])
    # The checks of the values.
    region.adapt_guard(list(pick_tensors(values)))
    tensors_hold, is_simple, aligned = region.guard.holds, region.guard.is_simple, region.guard.aligned
    addresses, static, metadata_holds = region.guard.addresses, region.guard.static, region.guard.metadata.check
    pick_inputs = getter([i for i, _ in aligned])  # the tensors that are not static
    inputs_hold = tensor_guards(pick_inputs(list(pick_tensors(values)))).check if aligned and is_simple else None
    others = MetadataGuard(guard, [name for name in guard.metadata if name not in region.inputs], values)
    others_hold = None if others.is_empty else others.holds
    # The checks of the state.
    global_state_holds, settings_hold = guard.global_state.holds, region.guard.settings_hold
    attributes = guard.attributes
    # The replay. One that only copies is launched from here.
    enter, release, beside, spared = arena.pool(device).enter, arena.release, region.beside, region.spared
    only_copies = is_simple and graph.is_simple and graph.copied_args == [i for i, _ in aligned]
    replay, launch, layouts, empty = graph.replay, graph.graph.replay, graph.outputs.layouts, empty_strided(device.type)
    index = device.index if device.type == "cuda" else None
    # The result. The usual call returns one of the copies.
    result = CallResult(compiled, guard, entry.computation_traces[-1].bound_symbols[-1].args[0])
    result_of, prologue_fn, fixed = result.of, entry.prologue_fn, graph.fixed
    places = graph.outputs.copied if graph.is_simple else []  # of the copies that a replay makes
    only_copy = places.index(result.only) if result.only in places else None

    def state_holds(tensors: list[Any]) -> bool:
        """What may be checked after the launch."""
        try:
            return (
                # A guard that is not simple has looked at metadata and settings before the launch.
                (not is_simple or ((not static or metadata_holds(*tensors)) and settings_hold()))
                and global_state_holds()
                and (attributes.unchanged() or attributes.holds())
            )
        except Exception:
            return False

    def call(*args: Any, **kwargs: Any) -> Any:
        """One steady call; it is longer than a screen, as the factory says."""
        try:
            # What a launch needs: a graph that is still there, and nothing on this thread that has to see operators.
            if recording.dropped or counts.calls >= program.verify_after or skip_reason(backend, saves=False):
                return MISS
            if collectives is not None and collectives.meets():
                return MISS
            # The arguments, and the parameters where they were.
            if keywords is None:
                values = look_up(args, kwargs)
            elif len(args) == positional and len(kwargs) == len(keywords):
                parameters = (cache if cache.unchanged() else cache.renewed())[parameters_key]
                values = [*args, *[kwargs[key] for key in keywords], *parameters] if kwargs else [*args, *parameters]
            else:
                return MISS
            if not (is_alone or (sharing_is_expected(args, kwargs) if are_apart is None else are_apart(values))):
                return MISS
            tensors = values if takes_all_values else list(pick_tensors(values))
            # Addresses of static tensors, and all of the others: see Note [Checks after the launch].
            if not (addresses_equal(tensors, addresses, static) if is_simple else tensors_hold(tensors)):
                return MISS
            inputs = pick_inputs(tensors)
            if inputs_hold is not None:
                if not inputs_hold(*inputs):
                    return MISS
                for i, alignment in aligned:
                    if tensors[i].data_ptr() % ALIGNMENT != alignment:
                        return MISS
            if not (others_hold is None or others_hold(values)):
                return MISS
            launch_early = may_be_early and recording.may_launch_early
            if not (launch_early or state_holds(tensors)):
                return MISS
            copies = None
            if only_copies and (index is None or current_device() == index):
                copies = [*starmap(empty, layouts)]
        except Exception:  # as in Thunder: the prologue of another cache entry may pass
            return MISS
        if not arena.try_hold(beside, spared):
            return MISS
        try:
            enter()
            if copies is None:
                results = replay(tensors)
            elif profiler_state[IS_PROFILING]:
                in_profile(graph.label, launch, inputs, copies)
            else:
                launch(inputs, copies)
            if launch_early and not state_holds(tensors):
                recording.may_launch_early = False
                return MISS
        except ReplayRefused:
            return MISS
        except Exception as error:
            if copies is not None:  # else `replay` has done it
                graph.note(error)
            program.count_raised(is_counted=False)
            statistics.calls += 1
            raise
        finally:
            release()
        counts.calls += 1
        if collectives is not None:
            collectives.count_replay()
        counts.fast_path_calls += 1
        stats.replays += 1
        recording.replays += 1
        statistics.calls += 1
        statistics.cache_hits += 1
        if statistics.last_prologue is not prologue_fn:
            note_last(statistics, entry)
        if copies is not None:
            if only_copy is not None:
                return copies[only_copy]
            results = fixed.copy()
            for place, copy in zip(places, copies):
                results[place] = copy
        return result_of(values, results)

    return call


def note_last(statistics: Any, entry: CacheEntry) -> None:
    """Has Thunder's statistics show ``entry`` as the one that the last call was for."""
    statistics.last_prologue = entry.prologue_fn
    statistics.last_traces = entry.computation_traces
    statistics.last_prologue_traces = entry.prologue_traces
