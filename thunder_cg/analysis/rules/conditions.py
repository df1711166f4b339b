"""Conditions on the arguments of an operator: named predicates, and what follows where one holds.

Whether an operator can be captured may depend on its arguments. ``x[mask]`` asks the GPU how many elements of the mask
are set, ``x[[0, 2]]`` copies the list to the GPU, and a seed makes a new generator on the host. A predicate reads this
off the literal arguments and the metadata of tensors. Rules name their conditions, and only these are evaluated.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder_cg.analysis.rules.record import (
    AliasedInputs,
    Arguments,
    Cause,
    Condition,
    Evidence,
    Reason,
    TensorArgument,
    tensors_in,
)

_BYTES = frozenset({"bool8", "uint8"})
_MAX_ROWS_BY_CUBLAS = 16  # of a batch of matrices; PyTorch gives larger ones to MAGMA

# ----------------------------------------------------------------------------------------------------------------------
# Arguments by name
# ----------------------------------------------------------------------------------------------------------------------

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
    "multinomial": {"seed": 3},
    "multinomial_helper": {"seed": 3},
    "scaled_dot_product_attention": {"dropout_p": 4},
}


@functools.lru_cache(maxsize=4096)
def positions(meta: Callable[..., Any] | None, name: str) -> Mapping[str, int]:
    """The positions of an operator's parameters by name.

    Args:
        meta: the symbol's meta function, whose signature is looked at.
        name: the last part of the operator's name, such as ``"dropout"``.
    """
    found: dict[str, int] = {}
    for function in (getattr(torch.nn.functional, name, None), meta):
        try:
            parameters = inspect.signature(function)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # there is no function, or a builtin one
            continue
        found |= {parameter: i for i, parameter in enumerate(parameters.parameters)}
    return {**found, **_POSITIONS.get(name, {})}


# ----------------------------------------------------------------------------------------------------------------------
# Indices
# ----------------------------------------------------------------------------------------------------------------------


def uses_boolean_index(call: Arguments) -> bool:
    """An index tensor is boolean or of bytes."""
    return any(t.dtype in _BYTES for t in tensors_in(call.position(1)))


def uses_list_index(call: Arguments) -> bool:
    """An index is a Python list of numbers."""
    key = call.position(1)
    if isinstance(key, list):
        return any(isinstance(k, (int, float, list, tuple)) for k in key)
    nested = key if isinstance(key, tuple) else (key,)
    return any(isinstance(k, (list, tuple)) and any(isinstance(i, (int, list, tuple)) for i in k) for k in nested)


def uses_scalar_index(call: Arguments) -> bool:
    """An index is a 0-dim tensor of integers."""
    return any(not t.shape and t.dtype not in _BYTES for t in tensors_in(call.position(1)))


def stores_number_at_tensor_index(call: Arguments) -> bool:
    """A Python number is stored where a tensor of indices says."""
    indices = [*tensors_in(call.position(1))]
    is_number = isinstance(call.position(2), (int, float, complex))
    return is_number and bool(indices) and not uses_boolean_index(call)


BOOLEAN_INDEX = Condition(
    uses_boolean_index,
    Cause(
        Reason.DATA_DEPENDENT,
        "an index is a boolean mask, and how many elements it selects is known only on the device",
        "use torch.where(mask, a, b) instead",
    ),
    Evidence.MEASURED,
)
LIST_INDEX = Condition(
    uses_list_index,
    Cause(
        Reason.HOST_SYNC,
        "an index is a Python list, which is copied to the device at every call",
        "make the index a tensor once, outside of the compiled function",
    ),
    Evidence.MEASURED,
)
SCALAR_INDEX = Condition(
    uses_scalar_index,
    Cause(
        Reason.HOST_SYNC,
        "an index is a 0-dim tensor, and PyTorch reads its number on the host",
        "give the index a dimension: x.index_select(0, k.reshape(1)), or x.index_copy(0, k.reshape(1), value[None])",
    ),
    Evidence.MEASURED,
)
NUMBER_AT_TENSOR_INDEX = Condition(
    stores_number_at_tensor_index,
    Cause(
        Reason.HOST_SYNC,
        "a number is stored at indices given by a tensor, and the number is copied to the device at every call",
        "store a tensor, or use torch.where",
    ),
    Evidence.MEASURED,
)

# ----------------------------------------------------------------------------------------------------------------------
# Arguments that are given
# ----------------------------------------------------------------------------------------------------------------------


def _is_set(value: Any) -> bool:
    """Whether it is a probability other than zero, or a flag other than False. A value known at run time may be."""
    return value is not None and value != 0


def has_tensor_fill_value(call: Arguments) -> bool:
    """The value to fill in is a tensor."""
    values = (*call.positional[-1:], call.keywords.get("value"))
    return any(isinstance(value, TensorArgument) for value in values)


def draws_with_its_own_generator(call: Arguments) -> bool:
    """A seed or a generator is given."""
    return call.argument("seed") is not None or call.argument("generator") is not None


def has_dropout(call: Arguments) -> bool:
    """The dropout probability is not zero."""
    return _is_set(call.argument("dropout_p"))


def renormalizes_weight(call: Arguments) -> bool:
    """max_norm is given."""
    return call.argument("max_norm") is not None


def uses_sorter(call: Arguments) -> bool:
    """A sorter is given."""
    return call.argument("sorter") is not None


def writes_in_place(call: Arguments) -> bool:
    """inplace=True is given."""
    return _is_set(call.argument("inplace"))


def has_sparse_gradient(call: Arguments) -> bool:
    """sparse=True is given."""
    return _is_set(call.argument("sparse"))


TENSOR_FILL_VALUE = Condition(
    has_tensor_fill_value,
    Cause(
        Reason.DATA_DEPENDENT,
        "the value to fill in is a tensor, which PyTorch reads on the host",
        "use torch.where(mask, value, a) instead",
    ),
    Evidence.MEASURED,
)
OWN_GENERATOR = Condition(
    draws_with_its_own_generator,
    Cause(
        Reason.RANDOM_STATE,
        "it draws from a generator of its own, which a graph does not advance",
        "draw with the default generator",
        "CUDAGeneratorImpl cannot be made during a capture",
    ),
)
DROPOUT = Condition(has_dropout, draws=True)
RENORMALIZED_WEIGHT = Condition(
    renormalizes_weight,
    Cause(
        Reason.SIDE_EFFECT,
        "max_norm rewrites rows of the weight in place, and the trace does not show this write",
        "renormalize the weight outside of the compiled function",
        "torch.nn.functional.embedding",
    ),
    writes=AliasedInputs.ALL,
)
SORTER = Condition(
    uses_sorter,
    Cause(
        Reason.HOST_SYNC,
        "PyTorch checks on the host whether the sorter is in range",
        "sort the values with it first: sorted_sequence.gather(-1, sorter)",
    ),
    Evidence.MEASURED,
)
IN_PLACE = Condition(writes_in_place, aliases=AliasedInputs.FIRST, writes=AliasedInputs.FIRST)
SPARSE_GRADIENT = Condition(
    has_sparse_gradient,
    Cause(
        Reason.DATA_DEPENDENT,
        "the gradient is sparse, and its size depends on the indices",
        "let the gradient be dense: sparse=False",
    ),
    Evidence.MEASURED,
    aliases=AliasedInputs.ALL,  # the gradient is made of the incoming gradient and the indices
)

# ----------------------------------------------------------------------------------------------------------------------
# Shapes, strides and devices
# ----------------------------------------------------------------------------------------------------------------------


def reads_past_its_view(call: Arguments) -> bool:
    """Size, stride and offset may reach memory of the storage outside of the tensor's own elements."""
    tensor, size, stride = (call.argument(name) for name in ("input", "size", "stride"))
    # A storage offset counts from the start of the storage, and the tensor may start later.
    if not isinstance(tensor, TensorArgument) or call.argument("storage_offset") is not None:
        return True
    if not isinstance(size, Sequence) or not isinstance(stride, Sequence):
        return True
    if not all(isinstance(n, int) for n in (*size, *stride, *tensor.shape)):
        return True
    return 1 + sum((n - 1) * step for n, step in zip(size, stride)) > math.prod(tensor.shape)


def has_empty_range(call: Arguments) -> bool:
    """running_min or running_max has no elements."""
    ranges = (call.argument("running_min"), call.argument("running_max"))
    return any(isinstance(t, TensorArgument) and 0 in t.shape for t in ranges)


def runs_on_cpu(call: Arguments) -> bool:
    """An argument is on a CPU."""
    return any(t.device == "cpu" for t in tensors_in(call.positional))


def solves_batch_with_magma(call: Arguments) -> bool:
    """Matrices on a GPU come in a batch and have more than 16 rows or columns."""
    return any(
        len(t.shape) > 2 and any(isinstance(n, int) and n > _MAX_ROWS_BY_CUBLAS for n in t.shape[-2:])
        for t in call.tensors("cuda")
    )


def uses_cufft_plan(call: Arguments) -> bool:
    """An argument or a result is on a GPU."""
    return bool(call.tensors("cuda"))


READS_PAST_VIEW = Condition(
    reads_past_its_view,
    Cause(
        Reason.UNVERIFIED,
        "it may read memory of the storage outside of the tensor, and a graph has a copy of the tensor only",
        "pass the tensor that has all of the memory, and take slices of it",
    ),
    Evidence.MEASURED,
)
EMPTY_RANGE = Condition(
    has_empty_range,
    Cause(
        Reason.SIDE_EFFECT,
        "its running range has no elements yet, so it resizes the caller's tensors",
        "give running_min and running_max an element for each channel before the first call",
    ),
    Evidence.MEASURED,
)
NAN_CHECK_ON_CPU = Condition(
    runs_on_cpu,
    Cause(
        Reason.HOST_SYNC,
        "on a CPU its derivative reads whether the result is a NaN",
        "take amin or amax, or sort",
        "torch/csrc/autograd/FunctionsManual.cpp, evenly_distribute_backward",
    ),
    Evidence.MEASURED,
)
# Under a dispatch mode, and so on the tape, PyTorch takes the formula of a GPU. This formula reads nothing on the host,
# and its zeros may have another sign.
OTHER_FORMULA_ON_CPU = Condition(
    runs_on_cpu,
    Cause(
        Reason.UNVERIFIED,
        "on a CPU, PyTorch takes another formula for its derivative in a capture, and a gradient has other strides",
        "multiply by what torch.linalg.householder_product makes",
    ),
    Evidence.MEASURED,
)
BATCH_BY_MAGMA = Condition(
    solves_batch_with_magma,
    Cause(
        Reason.HOST_SYNC,
        f"MAGMA solves a batch of matrices with more than {_MAX_ROWS_BY_CUBLAS} rows, and waits for the device",
        "take the matrices one by one",
        "captured on an H200: batches of 2 to 64 matrices of 20 to 600 rows fail, single ones do not",
    ),
)
CUFFT_PLAN = Condition(
    uses_cufft_plan,
    Cause(
        Reason.UNVERIFIED,
        "a graph reads the tables of a cuFFT plan, and PyTorch's cache of plans may free them",
        "name it in allow= if nothing clears that cache, and no more plans are made than its max_size",
        "torch.backends.cuda.cufft_plan_cache.clear() before a replay: a segmentation fault on an H200",
    ),
)
