"""``release()``: gives back the memory of the graphs of a compiled function."""

from __future__ import annotations

from typing import Any

from thunder_cg.report.programs import locate
from thunder_cg.step import GraphedStep


def release(fn: Any) -> None:
    """Gives the memory of all graphs of ``fn`` back to the device at once: recordings, arenas, pools and workspaces.

    What Thunder has compiled stays. The next call warms up, and a later one captures anew. A call in flight, such as a
    forward that awaits its backward, keeps what it holds until it ends. An arena that another function of the same
    transform uses as well stays as large as it is.

    PyTorch frees the workspaces of cuBLAS of all streams or none. So they are freed with the last arena of the process,
    unless it has CUDA graphs of somebody else, or memory in a private pool of theirs. Until then, the next arena uses
    them.

    Args:
        fn: what ``thunder.jit``, ``thunder.compile``, ``thunderfx`` or :func:`graphed_step` returned. The modules in a
            graphed step have graphs of their own: release them, too.

    Raises:
        NotCompiledError: ``fn`` is something else, or was compiled without ``cudagraph_transform()``.
    """
    if isinstance(fn, GraphedStep):
        fn.release()
        return
    programs = [located.program for located in locate(fn, "release").programs]
    for program in programs:
        program.release()
    for backend in {program.backend.name: program.backend for program in programs}.values():
        backend.give_back()
