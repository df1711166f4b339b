"""`dump_dot`: the graph of one region as a picture."""

from __future__ import annotations

import os
from typing import Any

from thunder_cg.errors import OptionError
from thunder_cg.report.programs import locate


def dump_dot(fn: Any, region: str, path: str | os.PathLike[str]) -> None:
    """Writes the newest graph of a region as a file in the language of Graphviz: ``dot -Tsvg graph.dot -o graph.svg``.

    On CUDA, the driver writes its own picture: all nodes with their kernels, arguments and dependencies
    (cuGraphDebugDotPrint). The tape writes its recorded calls, and which call reads what another one wrote.

    Args:
        fn: a compiled function or module, as for :func:`explain`.
        region: the name that its report gives the region, such as "CUDAGraph1".
        path: the file, which is overwritten.

    Raises:
        NotCompiledError: ``fn`` is not compiled with ``cudagraph_transform()``.
        OptionError: no region has this name, or it has no graph: call the function three times first.
        CudagraphError: cuda-bindings is not installed.
    """
    programs = [located.program for located in locate(fn).programs]
    names = [each.name for program in programs for each in program.regions]
    if region not in names:
        expected = f"one of {', '.join(map(repr, names))}" if names else "a region, and nothing is captured"
        raise OptionError("region", region, expected, "print(explain(fn)) has the names", "dump_dot")
    program = next(each for each in programs if region in [its.name for its in each.regions])
    graph = program.newest_graph(region)
    if graph is None:
        failure = next(each.failure for each in program.regions if each.name == region)
        fix = f"it runs eagerly: {failure}" if failure else "call the function three times first"
        raise OptionError("region", region, "a region with a graph", fix, "dump_dot")
    graph.graph.write_dot(os.fspath(path))
