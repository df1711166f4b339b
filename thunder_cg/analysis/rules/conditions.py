"""Conditions on the arguments of an operator, and what follows where one holds.

Whether an operator can be captured may depend on its arguments. ``x[mask]`` asks the GPU how many elements of the mask
are set, ``x[[0, 2]]`` copies the list to the GPU, and a seed makes a new generator on the host. A predicate reads this
off the literal arguments and the metadata of tensors. Rules name their conditions, and only these are evaluated.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thunder_cg.analysis.rules.record import ALL, FIRST, Arguments, Cause, Condition, Evidence, Reason, TensorArgument

_BYTES = frozenset({"bool8", "uint8"})
_MAX_ROWS_BY_CUBLAS = 16  # of a batch of matrices; PyTorch gives larger ones to MAGMA

# Positions of parameters that no signature shows: Thunder wraps most meta functions in a way that hides their
# signatures, and PyTorch's functions in C have none.
_POSITIONS: Mapping[str, Mapping[str, int]] = {
    "EMBEDDING": {"max_norm": 3},
    "EMBEDDING_BACKWARD": {"sparse": 5},
    "MULTINOMIAL": {"seed": 3},
    "as_strided": {"input": 0, "size": 1, "stride": 2, "storage_offset": 3},
    "as_strided_scatter": {"input": 0, "size": 2, "stride": 3, "storage_offset": 4},
    "embedding_backward": {"sparse": 5},
    "fused_moving_avg_obs_fake_quant": {"running_min": 3, "running_max": 4},
    "histc": {"input": 0, "bins": 1, "min": 2, "max": 3},
    "multinomial": {"seed": 3},
    "multinomial_helper": {"seed": 3},
    "norm": {"p": 1, "ord": 1, "dim": 2},
    "one_hot": {"num_classes": 1},
    "scaled_dot_product_attention": {"dropout_p": 4},
}


@functools.lru_cache(maxsize=4096)
def positions(meta: Callable[..., Any] | None, name: str) -> Mapping[str, int]:
    """The positions of an operator's parameters by name.

    Args:
        meta: the symbol's meta function, whose signature is looked at.
        name: the last part of the operator's name, such as ``"dropout"``.
    """
    places: dict[str, int] = {}
    for function in (getattr(torch.nn.functional, name, None), meta):
        try:
            parameters = inspect.signature(function)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # there is no function, or a builtin one
            continue
        places |= {parameter: i for i, parameter in enumerate(parameters.parameters)}
    return {**places, **_POSITIONS.get(name, {})}


def _tensors_in(tree: Any) -> Iterator[TensorArgument]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(tree, TensorArgument):
        yield tree
    elif isinstance(tree, (list, tuple, Mapping)):
        for branch in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors_in(branch)


def _tensors_on(device: str, *trees: Any) -> list[TensorArgument]:
    return [tensor for tensor in _tensors_in(trees) if tensor.device == device]


def _reduces_all_on_cpu(call: Arguments) -> bool:
    """Whether it gets a tensor alone: ``torch.min(x)``, and neither ``torch.min(x, y)`` nor ``torch.min(x, 0)``."""
    of = call.operator or call
    return _runs_on_cpu(call) and len(of.positional) == 1 and of.keywords.keys().isdisjoint(("dim", "other"))


def _is_given(*names: str) -> Callable[[Arguments], bool]:
    return lambda call: any(call.argument(name) is not None for name in names)


def _is_set(name: str) -> Callable[[Arguments], bool]:
    """Whether it is a probability other than zero, or a flag other than False. A value known at run time may be."""
    return lambda call: call.argument(name) is not None and call.argument(name) != 0


def _is_range(least: Any, most: Any) -> bool:
    """Whether both are known when the trace is made, and differ."""
    return isinstance(least, (int, float)) and isinstance(most, (int, float)) and least != most


def _masks(call: Arguments) -> list[TensorArgument]:
    return [t for t in _tensors_in(call.position(1)) if t.dtype in _BYTES]


def _uses_boolean_index(call: Arguments) -> bool:
    """Not for ``x[mask] = 0.5``, for which PyTorch calls ``masked_fill`` with the number, unless it is a 0-dim mask."""
    written, mask, value = (call.position(index) for index in range(3))
    is_mask = isinstance(mask, TensorArgument) and mask.dtype == "bool8" and mask.device == written.device
    return bool(_masks(call)) and not (is_mask and mask.shape and isinstance(value, (int, float, complex)))


def _uses_list_index(call: Arguments) -> bool:
    key = call.position(1)
    if isinstance(key, list):
        return any(isinstance(k, (int, float, list, tuple)) for k in key)
    nested = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, (list, tuple)) and any(isinstance(i, (int, list, tuple)) for i in k) for k in nested)


def _stores_number_at_tensor_index(call: Arguments) -> bool:
    indices = [*_tensors_in(call.position(1))]
    is_number = isinstance(call.position(2), (int, float, complex))
    return is_number and bool(indices) and not _masks(call)


def _reads_past_its_view(call: Arguments) -> bool:
    tensor, size, stride = (call.argument(name) for name in ("input", "size", "stride"))
    # A storage offset counts from the start of the storage, and the tensor may start later.
    if not isinstance(tensor, TensorArgument) or call.argument("storage_offset") is not None:
        return True
    if not isinstance(size, Sequence) or not isinstance(stride, Sequence):
        return True
    if not all(isinstance(n, int) for n in (*size, *stride, *tensor.shape)):
        return True
    return 1 + sum((n - 1) * step for n, step in zip(size, stride)) > math.prod(tensor.shape)


def _takes_singular_values(call: Arguments) -> bool:
    """Of torch.norm and torch.linalg.norm, which share a symbol. With ``ord=2``, the latter means the largest singular
    value of a matrix. The derivative takes ``p=2`` of torch.norm for that, too."""
    of = call.operator or call
    order, named, over = call.argument("ord"), of.keywords.get("p"), call.argument("dim")
    are_known = all(value is None or isinstance(value, (str, int, float)) for value in (order, named))
    if not are_known or "nuc" in (order, named):
        return True
    if over is None:
        is_matrix = any(len(tensor.shape) == 2 for tensor in _tensors_in((of.positional, of.keywords)))
    else:
        is_matrix = not isinstance(over, int) and not (isinstance(over, (list, tuple)) and len(over) != 2)
    return is_matrix and order in (2, -2)


def _runs_on_cpu(call: Arguments) -> bool:
    return bool(_tensors_on("cpu", call.positional))


# fmt: off
BOOLEAN_INDEX = Condition(
    "uses_boolean_index", "An index is boolean or of bytes, unless a number is stored by it alone.",
    _uses_boolean_index,
    Cause(Reason.DATA_DEPENDENT,
          "an index is a boolean mask, and how many elements it selects is known only on the device",
          "use torch.where(mask, a, b) instead"), Evidence.MEASURED)
LIST_INDEX = Condition(
    "uses_list_index", "An index is a Python list of numbers.", _uses_list_index,
    Cause(Reason.HOST_SYNC, "an index is a Python list, which is copied to the device at every call",
          "make the index a tensor once, outside of the compiled function"), Evidence.MEASURED)
SCALAR_INDEX = Condition(
    "uses_scalar_index", "An index is a 0-dim tensor of integers.",
    lambda call: any(not t.shape and t.dtype not in _BYTES for t in _tensors_in(call.position(1))),
    Cause(Reason.HOST_SYNC, "an index is a 0-dim tensor, and PyTorch reads its number on the host",
          "give the index a dimension: x.index_select(0, k.reshape(1)), or x.index_copy(0, k.reshape(1), value[None])"),
    Evidence.MEASURED)
NUMBER_AT_TENSOR_INDEX = Condition(
    "stores_number_at_tensor_index", "A Python number is stored where a tensor of indices says.",
    _stores_number_at_tensor_index,
    Cause(Reason.HOST_SYNC,
          "a number is stored at indices given by a tensor, and the number is copied to the device at every call",
          "store a tensor, or use torch.where"), Evidence.MEASURED)

TENSOR_FILL_VALUE = Condition(
    "has_tensor_fill_value", "The value to fill in is a tensor.",
    lambda call: any(  # of which a derivative takes a gradient last
        isinstance(v, TensorArgument) and v.shape == () for v in (*call.positional[2:], call.keywords.get("value"))
    ),
    Cause(Reason.DATA_DEPENDENT, "the value to fill in is a tensor, which PyTorch reads on the host",
          "use torch.where(mask, value, a) instead"), Evidence.MEASURED)
OWN_GENERATOR = Condition(
    "draws_with_its_own_generator", "A seed or a generator is given.", _is_given("seed", "generator"),
    Cause(Reason.RANDOM_STATE, "it draws from a generator of its own, which a graph does not advance",
          "draw with the default generator", "CUDAGeneratorImpl cannot be made during a capture"))
DROPOUT = Condition("has_dropout", "The dropout probability is not zero.", _is_set("dropout_p"), draws=True)
RENORMALIZED_WEIGHT = Condition(
    "renormalizes_weight", "max_norm is given.", _is_given("max_norm"),
    Cause(Reason.SIDE_EFFECT, "max_norm rewrites rows of the weight in place, and the trace does not show this write",
          "renormalize the weight outside of the compiled function", "torch.nn.functional.embedding"), writes=ALL)
SORTER = Condition(
    "uses_sorter", "A sorter is given.", _is_given("sorter"),
    Cause(Reason.HOST_SYNC, "PyTorch checks on the host whether the sorter is in range",
          "sort the values with it first: sorted_sequence.gather(-1, sorter)"), Evidence.MEASURED)
READS_RANGE = Condition(
    "reads_range", "No range is given: min and max are equal, as they are by default.",
    lambda call: not _is_range(call.argument("min") or 0, call.argument("max") or 0),
    Cause(Reason.HOST_SYNC, "it reads its input's range on the host", "give min= and max=", "aten::histc"),
    Evidence.MEASURED)
CHECKS_LENGTHS = Condition(
    "checks_lengths", "unsafe=True is not given.", lambda call: call.argument("unsafe") is not True,
    Cause(Reason.HOST_SYNC, "it checks the lengths of the segments on the host",
          "pass unsafe=True, if the lengths along the axis sum to its size", "aten::segment_reduce"))
IN_PLACE = Condition("writes_in_place", "inplace=True is given.", _is_set("inplace"), aliases=FIRST, writes=FIRST)
REDUCES_IN_PLACE = Condition(
    "reduces_in_place", "It waits for the result and skip_clone=True is given, so its result is its argument itself.",
    lambda call: call.argument("skip_clone") is True and call.argument("do_async") is False,
    aliases=FIRST, writes=FIRST)
SPARSE_GRADIENT = Condition(
    "has_sparse_gradient", "sparse=True is given.", _is_set("sparse"),
    Cause(Reason.DATA_DEPENDENT, "the gradient is sparse, and its size depends on the indices",
          "let the gradient be dense: sparse=False"), Evidence.MEASURED,
    aliases=ALL)  # the gradient is made of the incoming gradient and the indices

READS_PAST_VIEW = Condition(
    "reads_past_its_view",
    "Size, stride and offset may reach memory of the storage outside of the tensor's own elements.",
    _reads_past_its_view,
    Cause(Reason.UNVERIFIED,
          "it may read memory of the storage outside of the tensor, and a graph has a copy of the tensor only",
          "pass the tensor that has all of the memory, and take slices of it"), Evidence.MEASURED)
EMPTY_RANGE = Condition(
    "has_empty_range", "running_min or running_max has no elements.",
    lambda call: any(
        isinstance(t, TensorArgument) and 0 in t.shape for t in map(call.argument, ("running_min", "running_max"))),
    Cause(Reason.SIDE_EFFECT, "its running range has no elements yet, so it resizes the caller's tensors",
          "give running_min and running_max an element for each channel before the first call"), Evidence.MEASURED)
CLASSES_CHECKED = Condition(
    "checks_classes", "num_classes is not given, or the tensor is on a CPU.",
    lambda call: _runs_on_cpu(call) or call.argument("num_classes") in (None, -1),
    Cause(Reason.DATA_DEPENDENT, "it checks its input's contents on the host",
          "give num_classes; on a CPU, write (x[..., None] == torch.arange(n, device=x.device)).long()"),
    Evidence.MEASURED)
NAN_CHECK_ON_CPU = Condition(
    "reduces_all_on_cpu", "It is of all elements of a tensor on a CPU, without a dimension.", _reduces_all_on_cpu,
    Cause(Reason.HOST_SYNC, "on a CPU its derivative reads whether the result is a NaN",
          "give it a dimension, as in x.flatten().min(0).values, or take amin or amax",
          "torch/csrc/autograd/FunctionsManual.cpp, evenly_distribute_backward"), Evidence.MEASURED)
SINGULAR_VALUES = Condition(
    "takes_singular_values", "The norm is nuclear, or may be spectral: p or ord is 2 or -2, and it is of a matrix.",
    _takes_singular_values,
    Cause(Reason.HOST_SYNC,
          "with 2, -2 or 'nuc' it may take singular values of a matrix, and their solver waits for the device",
          "call torch.linalg.vector_norm(x, 2) if the norm of all elements is meant; else move it out of the compiled "
          "function", "torch.norm, torch.linalg.norm, MAGMA, cuSOLVER"), Evidence.MEASURED)
# Under a dispatch mode, and so on the tape, PyTorch takes the formula of a GPU. This formula reads nothing on the host,
# and its zeros may have another sign.
OTHER_FORMULA_ON_CPU = Condition(
    "runs_on_cpu", "An argument is on a CPU.", _runs_on_cpu,
    Cause(Reason.UNVERIFIED,
          "on a CPU, PyTorch takes another formula for its derivative in a capture, and a gradient has other strides",
          "multiply by what torch.linalg.householder_product makes"), Evidence.MEASURED)
BATCH_BY_MAGMA = Condition(
    "solves_batch_with_magma", "Matrices on a GPU come in a batch and have more than 16 rows or columns.",
    lambda call: any(
        len(t.shape) > 2 and any(isinstance(n, int) and n > _MAX_ROWS_BY_CUBLAS for n in t.shape[-2:])
        for t in _tensors_on("cuda", call.positional, call.results)),
    Cause(Reason.HOST_SYNC,
          f"MAGMA solves a batch of matrices with more than {_MAX_ROWS_BY_CUBLAS} rows, and waits for the device",
          "take the matrices one by one",
          "captured on an H200: batches of 2 to 64 matrices of 20 to 600 rows fail, single ones do not"))
CUFFT_PLAN = Condition(
    "uses_cufft_plan", "An argument or a result is on a GPU.",
    lambda call: bool(_tensors_on("cuda", call.positional, call.results)),
    Cause(Reason.UNVERIFIED, "a graph reads the tables of a cuFFT plan, and PyTorch's cache of plans may free them",
          "name it in allow= if nothing clears that cache, and no more plans are made than its max_size",
          "torch.backends.cuda.cufft_plan_cache.clear() before a replay: a segmentation fault on an H200"))
# fmt: on
