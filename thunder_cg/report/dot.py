"""`dump_dot`: the graph of one region as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thunder_cg.errors import OptionError
from thunder_cg.files import refuse_foreign, replace
from thunder_cg.report.programs import locate

MARK = "// thunder_cg: the graph of region"  # files begin with it, in a comment of Graphviz's language


def dump_dot(fn: Any, region: str, path: str | os.PathLike[str]) -> None:
    """Writes the newest graph of a region as a file in the language of Graphviz: ``dot -Tsvg graph.dot -o graph.svg``.

    On CUDA, the driver writes its own picture: all nodes with their kernels, arguments and dependencies
    (cuGraphDebugDotPrint). The tape writes its recorded calls, and which call reads what another one wrote.

    Args:
        fn: a compiled function or module, as for :func:`explain`.
        region: the name that its report gives the region, such as "CUDAGraph1".
        path: the file. One that this function wrote before is replaced.

    Raises:
        NotCompiledError: ``fn`` is not compiled with ``cudagraph_transform()``.
        OptionError: no region has this name, or it has no graph: call the function twice with the same inputs first.
        ForeignFileError: there is another file at ``path``.
        CudagraphError: cuda-bindings is not installed.
    """
    path = Path(path)
    refuse_foreign(path, MARK)
    programs = [located.program for located in locate(fn, "dump_dot").programs]
    names = [each.name for program in programs for each in program.regions]
    if region not in names:
        expected = f"one of {', '.join(map(repr, names))}" if names else "a region, and nothing is captured"
        raise OptionError("region", region, expected, "print(explain(fn)) has the names", "dump_dot")
    program = next(each for each in programs if region in [its.name for its in each.regions])
    graph = program.newest_graph(region)
    if graph is None:
        failure = next(each.failure for each in program.regions if each.name == region)
        steps = "the function" if program.kind == "forward" else "the function and its backward"
        fix = f"it runs eagerly: {failure}" if failure else f"call {steps} twice with the same inputs first"
        raise OptionError("region", region, "a region with a graph", fix, "dump_dot")
    with TemporaryDirectory() as folder:
        written = Path(folder, "graph.dot")
        graph.graph.write_dot(str(written))
        replace(path, f"{MARK} {region}\n{written.read_text(encoding='utf-8')}")
