"""``thunderfx`` with CUDA graphs, and without cuts that nothing needs.

Dynamo turns a function into FX graphs, and Thunder's splitter gives Inductor what Thunder does not support. It also
gives away each operator that Thunder calls as it is, a *fallback*, since Inductor might fuse it. Each cut costs more
than that: the pieces have graphs, memory and checks of their own. Here, fallbacks stay, unless Thunder traces them
wrongly.

Note [Fallbacks that Thunder traces wrongly]
    The backward of a fallback runs the operator again, under autograd, so one that draws would draw other numbers.
    Tensors in a list get no gradient. What a fallback writes is unknown to the trace. It runs without autocast. Some
    others have been found by comparing all fallbacks with PyTorch, values and gradients: tests/thunder/test_fallbacks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from thunder_cg.analysis import rules
from thunder_cg.analysis.rules import Reason
from thunder_cg.compat import thunder as compat
from thunder_cg.compat.torch import tree_leaves
from thunder_cg.options import Options
from thunder_cg.transform import cudagraph_transform

# Their gradients, or which results have one, are not PyTorch's.
_WRONG = frozenset({"lu_unpack", "native_layer_norm", "norm"})


def thunderfx(fn: Callable[..., Any], /, **options: Any) -> Any:
    """Compiles a module or function as ``thunder.dynamo.thunderfx`` does, with CUDA graphs and with fewer cuts.

    Operators that Thunder can trace stay in Thunder's trace, where Thunder's own ``thunderfx`` hands them to Inductor
    because Inductor might fuse them. So a model is mostly one graph forward and one backward.
    :func:`thunder_cg.explain` names each operator that Inductor got, and says why.

    Args:
        fn: a module or a function.
        options: those of :func:`cudagraph_transform`, of ``torch.compile`` (``dynamic``, ``fullgraph``, ``mode``,
            ``options``, ``disable``) and of ``thunder.jit`` (``executors``, ``transforms``, ...).

    Returns:
        What ``thunder.dynamo.thunderfx`` returns: a callable.

    Raises:
        OptionError: a value that an option cannot have.
        BackendError: the backend does not work on this machine.
    """
    from thunder_cg.compat import dynamo  # Dynamo takes long to import

    ours = {field.name: options.pop(field.name) for field in fields(Options) if field.name in options}
    for_dynamo = dynamo.get_torch_compile_kwargs(**options)
    for_thunder = {name: value for name, value in options.items() if name not in for_dynamo}
    transforms = [*for_thunder.pop("transforms", ()), cudagraph_transform(**ours)]

    class Compiler(dynamo.ThunderCompiler):
        """Splits a graph of Dynamo's with the fallbacks in Thunder's pieces."""

        def __call__(self, graph: torch.fx.GraphModule, *inputs: Any) -> Any:
            _drop_empty_parts(graph)
            with dynamo.keeping_fallbacks(partial(_objection, example=dynamo.example)):
                return super().__call__(graph, *inputs)

    backend = Compiler(transforms=transforms, **for_thunder)
    return dynamo.ThunderFXCompiledObject(backend, torch.compile(fn, backend=backend, **for_dynamo))


def _drop_empty_parts(module: torch.fx.GraphModule) -> None:
    """Takes empty vectors, which `torch.cat` skips whatever the other parts are, from its arguments.

    A cache of keys and values begins as one, and Thunder's `cat` wants all parts to have as many dimensions.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.cat):
        if not (node.args and isinstance(parts := node.args[0], (list, tuple))):
            continue
        kept = [part for part in parts if not _is_empty_vector(part)]
        if kept and len(kept) < len(parts):
            node.update_arg(0, kept)
            for part in set(parts) - set(kept):
                if not part.users and part.op == "call_function" and part.target is torch.tensor:
                    module.graph.erase_node(part)


def _is_empty_vector(part: torch.fx.Node) -> bool:
    return tuple(getattr(part.meta.get("example_value"), "shape", ())) == (0,)


def _objection(node: torch.fx.Node, function: Callable[..., Any], example: Callable[[Any], Any]) -> str | None:
    """Why a fallback is left to Inductor; None if Thunder traces it right. See the note."""
    symbol = compat.symbols_of_functions()[function]
    name = symbol.id.rsplit(".", 1)[-1]
    rule = rules.find(None, symbol.id)
    if rule is None or rule.cause.reason is Reason.SIDE_EFFECT or rule.writes or any(c.writes for c in rule.conditions):
        return "may write its inputs or other state, which Thunder's fallback for it does not say"
    args, kwargs = example(node.args), example(node.kwargs)
    if any(_requires_grad(leaf) for leaf in tree_leaves((args, kwargs))):
        if name in _WRONG:
            return "gets other gradients from Thunder's fallback for it than PyTorch's"
        if rule.draws or any(condition.draws for condition in rule.conditions):
            return "draws, and Thunder's fallback for it draws again in its backward"
        if any(_requires_grad(leaf) for arg in args if isinstance(arg, (list, tuple)) for leaf in tree_leaves(arg)):
            return "takes a list of tensors, whose gradients Thunder's fallback for it loses"
    if _dtypes(node.meta.get("example_value")) != _dtypes_without_autocast(function, args, kwargs):
        return "has another dtype under autocast, which Thunder's fallback for it does not see"
    return None


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _dtypes(results: Any) -> list[torch.dtype] | None:
    return [leaf.dtype for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _dtypes_without_autocast(function: Callable[..., Any], args: Any, kwargs: Any) -> list[torch.dtype] | None:
    return _dtypes(compat.no_autocast(function)(*args, **kwargs))
