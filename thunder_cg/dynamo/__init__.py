"""``thunderfx`` with CUDA graphs, and without cuts that nothing needs.

What comes in: a function or module of the user's. Dynamo turns it into FX graphs, and Thunder's splitter gives Inductor
what Thunder does not support. It also gives away each operator that Thunder only calls as it is, a *fallback*, since
Inductor might fuse it. Each cut costs more than that: the pieces have graphs, memory and checks of their own. What goes
out: the same, with as few cuts as possible. A compiled function owns all that is made for it; nothing else changes.

- ``compiler``: what Dynamo gets as a backend.
- ``fallbacks``: which fallbacks are left to Inductor nevertheless, and why.
- ``pieces``: what Inductor gets, as operators of Thunder's traces.
- ``rewrites``: what is written differently in a graph of Dynamo's, so that Thunder can trace it: ``in_place`` what is
  written in place, ``constants`` what is known by then, ``calls`` names and arguments of operators, ``own_symbols``
  where a symbol of this package's is called, ``autograd_functions`` those of the user's. ``nodes`` changes a node.
- ``numbers``: Python numbers that a graph returns, and that need no Thunder, and those that it can take as tensors.
- ``writes``: what a graph writes in place, and where the order of writes and reads counts.
- ``layouts``: the strides that Dynamo saw, where they count.
- ``operators``: operators of PyTorch that Thunder has no symbol for, or one that takes fewer arguments.

Only `thunderfx` is imported before it is called: Dynamo takes long to import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def thunderfx(fn: Callable[..., Any], /, **options: Any) -> Any:
    """Compiles a function or module as ``thunder.dynamo.thunderfx`` does, with CUDA graphs, and with fewer cuts.

    Operators that Thunder can trace stay in Thunder's traces, where Thunder's own ``thunderfx`` gives them to Inductor,
    which might fuse them. So a model is mostly one graph forward and one backward. :func:`thunder_cg.explain` names
    each operator that Inductor got, and says why.

    A call of a logger, such as ``logger.warning("...")``, ends a graph of Dynamo's. Here it does not if its arguments
    are constants and none is a keyword: the call is made after the graph, each time, and says the same.

    Args:
        fn: a function or module.
        options: those of :func:`cudagraph_transform`, of ``torch.compile`` (``dynamic``, ``fullgraph``, ``disable``)
            and of ``thunder.jit`` (``executors``, ``transforms``, ...). ``mode`` and ``options`` raise: they are
            Inductor's.

    Returns:
        What ``thunder.dynamo.thunderfx`` returns: a callable.

    Raises:
        OptionError: a value that an option cannot have, a name that is like that of an option, or ``fn`` is compiled.
        BackendError: the backend does not work on this machine.
    """
    from thunder_cg.dynamo import compiler

    return compiler.thunderfx(fn, **options)
