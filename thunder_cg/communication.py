"""Collectives of ``torch.distributed`` as symbols of a trace, which begin them and wait for them.

Thunder traces three of them: it waits for them at once, and makes a default group anew each time or fails without one.
Of the functional ones it traces one. The symbols here belong to an executor of this package, and their results are
futures, like those of Thunder's own parallelism: `analysis/collectives.py` moves them and the waits.

Note [Collectives in place]
    PyTorch's collectives write a tensor. In a trace, they make a new one and copy it, since Thunder's passes know
    copies in place. ``async_op=True`` gives a handle whose ``wait`` does nothing: who reads the tensor comes after the
    copy, and the copy after the wait.

Note [Gradients of collectives]
    They are eager PyTorch's. A functional collective has the gradient that PyTorch registers, if it sums over ranks. A
    collective that writes a tensor has none: PyTorch only warns, or loses it silently. `analysis/gradients.py` raises
    where a tensor comes with a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import distributed as dist

from thunder_cg.compat import containers, distributed, thunder as compat
from thunder_cg.errors import CollectiveError

__all__ = ["functional", "install"]

_executor = compat.register_executor(compat.OperatorExecutor("collectives"))
_COALESCED = ("all_gather_into_tensor_coalesced", "all_reduce_coalesced", "reduce_scatter_tensor_coalesced")
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

# What runs. Each returns what stands for a future in Thunder: the work, and the tensor that it fills.

_Begun = tuple[Any, torch.Tensor]


def _all_reduce(x: torch.Tensor, op: str, group: dist.ProcessGroup) -> _Begun:
    result = x.clone(memory_format=torch.contiguous_format)
    return dist.all_reduce(result, getattr(dist.ReduceOp, op.upper()), group, async_op=True), result


def _broadcast(x: torch.Tensor, source: int, group: dist.ProcessGroup) -> _Begun:
    result = x.clone(memory_format=torch.contiguous_format)
    return dist.broadcast(result, group=group, group_src=source, async_op=True), result


def _all_gather(x: torch.Tensor, shape: Sequence[int], group: dist.ProcessGroup) -> _Begun:
    result = x.new_empty(shape)
    return dist.all_gather_into_tensor(result, x.contiguous(), group, async_op=True), result


def _reduce_scatter(x: torch.Tensor, shape: Sequence[int], op: str, group: dist.ProcessGroup) -> _Begun:
    result = x.new_empty(shape)
    reduction = getattr(dist.ReduceOp, op.upper())
    return dist.reduce_scatter_tensor(result, x.contiguous(), reduction, group, async_op=True), result


def _all_to_all(
    x: torch.Tensor, shape: Sequence[int], received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> _Begun:
    result = x.new_empty(shape)
    return dist.all_to_all_single(result, x.contiguous(), [*received], [*sent], group, async_op=True), result


def _wait(begun: _Begun) -> torch.Tensor:
    work, tensor = begun
    work.wait()
    return tensor


# The same in a trace. All are waited for where they begin.


def _registered(function: Callable[..., Any], meta: Callable[..., Any]) -> Any:
    """A symbol that stays where nothing in the trace uses its result: other ranks take part for theirs."""
    name = f"collectives{function.__name__}"
    return _executor.register_operator(name, meta=meta, fn=function, tags=[compat.OpTags.DONT_DCE])


def _sizes(tensor: Any) -> tuple[int, ...]:
    sizes = compat.proxy_shape(tensor)
    if not all(isinstance(size, int) for size in sizes):
        problem = "it takes a tensor with a size that is known only at run time"
        raise CollectiveError("collective", problem, "compile with Thunder's default cache mode")
    return (*sizes,)


_waited = _registered(_wait, lambda future: compat.TensorProxy(like=future))


def _collective(
    begins: Callable[..., _Begun],
    backward: Callable[..., Any] | None = None,
    sums: Callable[..., bool] = lambda *args: True,
) -> Callable[..., Any]:
    """A collective in a trace, as a function of a tensor, of what ``begins`` takes, and of ``has_gradient``.

    Args:
        backward: of the gradient that comes in, the sizes of the tensor, and the other arguments; None for no gradient.
        sums: whether PyTorch has the gradient for these other arguments.
    """
    name = begins.__name__.removeprefix("_")

    def future(x: Any, *args: Any) -> Any:
        return compat.FutureTensorProxy(like=x, shape=args[0] if isinstance(args[0], tuple) else _sizes(x))

    def forward(x: Any, *args: Any) -> Any:
        return _waited(begin(x, *args))

    def forward_without_gradient(x: Any, *args: Any) -> Any:
        if not compat.is_ours(compat.get_compile_data()):  # which tells whether a gradient gets lost
            raise CollectiveError(name, *compat.LOST_GRADIENT)
        return forward(x, *args), ()

    begin = _registered(begins, future)
    without = compat.Symbol(name, meta=forward, id=f"{name}{compat.WITHOUT_GRADIENT}")
    compat.augmented_forward_impls[without.id] = forward_without_gradient
    compat.backward_impls[without.id] = lambda gradient: (None,)
    if backward is None:
        return lambda x, *args, has_gradient=False: without(x, *args)
    with_it = compat.Symbol(name, meta=forward, id=f"{name}_with_gradient")
    compat.augmented_forward_impls[with_it.id] = lambda x, *args: (forward(x, *args), (_sizes(x), *args))
    compat.backward_impls[with_it.id] = lambda *saved: backward(saved[-1], *saved[:-1])
    return lambda x, *args, has_gradient=False: (with_it if has_gradient and sums(*args) else without)(x, *args)


def _is_sum(*args: Any) -> bool:
    return "sum" in args


_sent: Callable[..., Any] = _collective(_broadcast)
_reduced: Callable[..., Any] = _collective(
    _all_reduce, lambda gradient, sizes, op, group: _reduced(gradient, op, group), _is_sum
)
_gathered: Callable[..., Any] = _collective(
    _all_gather, lambda gradient, sizes, shape, group: _scattered(gradient, sizes, "sum", group)
)
_scattered: Callable[..., Any] = _collective(
    _reduce_scatter, lambda gradient, sizes, shape, op, group: _gathered(gradient, sizes, group), _is_sum
)
_exchanged: Callable[..., Any] = _collective(
    _all_to_all,
    lambda gradient, sizes, shape, received, sent, group: _exchanged(gradient, sizes, sent, received, group),
)


# Those that write a tensor, as torch.distributed has them.


@dataclass(eq=False)
class TracedWork:
    """What ``async_op=True`` gives in a trace: see Note [Collectives in place]. Thunder returns dataclasses, too."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if hasattr(dist.Work, name):
            raise CollectiveError("async_op=True", f"its handle has no {name} in a trace", "call wait()")
        raise AttributeError(name)


def _write(target: Any, value: Any, async_op: bool) -> TracedWork | None:
    compat.symbols_of_functions()[torch.Tensor.copy_](target, value)
    return TracedWork() if async_op else None


def _member(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, the default one for None; None if this rank is not in it."""
    group = group if group is not None else dist.group.WORLD
    is_member = isinstance(group, dist.ProcessGroup) or dist.get_rank(group) >= 0  # which raises if it is destroyed
    return _checked(group) if is_member else None


def _checked(group: Any) -> Any:
    """The group. Thunder compiles anew once it has been destroyed."""
    containers.check_group_of_collective(group)
    return group


def _named(op: Any, function: str) -> str:
    for name in _REDUCTIONS:
        if op == getattr(dist.ReduceOp, name.upper()):
            return name
    raise CollectiveError(function, f"{op} is not traced", f"use one of {', '.join(map(str.upper, _REDUCTIONS))}")


def _check(function: str, whole: Any, part: Any, ranks: int) -> None:
    """Raises unless both have one dtype, and ``whole`` has a part for each rank."""
    sizes = [_sizes(whole), _sizes(part)]
    if whole.dtype != part.dtype or math.prod(sizes[0]) != ranks * math.prod(sizes[1]):
        problem = f"tensors of {whole.dtype} {sizes[0]} and {part.dtype} {sizes[1]} do not fit {ranks} ranks"
        raise CollectiveError(function, problem, f"give one dtype, and one {ranks} times the elements of the other")


def all_reduce(
    tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> TracedWork | None:
    if (group := _member(group)) is None:
        return None
    is_thunders = not async_op and op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    if is_thunders and not compat.get_compile_data().is_grad_enabled:  # it needs no copy, and knows no gradient
        compat.symbols_of_functions()[dist.all_reduce](tensor, op, group)
        return None
    return _write(tensor, _reduced(tensor, _named(op, "all_reduce"), group), async_op)


def broadcast(
    tensor: Any, src: int | None = None, group: Any = None, async_op: bool = False, group_src: int | None = None
) -> TracedWork | None:
    if (group := _member(group)) is None:
        return None
    if (src is None) == (group_src is None):
        raise CollectiveError("broadcast", f"src={src} and group_src={group_src} are given", "give one of them")
    source = group_src if src is None else dist.get_group_rank(group, src)
    return _write(tensor, _sent(tensor, source, group), async_op)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
) -> TracedWork | None:
    if (group := _member(group)) is None:
        return None
    _check("all_gather_into_tensor", output_tensor, input_tensor, group.size())
    return _write(output_tensor, _gathered(input_tensor, _sizes(output_tensor), group), async_op)


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> TracedWork | None:
    if (group := _member(group)) is None:
        return None
    _check("reduce_scatter_tensor", input, output, group.size())
    named = _named(op, "reduce_scatter_tensor")
    return _write(output, _scattered(input, _sizes(output), named, group), async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> TracedWork | None:
    if (group := _member(group)) is None:
        return None
    splits = [_splits(each) for each in (output_split_sizes, input_split_sizes)]
    if output.dtype != input.dtype:
        problem = f"it takes tensors of {output.dtype} and {input.dtype}"
        raise CollectiveError("all_to_all_single", problem, "give tensors of one dtype")
    return _write(output, _exchanged(input, _sizes(output), *splits, group), async_op)


def _splits(sizes: Any) -> tuple[int, ...]:
    """Nothing for equal ones."""
    if all(isinstance(size, int) for size in sizes or ()):
        return (*(sizes or ()),)
    fix = "pass ints, or call it outside of the compiled function"
    raise CollectiveError("all_to_all_single", "its split sizes are known only at run time", fix)


# Functional ones, as the operators behind torch.distributed._functional_collectives. They return a new tensor.


def _with_rows(x: Any, rows: int) -> tuple[int, ...]:
    return (rows, *_sizes(x)[1:])


def _functional_all_to_all(x: Any, received: Any, sent: Any, group: Any, **gradient: bool) -> Any:
    splits = [_splits(each) for each in (received, sent)]
    return _exchanged(x, _with_rows(x, sum(splits[0])), *splits, group, **gradient)


# Functions of the operator's arguments, with the group in the place of its name, which is the last one.
_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "all_gather_into_tensor": lambda x, ranks, group, **gradient: _gathered(
        x, _with_rows(x, ranks * _sizes(x)[0]), group, **gradient
    ),
    "all_reduce": lambda x, op, group, **gradient: _reduced(x, op.lower(), group, **gradient),
    "all_to_all_single": _functional_all_to_all,
    "broadcast": _sent,
    "reduce_scatter_tensor": lambda x, op, ranks, group, **gradient: _scattered(
        x, _with_rows(x, _sizes(x)[0] // ranks), op.lower(), group, **gradient
    ),
}


@cache
def functional() -> dict[Any, Callable[..., Any]]:
    """For each functional collective of PyTorch, the function in a trace. It has waited, so no wait has to follow.

    Outside of a trace, it does what the operator does, and waits.
    """
    return {
        operator: _callable(operator, partial(in_trace, has_gradient=has_gradient))
        for name, in_trace in _FUNCTIONAL.items()
        for operator, has_gradient in distributed.functional_collectives(name)
    }


def _callable(operator: Any, in_trace: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if compat.current_trace() is None:
            return distributed.wait_tensor(operator(*args))
        return in_trace(*args[:-1], _checked(distributed.group_named(args[-1])))

    compat.trace_as(call, call)  # Thunder calls it as it is
    return call


# What Thunder's tracer calls in the place of PyTorch's functions.

_TRACED = (all_gather_into_tensor, all_reduce, all_to_all_single, broadcast, reduce_scatter_tensor)
_IN_PLACE: dict[Any, Callable[..., Any]] = {getattr(dist, each.__name__): each for each in _TRACED}
# What Thunder cannot trace, and what to call in its place.
_INSTEAD: dict[Any, str] = {
    dist.all_gather: "all_gather_into_tensor",
    dist.all_to_all: "all_to_all_single",
    dist.reduce: "all_reduce",
    dist.reduce_scatter: "reduce_scatter_tensor",
}
_UNTRACED = (
    *(dist.all_gather_coalesced, dist.all_reduce_coalesced, dist.gather, dist.scatter),
    *(dist.all_gather_object, dist.broadcast_object_list, dist.gather_object, dist.scatter_object_list),
    *(dist.barrier, dist.monitored_barrier),
    *(dist.batch_isend_irecv, dist.irecv, dist.isend, dist.recv, dist.send),
    *(dist.recv_object_list, dist.send_object_list),
    *(function for name in _COALESCED for function, _ in distributed.functional_collectives(name)),
)


def _is_not_traced(function: Any, *args: Any, **kwargs: Any) -> None:
    fix = "call it outside of that, or compile with thunder_cg.thunderfx, which runs it between graphs"
    if function in _INSTEAD:
        fix = f"call {_INSTEAD[function]}, {fix}"
    raise CollectiveError(function.__name__, "Thunder cannot trace it", fix)


def _with_graphs(ours: Callable[..., Any], thunders: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What Thunder traces by itself changes only for a function that is compiled with this package's transform."""
    return (ours if compat.is_ours(compat.get_compile_data()) else thunders)(*args, **kwargs)


@cache
def install() -> None:
    """Has Thunder trace collectives by the functions above. It raised for most of them."""
    for function, ours in {**_IN_PLACE, **functional()}.items():
        thunders = compat.symbols_of_functions().get(function)
        compat.trace_as(function, ours if thunders is None else partial(_with_graphs, ours, thunders))
    for function in (*_INSTEAD, *_UNTRACED):
        compat.trace_as(function, partial(_is_not_traced, function))
    compat.run_without_gradients()
    compat.pad_shards_with_zeros()
    compat.trace_as(distributed.wrap_functional, lambda tensor: tensor)  # into a tensor that waits when it is used
