"""Where the programs of a compiled function are kept.

Thunder keeps every trace it made in the cache entries of the compiled function, and the transform leaves its program on
the provenance of the trace that it returned. So nothing is registered anywhere, and a report dies with its function.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import thunder
import torch
from torch.fx import GraphModule

from thunder_cg.analysis.advice import NUMBER_OF_DYNAMO
from thunder_cg.analysis.sources import called_from, user_frames
from thunder_cg.compat.dynamo_records import Recompilation, RecompileLimit
from thunder_cg.compat.thunder import CACHE_OPTIONS, is_ours, owns_regions
from thunder_cg.errors import NotCompiledError, OptionError, SkipReason
from thunder_cg.report.breaks import GraphBreak, breaks_without_graph, graph_breaks, recompilations
from thunder_cg.report.units import count
from thunder_cg.runtime.compilation import compile_failures, name_of
from thunder_cg.runtime.program import Program, program_of
from thunder_cg.step import GraphedStep

_OWN_OPERATOR = "use other operators, or one of your own with torch.library, which allow= names"
_WITHOUT_TRANSFORM = "Thunder compiled this without cudagraph_transform(), so nothing of it is captured"


@dataclass(frozen=True, slots=True)
class Located:
    """A program, the function that it is part of, and the number of its cache entry (0 is the oldest).

    Attributes:
        successor: the graph of Dynamo's that has taken the place of the one that it is part of, for all later calls.
    """

    function: str
    entry: int
    program: Program
    successor: str | None = None


@dataclass(frozen=True, slots=True)
class Outside:
    """An operator in a graph of Dynamo's that Thunder does not trace, so that Inductor compiles it.

    Attributes:
        line: where the user called it, as "model.py:38, called from train.py:7", or None if that is unknown.
        count: how many calls are alike.
        cost: how many pieces the graph is cut into because of all such operators; "" if what Inductor made of this one
            is an operator of the trace around it: see `dynamo/pieces.py`.
        source: the text of that line.
        apart: why what Inductor made of it is no operator of the trace around it; "" if it is one.
        fix: what would have Thunder trace it; "" if that is not known.
    """

    function: str
    operator: str
    line: str | None
    reason: str
    count: int
    cost: str
    source: str | None = None
    apart: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class NewSizes:
    """Calls of a graph of Dynamo's that ran in PyTorch, since sizes had been new too often: see `dynamo/sizes.py`."""

    function: str
    calls: int


@dataclass(frozen=True, slots=True)
class Found:
    """All programs, oldest first, each forward before its backward, and what `Report` says of their function."""

    programs: tuple[Located, ...]
    calls: int = 0
    compile_failures: int = 0
    compile_failure: str | None = None
    outside: tuple[Outside, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()
    limits: tuple[RecompileLimit, ...] = ()
    new_sizes: tuple[NewSizes, ...] = ()
    python_calls: int = 0
    is_of_dynamo: bool = False
    uncached: bool = False
    recompilations: tuple[Recompilation, ...] = ()


def locate(fn: Any, function: str = "explain") -> Found:
    """What is there of `fn`: what `thunder.jit`, `thunder.compile`, `thunderfx` or `torch.compile` with a
    `ThunderCompiler` returned.

    Raises:
        NotCompiledError: `fn` is something else, or was compiled without `cudagraph_transform()`. The message has the
            name of the ``function`` that was given it.
    """
    if isinstance(fn, GraphedStep):
        raise NotCompiledError(fn, "graphed_step made this, which calls what Thunder compiled", function)
    if thunder.compile_stats(fn) is not None:
        programs = tuple(_in_caches(name_of(original(fn)), fn))
        if not programs and not is_ours(thunder.compile_data(fn)):
            raise NotCompiledError(fn, _WITHOUT_TRANSFORM, function)
        statistics = thunder.compile_stats(fn)
        failure = compile_failures(statistics)[1]
        return Found(programs, statistics.calls, failed_calls(fn), failure, uncached=not _keeps_all(fn))
    if (backend := _dynamo_backend(fn)) is None:
        parts = [*compiled_parts(fn), *(["forward"] if that_counts(getattr(fn, "forward", None)) is not None else [])]
        only = f", only its part{'s' * (len(parts) > 1)} {', '.join(parts)}" if parts else ""
        raise NotCompiledError(fn, f"Thunder did not compile this{only}", function)
    if not owns_regions(backend.thunder_options.get("transforms") or ()):
        raise NotCompiledError(fn, _WITHOUT_TRANSFORM, function)
    return _of_dynamo(fn, backend)


def made_by(fn: Any) -> str | None:
    """The function that has compiled this: ``"thunder.jit"``, ``"thunderfx"`` or ``"graphed_step"``; None if none."""
    if isinstance(fn, GraphedStep):
        return "graphed_step"
    if thunder.compile_data(fn) is not None:
        return "thunder.jit"
    return "thunderfx" if _dynamo_backend(fn) is not None else None


def refuse_compiled(fn: Any, function: str) -> None:
    """Raises `OptionError` for what ``function`` cannot compile: no function or module, or one that is compiled."""
    expected = "a function or module that is not compiled"
    if not callable(fn):
        raise OptionError("fn", fn, expected, "pass the model", function)
    if (maker := made_by(fn)) is not None:
        raise OptionError("fn", type(fn), expected, f"{maker} made this: pass what it was made of", function)


def compiled_parts(fn: Any) -> dict[str, torch.nn.Module]:
    """The parts of a module that are compiled with the transform, by their names, such as ``module`` of a wrapper."""
    parts = fn.named_modules() if isinstance(fn, torch.nn.Module) else ()
    return {name: part for name, part in parts if name and is_ours(thunder.compile_data(part))}


def _of_dynamo(fn: Any, backend: Any) -> Found:
    """Dynamo makes one graph for all between two graph breaks, and Thunder one or more functions for a graph."""
    from thunder_cg.compat.dynamo import recompile_limits  # Dynamo is imported by now

    programs: list[Located] = []
    outside: list[Outside] = []
    breaks: list[GraphBreak] = []
    ran: list[int] = []  # for each graph: in how many calls, if it has a part of Thunder's, which counts
    new_sizes: list[NewSizes] = []
    calls = failures = getattr(backend, "failures", 0)  # of `thunder_cg.thunderfx`
    failure = getattr(backend, "failure", None)
    for number, graph in enumerate(backend.subgraph_infos):
        label = graph_name(name_of(original(fn)), number)
        compiled = graph.thunder_compiled_fns or []
        for part, jitted in enumerate(compiled):
            programs += _in_caches(part_name(label, part, len(compiled)), jitted, _successor(backend, number))
            calls += thunder.compile_stats(jitted).calls
            failures += failed_calls(jitted)
            if raised := compile_failures(thunder.compile_stats(jitted))[1]:
                failure = f"{label}: {raised}"
        if left := in_torch(backend, number):
            new_sizes.append(NewSizes(label, left))
        ran += [left + max(thunder.compile_stats(jitted).calls for jitted in compiled)] if compiled else []
        outside += outside_of(label, graph)
        breaks += graph_breaks(label, graph)
    breaks += breaks_without_graph(name_of(original(fn)), fn, backend)
    counted = counting.counts[0] if (counting := that_counts(fn)) is not None else 0
    without_graph = counted - sum(ran)  # negative if a call has several graphs, or calls are not counted
    python_calls = max(0, without_graph) if len(ran) == len(backend.subgraph_infos) else 0
    reached = [*recompile_limits(fn, backend)] if without_graph else []
    limits = tuple(each for each in reached if python_calls or each.reason)
    return Found(
        tuple(programs),
        calls,
        failures,
        failure,
        tuple(outside),
        tuple(breaks),
        limits,
        tuple(new_sizes),
        python_calls,
        is_of_dynamo=True,
        recompilations=tuple(recompilations(backend)),
    )


def that_counts(fn: Any) -> Any | None:
    """``fn``, if `thunder_cg.thunderfx` returned it, which counts its calls; else None."""
    dynamo = sys.modules.get("thunder_cg.compat.dynamo")  # where nobody imported it, nobody has such a function
    return fn if dynamo is not None and isinstance(fn, dynamo.CompiledFunction) else None


def _successor(backend: Any, number: int) -> str | None:
    """The first graph that takes the same inputs, and more sizes and numbers: Dynamo asks later graphs first."""
    inputs = getattr(backend, "inputs", {})
    later = (n for n, its in inputs.items() if n > number in inputs and its.succeeds(inputs[number]))
    return next((f"graph {n}" for n in later), None)


def in_torch(backend: Any, number: int) -> int:
    """How many calls of a graph ran in PyTorch, since sizes had been new too often."""
    of_graph = getattr(backend, "sizes", {}).get(number)
    return of_graph.in_torch if of_graph is not None else 0


def graph_name(function: str, number: int) -> str:
    """What a graph of Dynamo's is called."""
    return f"{function}, graph {number}"


def part_name(graph: str, part: int, parts: int) -> str:
    """What one of Thunder's functions for a graph of Dynamo's is called."""
    return f"{graph}, part {part}" if parts > 1 else graph


def failed_calls(jitted: Any) -> int:
    """In how many calls Thunder raised while it compiled, or was interrupted.

    It keeps all that it compiled, of some of which the first prologue has raised.
    """
    stats = thunder.compile_stats(jitted)
    not_kept = stats.cache_misses - len(stats.interpreter_cache) if _keeps_all(jitted) else 0
    return max(not_kept, compile_failures(stats)[0])


def _keeps_all(jitted: Any) -> bool:
    """Whether Thunder keeps what it compiles."""
    return thunder.compile_data(jitted).cache_option is not CACHE_OPTIONS.NO_CACHING


def outside_of(label: str, graph: Any) -> Iterator[Outside]:
    """What Thunder's splitter gave away of a graph, alike ones together. It may look at an operator twice."""
    from thunder_cg.compat.fx import APART, JOINED, SeenNode  # Dynamo is imported by now

    kinds = Counter(part.compiler.name for part in graph.submodule_to_compiled_functions.values())
    pieces = count(len(graph.thunder_compiled_fns or ()), "piece")
    cost = f"cut into {pieces} of Thunder's and {kinds['TORCH_INDUCTOR']} of Inductor's"
    modules = [each for each in graph.original_graph_module.modules() if isinstance(each, GraphModule)]
    nodes = {"": (SeenNode(None, None, is_users=True), cost, "")}  # of a part that the splitter does not name
    for node in (node for module in reversed(modules) for node in module.graph.nodes):  # of checkpoints, too
        nodes[node.name] = (SeenNode.of(node), cost, node.meta.get(APART, ""))
        nodes |= {name: (joined, "", "") for name, joined in node.meta.get(JOINED, {}).items()}
    alike, of_transforms = Counter[Outside](), list[Outside]()
    for said in dict.fromkeys(map(_reason, graph.split_reasons or ())):
        name, operator, problem = understood(said.problem)
        seen, cost, apart = nodes.get(name, (None, "", ""))
        if seen is not None:
            frames = user_frames(seen.stack)
            source = frames[-1].text if frames else None
            called = seen.operator or operator, called_from(frames)
            one = Outside(label, *called, problem, 1, cost, source, apart, said.fix)
            if seen.is_users:
                alike[one] += 1
            else:
                of_transforms.append(one)
    named = [one.line or "" for one in alike]
    for one in of_transforms:  # if nothing is named that it calls: of a checkpointed function, one operator is
        if not any(line.endswith(one.line or "") for line in named):
            alike[one] = 1
    yield from (replace(each, count=times) for each, times in alike.items())


def _reason(split: Any) -> SkipReason:
    """Why Thunder gave an operator away, with what was raised where it was tried. Thunder keeps a string."""
    problem, _, fix = str(split.info).replace(", see exception field", "").partition("; ")
    if (unknown := _UNKNOWN.sub("is unknown to Thunder", problem)) != problem:
        problem, fix = unknown, _OWN_OPERATOR
    raised = str(split.exception or "").strip().partition("\n")[0]
    if (refused := _REFUSED.match(problem)) is not None:
        if any(each in raised for each in ("SymFloat", "SymBool", "SymInt")):
            return SkipReason(f"{refused[1]} {NUMBER_OF_DYNAMO.problem}", NUMBER_OF_DYNAMO.fix)
        if "VJP for" in raised or "gradient transform" in raised:
            return SkipReason(f"{refused[1]} has no gradient in Thunder", _OWN_OPERATOR)
        problem, fix = f"{refused[1]} has arguments that Thunder refuses", _OWN_OPERATOR
    return SkipReason(f"{problem}: {raised}" if raised else problem, fix)


_UNKNOWN = re.compile(r"didn't have any mapping in thunder\.?$")
_REFUSED = re.compile(r"Failed while (?:running meta|creating proxy) for (.*)", re.DOTALL)
_NODE = re.compile(
    r"(?P<before>.*?)node with name: (?P<name>\S+) and target: (?P<target><(?:[^<>]|<[^<>]*>)*>|[\w.]+)(?P<after>.*)",
    re.DOTALL,
)


def understood(split: str) -> tuple[str, str, str]:
    """The node, the operator and the reason in a splitter's "node with name: x and target: f only has ..."."""
    found = _NODE.match(split)
    if found is None:
        return "", "a part of the graph", split.strip()
    words = found["target"].strip("<>").split()
    operator = next((b for a, b in pairwise(words) if a in ("method", "function")), words[0])
    operator = operator.partition(".<locals>")[0]
    return found["name"], operator, f"{found['before']}it{found['after']}".strip().rstrip(".")


def _in_caches(label: str, jitted: Any, successor: str | None = None) -> Iterator[Located]:
    """The program of each trace: the one on the newest version that has one, as passes of Thunder's may follow."""
    for number, traces in enumerate(_trace_lists(thunder.compile_stats(jitted))):
        for versions in traces:
            if (program := program_of(versions)) is not None:
                yield Located(label, number, program, successor)


def jitted_parts(fn: Any) -> Iterator[Any]:
    """The functions of Thunder's that a compiled function consists of: it itself, or those in Dynamo's graphs."""
    if thunder.compile_stats(fn) is not None:
        yield fn
    elif (backend := _dynamo_backend(fn)) is not None:
        for graph in backend.subgraph_infos:
            yield from graph.thunder_compiled_fns or ()


def _trace_lists(stats: Any) -> Iterator[tuple[Iterable[Any], Iterable[Any]]]:
    """The (forward, backward) traces of every cache entry."""
    for entry in stats.interpreter_cache:
        yield entry.computation_traces, entry.backward_traces
    if not stats.interpreter_cache and stats.last_traces is not None:  # cache="no caching" keeps the last call's only
        yield stats.last_traces, stats.last_backward_traces or ()


def _dynamo_backend(fn: Any) -> Any | None:
    """The ThunderCompiler behind a Dynamo-compiled callable, None where there is none."""
    compiler = sys.modules.get("thunder.dynamo.compiler")  # where nobody imported it, nobody has a ThunderCompiler
    if compiler is None:
        return None
    backend = getattr(fn, "_backend", fn)
    if not isinstance(backend, compiler.ThunderCompiler):
        from thunder_cg.compat.dynamo_scope import dynamo_callback

        backend = dynamo_callback(fn)
        # Dynamo's chain of wrappers and torch.compile's own wrapper lead to the backend that the user named.
        links = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable", "compiler_fn")
        while (inner := next((getattr(backend, link) for link in links if hasattr(backend, link)), None)) is not None:
            backend = inner
    return backend if isinstance(backend, compiler.ThunderCompiler) else None


def original(fn: Any) -> Any:
    """What `thunder.jit` or `thunderfx` was given, if one of them made ``fn``; else ``fn``."""
    if (data := thunder.compile_data(fn)) is not None:
        return data.fn
    return getattr(fn, "_func", fn) if made_by(fn) == "thunderfx" else fn
