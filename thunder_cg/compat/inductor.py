"""A graph as Inductor compiles it, its forward and its backward each by itself. Checked with torch 2.11.

Imported where it is used only, since Inductor takes long to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch import config
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.lowering import fallbacks
from torch.fx import GraphModule
from torch.fx.node import _side_effectful_functions

from thunder_cg.compat.fx import is_of_unknown_size
from thunder_cg.errors import Skipped

__all__ = ["RETURNS_VIEW", "OneWay", "StaysApart", "compile_each_way", "draws", "is_called_as_it_is", "name_of_kernel"]

# Both ways are compiled at once, and the backward does not write to what the forward has saved.
_SETTINGS = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True, "donated_buffer": False}
_OWN_MEMORY = (OutputType.non_alias, OutputType.unsafe_view_alias)
RETURNS_VIEW = "it returns a view of what it gets, or two results in one memory", "return x.clone() for the view x"
_WAITS = frozenset({torch.Tag.data_dependent_output, torch.Tag.cudagraph_unsafe})


class OneWay(NamedTuple):
    """The forward or the backward of a graph.

    Attributes:
        run: computes the results of a list of tensors and sizes, which it empties.
        inputs: fake tensors with the strides that ``run`` takes, and sizes. In a backward, sizes come first.
        results: fake tensors, and sizes. In a forward, sizes come last, and tensors share storages with its inputs and
            each other as real ones may.
        functions: what it is made of, before Inductor fuses it.
    """

    run: Callable[[list[torch.Tensor]], Sequence[Any]]
    inputs: Sequence[Any]
    results: Sequence[Any]
    functions: frozenset[Any]


class StaysApart(Skipped):
    """A piece of a graph is no operator of a trace."""


def compile_each_way(
    module: GraphModule, inputs: Sequence[Any], is_refused: Callable[[Any], bool]
) -> tuple[OneWay, OneWay | None, list[int]]:
    """Compiles a graph that takes fake tensors and sizes, and returns a tuple of fake tensors.

    Args:
        is_refused: whether the caller refuses a function that the graph calls, as PyTorch has written it out.

    Returns:
        The forward, which also returns what the backward gets first; the backward, if there is one; the positions of
        the results whose gradients it gets.

    Raises:
        StaysApart: a function is refused, or an input is written or returned.
    """
    ways: list[OneWay] = []

    def compile_one_way(graph: GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        places, (output,) = (graph.graph.find_nodes(op=op) for op in ("placeholder", "output"))
        results = [None if node is None else node.meta["val"] for node in output.args[0]]
        calls = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
        functions = dict.fromkeys(node.target for node in calls)
        if options.get("cudagraphs"):
            raise StaysApart("torch._inductor.config has Inductor make CUDA graphs", "leave that to thunder_cg")
        for node in calls:  # an index of integers, which has the tag `dynamic_output_shape`, too, has a known size
            if is_of_unknown_size(node.meta.get("val")):
                raise StaysApart(f"the size of what {_written(node.target)} returns depends on what tensors hold")
        for function in filter(is_refused, functions):
            raise StaysApart(f"a CUDA graph may be unable to hold {_written(function)}")
        taken = [*examples] if ways else [node.meta["val"] for node in places]
        compiled = compile_fx_inner(graph, examples, **options)
        ways.append(OneWay(compiled, taken, results, frozenset(functions)))
        return compiled

    with config.patch({name: value for name, value in _SETTINGS.items() if hasattr(config, name)}):
        compile_fx(module, [*inputs], inner_compile=compile_one_way)
    facts = TracingContext.get().fw_metadata
    if facts is None or len(ways) != 1 + facts.is_train:
        raise StaysApart("PyTorch compiles it otherwise than as one forward and one backward")
    if facts.tokens or facts.num_graphsafe_rng_states:
        raise StaysApart("it has effects or states of generators that PyTorch passes around Inductor's code")
    if any(each.mutates_data or each.mutates_metadata for each in facts.input_info):
        raise StaysApart("it writes in place to what it gets", "compute a new tensor")
    if any(each.output_type not in _OWN_MEMORY for each in facts.output_info):
        raise StaysApart(*RETURNS_VIEW)
    forward, *backward = ways
    results = len(facts.output_info)
    differentiated = [i for i, each in enumerate(facts.output_info) if each.requires_grad and facts.is_train]
    taken = len(forward.results) - results + len(differentiated)
    shapes = [(len(way.inputs), len(way.results)) for way in backward]
    if len(forward.inputs) != len(inputs) or shapes != [(taken, len(inputs))] * len(backward):
        raise StaysApart("it gets the same tensor twice", "pass it once")
    return forward, next(iter(backward), None), differentiated


def _written(function: Any) -> str:
    """How to call a function of a graph: "aten.nonzero"."""
    return str(getattr(function, "_overloadpacket", function))


def name_of_kernel(function: Any) -> str | None:
    """The name of an operator of PyTorch's own that only computes, and that nothing on the host waits for.

    If it makes tensors of unknown sizes, the host waits for these.
    """
    if not isinstance(function, torch._ops.OpOverload) or function.namespace not in ("aten", "prims"):
        return None
    return None if function in _side_effectful_functions or _WAITS & {*function.tags} else function._opname


def is_called_as_it_is(function: Any) -> bool:
    """Whether Inductor calls the operator, and has no code for it."""
    return function in fallbacks


def draws(function: Any) -> bool:
    """Whether it is an operator that draws from a generator."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    is_inductors = function.namespace == "prims" and function._opname.startswith("inductor_")
    return is_inductors or torch.Tag.nondeterministic_seeded in function.tags
