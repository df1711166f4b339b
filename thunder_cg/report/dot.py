"""`dump_dot`: the graph of one region, or of a whole step, as a picture."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thunder_cg.errors import OptionError
from thunder_cg.files import refuse_foreign, replace
from thunder_cg.report.programs import locate
from thunder_cg.runtime.backend import Graph
from thunder_cg.step import GraphedStep

MARK = "// thunder_cg: the graph of"  # files begin with it, in a comment of Graphviz's language


def dump_dot(fn: Any, region: str, path: str | os.PathLike[str]) -> None:
    """Writes the newest graph of a region as a file in the language of Graphviz: ``dot -Tsvg graph.dot -o graph.svg``.

    On CUDA, the driver writes its own picture: all nodes with their kernels, arguments and dependencies
    (cuGraphDebugDotPrint). The tape writes its recorded calls, and which call reads what another one wrote.

    Args:
        fn: a compiled function or module, as for :func:`explain`, or a step of :func:`graphed_step`.
        region: the name that the report gives the region, such as "CUDAGraph1", or the graph of a step: "Graph 0".
        path: the file. One that this function wrote before is replaced.

    Raises:
        NotCompiledError: ``fn`` is not compiled with ``cudagraph_transform()``.
        OptionError: no region has this name, or it has no graph: call the function twice with the same inputs first.
        ForeignFileError: there is another file at ``path``.
        CudagraphError: cuda-bindings is not installed.
    """
    path = Path(path)
    refuse_foreign(path, MARK)
    graph = _graph_of_step(fn, region) if isinstance(fn, GraphedStep) else _graph_of_region(fn, region)
    with TemporaryDirectory() as folder:
        written = Path(folder, "graph.dot")
        graph.write_dot(str(written))
        replace(path, f"{MARK} {region}\n{written.read_text(encoding='utf-8')}")


def _graph_of_step(step: GraphedStep, name: str) -> Graph:
    graphs = {f"Graph {number}": recording.graph for number, recording in enumerate(step.recordings)}
    if name not in graphs:
        raise OptionError("region", name, *_one_of(graphs), "dump_dot")
    return graphs[name]


def _graph_of_region(fn: Any, name: str) -> Graph:
    programs = [located.program for located in locate(fn, "dump_dot").programs]
    names = [each.name for program in programs for each in program.regions]
    if name not in names:
        raise OptionError("region", name, *_one_of(names), "dump_dot")
    program = next(each for each in programs if name in [its.name for its in each.regions])
    graph = program.newest_graph(name)
    if graph is None:
        failure = next(each.failure for each in program.regions if each.name == name)
        steps = "the function" if program.kind == "forward" else "the function and its backward"
        fix = f"it runs eagerly: {failure}" if failure else f"call {steps} twice with the same inputs first"
        raise OptionError("region", name, "a region with a graph", fix, "dump_dot")
    return graph.graph


def _one_of(names: Collection[str]) -> tuple[str, str]:
    """What is expected, and what to do."""
    expected = f"one of {', '.join(map(repr, names))}" if names else "a region, and nothing is captured"
    return expected, "print(explain(fn)) has the names"
