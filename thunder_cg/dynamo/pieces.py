"""Pieces of Inductor's inside of Thunder's traces.

What Thunder cannot trace, Inductor compiles. If that is a function of tensors and sizes alone, and a graph can hold its
kernels, it is one operator of the trace around it, and its backward is another. So a call remains one graph each way.
The values are those of the piece by itself: Inductor compiles the same forward and the same backward. Where sizes are
symbols, it compiles them once. Thunder traces anew for each size, and each of its traces has operators for its sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from thunder_cg.analysis import rules
from thunder_cg.analysis.sources import called_from, described, user_frames
from thunder_cg.compat.fx import (
    APART,
    JOINED,
    SeenNode,
    at_sizes,
    example,
    is_of_unknown_size,
    is_read_number,
    modes_of,
    operator_name,
    sizes_beside,
    sizes_of,
)
from thunder_cg.compat.inductor import (
    RETURNS_VIEW,
    OneWay,
    StaysApart,
    compile_each_way,
    draws,
    is_called_as_it_is,
    name_of_kernel,
)
from thunder_cg.compat.splitter import fake_arguments, for_splitter
from thunder_cg.compat.tensors import (
    autograd_base,
    has_storage,
    is_cpu_scalar,
    is_inexact,
    is_wrapper,
    shares_storage,
    tree_leaves,
)
from thunder_cg.compat.thunder import call_untraced, outside_of_autograd, symbol_of_function, with_derivative
from thunder_cg.dynamo.layouts import is_refused_lstm
from thunder_cg.dynamo.operators import executor, in_layout
from thunder_cg.dynamo.writes import replaces_memory, requires_grad, shares_memory, written_by
from thunder_cg.errors import SkipReason

_numbers = count()
_SYMBOLIC = SkipReason(
    'with cache="symbolic values", a trace is for several sizes, and such an operator for one', "leave it out"
)
_ALONE = SkipReason("Thunder traces nothing around it")


def join_pieces(parts: dict[Node, int], of_thunder: frozenset[int], *, is_symbolic: bool = False) -> dict[Node, int]:
    """Replaces pieces of Inductor's in a graph by operators that Thunder traces. Notes on the nodes of the others why.

    Args:
        parts: the number of the part that each call of the graph is in, in the order of the graph.
        of_thunder: those that Thunder compiles.
        is_symbolic: one trace of Thunder's is for several sizes.

    Returns:
        The same for the graph as it is then.
    """
    parts = parts if is_symbolic else _read_where_used(parts, of_thunder)
    for_all = _SYMBOLIC if is_symbolic else None if of_thunder else _ALONE
    is_thunders: dict[Node, bool] = {}
    for number, group in groupby([*parts], parts.__getitem__):
        nodes, is_kept = [*group], number in of_thunder
        if not is_kept:
            try:
                nodes, is_kept = _replace(nodes, *_as_operator(nodes, for_all)), True
            except StaysApart as reason:
                _note(nodes, str(reason))
        is_thunders.update(dict.fromkeys(nodes, is_kept))
    joined: dict[Node, int] = {}
    for _, group in groupby([*is_thunders], is_thunders.__getitem__):
        nodes = [*group]
        joined.update(dict.fromkeys(nodes, next(parts[node] for node in nodes if node in parts)))
    return joined


def _read_where_used(parts: dict[Node, int], of_thunder: frozenset[int]) -> dict[Node, int]:
    """In training, has each piece of Inductor's read the numbers from tensors that it takes from another part.

    Inductor (2.11) differentiates no piece that takes a float of which nothing is known, nor does Thunder differentiate
    a part that returns a number. Where the graph writes in place, a later read may find another number.
    """
    made = [example(node) for node in parts]
    trains = any(requires_grad(leaf) for leaf in tree_leaves(made))
    if not trains or any(map(written_by, parts)) or any(map(is_of_unknown_size, made)):  # another read, another size
        return parts
    part_of: dict[Node, int] = {}
    copies: dict[tuple[Node, int], Node] = {}

    def copied(number: Node, part: int) -> Node:
        if not is_read_number(example(number)) or parts.get(number, part) == part:
            return number
        if (number, part) not in copies:
            copies[number, part] = number.graph.node_copy(number, lambda each: copied(each, part))
            part_of[copies[number, part]] = part
        return copies[number, part]

    for node, part in parts.items():
        for number in node.all_input_nodes if part not in of_thunder else ():
            with node.graph.inserting_before(node):
                node.replace_input_with(number, copied(number, part))
        part_of[node] = part
    for number in dict.fromkeys(number for number, _ in reversed(copies)):
        if not number.users:
            del part_of[number]
            number.graph.erase_node(number)
    return part_of


def _as_operator(
    nodes: Sequence[Node], for_all: SkipReason | None
) -> tuple[Callable[..., Any], list[Node], list[Node]]:
    """What computes the results of a piece from its inputs, these inputs and these results.

    Args:
        for_all: why no piece of the graph is an operator, if there is a reason.

    Raises:
        StaysApart: the piece is none.
    """
    if for_all is not None:
        raise StaysApart(*for_all)
    inside = {*nodes}
    inputs = [*dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in inside)]
    results = [node for node in nodes if not inside.issuperset(node.users)]
    if (sizes := sizes_beside(inputs, nodes)) is None:
        raise StaysApart("it has sizes that depend on what tensors hold, or that the graph does not get")
    inputs += sizes
    if (modes := modes_of(nodes)) is None:
        raise StaysApart("one part of it is under torch.no_grad or torch.autocast, another is not", "put all there")
    taken = [each for each in inputs if not isinstance(example(each), torch.SymInt) or is_read_number(example(each))]
    for reason in _problems(nodes, taken, results):
        raise StaysApart(*reason)
    piece = _graph_of(nodes, inputs, results)
    try:
        with modes:
            compiled = compile_each_way(piece, fake_arguments(piece), _is_refused)
    except StaysApart:
        raise
    except Exception as error:  # as where it reads on the host what a tensor holds: the splitter finds out and says so
        raise StaysApart(f"PyTorch does not compile it by itself: {described(error)}") from error
    return _in_trace(*compiled, len(results)), inputs, results


def _problems(nodes: Sequence[Node], taken: Sequence[Node], results: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """What an operator of a trace cannot do that the nodes do, and the fix.

    Args:
        taken: what they take, but for sizes.
    """
    if any(map(replaces_memory, nodes)):
        yield "it gives a tensor other memory, which no graph has", "write x.data.copy_(y) for x.data = y"
    if not results:
        yield "nothing in the graph takes what it computes", ""
    for node in taken:
        if (reason := _problem_with(node)) is not None:
            line = called_from(user_frames(node.stack_trace)) if node.op.startswith("call") else None
            yield f"it takes {_named(node)}{f' at {line}' if line else ''}, {reason.problem}", reason.fix
    for node in results:
        if (reason := _problem_with(node)) is not None:
            yield f"it returns {_named(node)}, {reason.problem}", reason.fix
    values, made = [*map(example, taken)], [*map(example, results)]
    if len(devices := sorted({str(value.device) for value in (*values, *made)})) > 1:
        yield f"its tensors are on {' and '.join(devices)}", "move them to one device before"
    for node, value in zip(results, made):  # see Note [Gradients of CPU scalars] in analysis/gradients.py
        if is_cpu_scalar(value):
            yield f"it returns {_named(node)}, a 0-dim tensor on the CPU", "give it a dimension, or use a GPU"
    if any(map(is_refused_lstm, nodes)):
        yield "Inductor trains no LSTM on a CPU whose input has no gradient", "use a GPU"
    if any(shares_memory([*values, *made[:i]], value) for i, value in enumerate(made)):
        yield RETURNS_VIEW


def _note(nodes: Iterable[Node], reason: str) -> None:
    """Notes on nodes, and on those of functions that they call, such as checkpointed ones, why they are apart."""
    for node in nodes:
        node.meta[APART] = reason
        for each in (each for each in node.all_input_nodes if each.op == "get_attr"):
            called = getattr(each.graph.owning_module, str(each.target), None)
            _note(called.graph.nodes if isinstance(called, GraphModule) else (), reason)


def _problem_with(node: Node) -> SkipReason | None:
    """Why an operator cannot take or return the value of a node: its sizes and strides have to be known where Thunder
    compiles for the sizes of the inputs."""
    value = example(node)
    if node.op == "get_attr":
        return SkipReason("which Dynamo's graph holds itself, as it does a checkpointed function")
    if not isinstance(value, torch.Tensor):
        return SkipReason("which is no tensor", "keep it in a tensor" if is_read_number(value) else "")
    if not has_storage(value) or is_wrapper(value):
        return SkipReason("a tensor that has no memory of its own, such as a sparse one or a DTensor")
    return SkipReason("whose size depends on what tensors hold") if is_of_unknown_size(value) else None


def _named(node: Node) -> str:
    """How to call what a node returns."""
    if node.op == "get_attr":
        return str(node.target)
    return f"what {operator_name(node) or 'an operator'} returns" if node.op.startswith("call") else "an argument"


def _graph_of(nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = [copies[node] for node in results]
    for i, node in enumerate(results):
        if autograd_base(example(node)) is not None:  # of what is in the piece: it would return that, too
            returned[i] = graph.call_method("clone", (returned[i],))
    graph.output((*returned,))
    return GraphModule(torch.nn.Module(), graph)


def _replace(
    nodes: Sequence[Node], function: Callable[..., Any], inputs: Sequence[Node], results: Sequence[Node]
) -> list[Node]:
    """Calls the function in the place of the nodes. Returns the new nodes."""
    graph = nodes[0].graph
    with graph.inserting_before(nodes[-1]):  # an input of the graph may come late
        call = graph.call_function(function, (*inputs,))
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(results))]
    call.meta.update(results[0].meta, example_value=(*map(example, results),))
    call.meta[JOINED] = {node.name: SeenNode.of(node) for node in nodes}  # for reports
    for result, item in zip(results, items):
        item.meta.update(result.meta)
        result.replace_all_uses_with(item)
    for node in reversed(nodes):
        graph.erase_node(node)
    return [call, *items]


def _is_refused(function: Any) -> bool:
    """Whether a graph may be unable to hold what an operator of PyTorch's does, which Inductor compiles."""
    if function is operator.getitem:
        return False
    if (name := name_of_kernel(function)) is None:
        return True
    if (rule := rules.find("torch", name)) is None:
        return is_called_as_it_is(function)
    return not rule.captures or any(each.cause is not None for each in rule.conditions)


def _in_trace(forward: OneWay, backward: OneWay | None, with_gradient: Sequence[int], results: int) -> Any:
    """A function that Thunder's splitter takes for one of Thunder's, and that is two operators in each of its traces.

    What the backward gets of the memory of an argument or a result, it makes of that.
    """
    tensors_at = [i for i, value in enumerate(forward.inputs) if isinstance(value, torch.Tensor)]
    places = [*(forward.inputs[i] for i in tensors_at), *forward.results[:results]]
    for_backward = [value for value in forward.results[results:] if isinstance(value, torch.Tensor)]
    saved: list[tuple[int, Any]] = []  # where the backward finds each, and what it has the memory of
    returned = [*range(results)]
    for i, value in enumerate(for_backward, results):
        base = next((j for j, place in enumerate(places) if _shows_part_of(place, value)), None)
        if base is None:
            saved.append((len(tensors_at) + len(returned), None))
            returned.append(i)
        else:
            saved.append((base, places[base]))
    viewed = [(base, value) for (_, base), value in zip(saved, for_backward)]

    def operators_for(*args: Any) -> tuple[Any, Any]:
        sizes = sizes_of(forward.inputs, args)
        differentiate = _symbol("_backward", backward, sizes, tensors_at, viewed) if backward is not None else None
        return _symbol("", forward, sizes, returned), differentiate

    def call(*args: Any) -> Any:
        compute, differentiate = call_untraced(operators_for, *args)

        def run_forward(*tensors: Any) -> Any:
            values = (*tensors, *compute(*tensors))
            made = values[len(tensors) :][:results]
            return made, tuple(values[place] for place, _ in saved)

        def run_backward(*given: Any) -> Any:
            gradients, values = given[:results], given[results:]
            if differentiate is None:
                return (None,) * len(tensors_at)
            return differentiate(*values, *(gradients[i] for i in with_gradient))

        return with_derivative(run_forward, run_backward, *(args[i] for i in tensors_at))

    return for_splitter(call, "inductor_piece")


def _shows_part_of(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether strides alone make the view of a tensor. The conjugate of complex numbers, a view, is other numbers."""
    kinds = [(each.dtype, each.is_conj(), each.is_neg()) for each in (base, view)]
    return kinds[0] == kinds[1] and shares_storage([base], view)


def _symbol(
    kind: str, way: OneWay, sizes: Any, returned: Sequence[int], viewed: Sequence[tuple[Any, torch.Tensor]] = ()
) -> Any:
    def like(value: torch.Tensor | None, tracked: bool) -> torch.Tensor | None:
        if value is None:
            return None
        has_gradient = tracked and is_inexact(value)
        shape = at_sizes(value.shape, sizes)
        return torch.empty(shape, dtype=value.dtype, device=value.device, requires_grad=has_gradient)

    def made(*tensors: torch.Tensor) -> Any:
        tracked = any(tensor.requires_grad for tensor in tensors)
        return tuple(like(way.results[i], tracked) for i in returned)

    suffix = "_draws" if any(map(draws, way.functions)) else ""
    name, run = f"piece{kind}{suffix}", _runs(way, sizes, returned, viewed)
    return symbol_of_function(executor, name, f"inductor_{name}{next(_numbers)}", outside_of_autograd(run), made)


def _runs(
    way: OneWay, sizes: Any, returned: Sequence[int], viewed: Sequence[tuple[Any, torch.Tensor]]
) -> Callable[..., Any]:
    """Calls what Inductor has compiled, with tensors laid out as it takes them. What it returns is in new memory.

    Args:
        sizes: what the symbols are in the sizes of what it takes.
        returned: the positions of the results.
        viewed: for the first tensors, what has the memory of each, if the trace gives that, and the view of it.
    """
    views = iter(viewed)
    laid_out = [
        _number_or_layout(value, sizes, *(next(views, (None, None)) if isinstance(value, torch.Tensor) else ()))
        for value in way.inputs
    ]

    def run(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        given = [each(next(rest)) if callable(each) else each for each in laid_out]
        seen, found = [*given], []
        results = way.run(given)
        for i in returned:
            result = results[i]
            if result is not None:
                result = result.clone() if shares_storage(seen, result) else result
                seen.append(result)
            found.append(result)
        return tuple(found)

    return run


def _number_or_layout(value: Any, sizes: Any, base: Any = None, view: Any = None) -> Any:
    """A number that Inductor's code takes, or what lays out a tensor for it."""
    if not isinstance(value, torch.Tensor):
        return at_sizes([value], sizes)[0]
    stride = at_sizes((value if base is None else base).stride(), sizes)
    if base is None:
        return lambda tensor: in_layout(tensor, stride)
    size, steps = at_sizes(view.size(), sizes), at_sizes(view.stride(), sizes)
    start, before = at_sizes([view.storage_offset(), base.storage_offset()], sizes)

    def viewed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = in_layout(tensor, stride)
        return tensor.as_strided(size, steps, tensor.storage_offset() + start - before)

    return viewed
