"""Writes a call that is nothing but a replay as one Python function: straight-line code with everything bound.

Once the kernels are a graph, a call's host time is what Python does around the launch: calls of small functions,
look-ups, loops. The function written here makes the same checks and copies as the methods that it stands for.

Note [Checks after the launch]
    A graph that draws no random numbers and writes only to its arena and to new memory does nothing that anybody could
    see. So what has nothing to do with memory (settings, grad mode, attributes of modules) is checked while the GPU
    works already. Where such a check fails, the results are dropped and the call goes Thunder's way; from then on,
    that recording makes all checks first, since alternating calls would have the GPU work in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder_cg.compat.cuda import current_device
from thunder_cg.errors import ReplayRefused
from thunder_cg.fastpath.guards import GuardMismatch, PrologueGuard
from thunder_cg.fastpath.training import MISS, Compiled, Region, Result, Tensors
from thunder_cg.runtime import recording as recordings
from thunder_cg.runtime.code import Code
from thunder_cg.runtime.recording import Guard, Recording, RegionGraph


def inference(
    compiled: Compiled, guard: PrologueGuard, recording: Recording, values: list[Any], counted: Callable[[], None]
) -> Callable[..., Any]:
    """The function that only replays ``recording``: it takes a call's arguments, and returns its result or `MISS`.

    Raises:
        Unsupported: the trace holds more than one region, or its results are not all the region's.
        GuardMismatch: the recording is not for the call that ``values`` are of.
    """
    program, entry = compiled.forward, compiled.entry
    trace = entry.computation_traces[-1]
    region = Region(program, recording)
    pick = guard.picker(region.inputs)
    if not region.begins_with(pick(values)):
        raise GuardMismatch("it was recorded with other tensors")
    others = Tensors(guard, [name for name in guard.metadata if name not in region.inputs], values)
    result = Result(compiled, guard, trace.bound_symbols[-1].args[0], compiled.made)

    code = Code()
    refuse = f"return {code.name(MISS, 'refused')}"
    recorded, ran = code.name(recording, "recording"), code.name(program, "program")
    first = [f"not {recorded}.dropped", *program.conditions(code), *_device_conditions(code, region)]
    first += guard.arity_conditions(code)
    rest = guard.global_state.conditions(code)
    rest += [f"{now} == {then!r}" for now, then in zip(recordings.read_settings(code), region.guard.settings)]
    rest.append(guard.attributes_condition(code))
    may_wait = program.is_invisible
    checks = f"({' and '.join(rest)})"
    code.add("try:")
    if may_wait:
        code.add(f"early = {recorded}.may_launch_early", 2)
    first.append(f"(early or {checks})" if may_wait else checks)
    code.add(f"if not ({' and '.join(first)}):", 2)
    code.add(refuse, 3)
    code.add(f"values = {guard.look_up(code)}", 2)
    code.add(
        "tensors = values" if guard.are_all(region.inputs) else f"tensors = list({code.name(pick, 'pick')}(values))", 2
    )
    conditions = _guard_conditions(code, region.guard, "tensors")
    if not others.is_empty:
        conditions.append(f"{code.name(others.hold, 'others_hold')}(values)")
    code.add(f"if not ({' and '.join(conditions)}):", 2)
    code.add(refuse, 3)
    code.add("except Exception:  # as Thunder: the prologue of another cache entry may pass")
    code.add(refuse, 2)
    arena = recording.arena
    arena.write_hold(code, refuse)
    code.add("try:")
    arena.write_enter(code, 2)
    found = _write_replay(code, region.graph, "tensors", 2, refuse)
    if may_wait:
        code.add("try:", 2)
        code.add(f"holds = not early or {checks}", 3)
        code.add("except Exception:", 2)
        code.add("holds = False", 3)
        code.add("if not holds:", 2)
        code.add(f"{recorded}.may_launch_early = False", 3)
        code.add(refuse, 3)
    code.add(f"except {code.name(ReplayRefused, 'ReplayRefused')}:")
    code.add(refuse, 2)
    code.add("finally:")
    arena.write_release(code, 2)
    code.add(f"{ran}.calls += 1")
    code.add(f"{ran}.fast_path_calls += 1")
    code.add(f"{code.name(region.stats, 'stats')}.replays += 1")
    code.add(f"{code.name(counted, 'counted')}()")
    code.add(f"return {result.expression(code, found)}")
    return code.function("call(*args, **kwargs)")


def _guard_conditions(code: Code, guard: Guard, tensors: str) -> list[str]:
    """What `Guard.holds` checks of the list called ``tensors``, but for the settings."""
    if not guard.is_simple:
        return [f"{code.name(guard, 'guard')}.holds({tensors})"]
    pointers, static = code.name(guard.pointers, "pointers"), code.name(guard.static, "static")
    found = [f"{code.name(recordings.same_pointers, 'same_pointers')}({tensors}, {pointers}, {static})"]
    if guard.pointers:
        found.append(f"{code.name(guard.metadata.check, 'same_metadata')}(*{tensors})")
    return found + [f"{tensors}[{i}].data_ptr() % {recordings.ALIGNMENT} == {rest}" for i, rest in guard.aligned]


def _device_conditions(code: Code, region: Region) -> list[str]:
    device = region.graph.outputs._device
    return [f"{code.name(current_device, 'device')}() == {device.index}"] if device.type == "cuda" else []


def _write_replay(code: Code, graph: RegionGraph, tensors: str, depth: int, refuse: str) -> Callable[[int], str]:
    """Writes what `RegionGraph.replay` does, and to ``refuse`` where there is no memory for results.

    Returns the expression for each result.
    """
    if not graph.is_simple:
        code.add(f"results = {code.name(graph.replay, 'replay')}({tensors})", depth)
        return lambda i: f"results[{i}]"
    sources = [f"{tensors}[{arg}]" for arg in graph.loaded]
    targets = graph.outputs.write_allocate(code, refuse, depth)
    arguments = f"[{', '.join(sources)}], [{', '.join(targets.values())}]"
    code.add(f"{code.name(graph.graph, 'graph')}.replay({arguments})", depth)
    fixed = code.name(graph.fixed, "fixed")
    return lambda i: targets.get(i, f"{fixed}[{i}]")
