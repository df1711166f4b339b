"""What is called: PyTorch's own table of operators, other names for the same operators, and calls written by hand."""

from __future__ import annotations

import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy
import torch
from thunder.executors import torchex
from thunder.torch import _torch_to_thunder_function_map as known_to_thunder
from torch.utils._pytree import tree_flatten, tree_unflatten

DRAWS = 5  # a warm-up, a capture, and three replays
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool,
    torch.float8_e4m3fn,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Draw = Callable[[str, bool], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Case:
    """Calls of one operator.

    Attributes:
        draw: makes all samples for a device, with or without gradients; their values come from PyTorch's, NumPy's and
            Python's generators.
        differentiable: whether there is a backward to try.
        defined: whether results have defined values; those of `torch.empty` have not.
        executors: of Thunder's, to be put before its default ones.
        device: "cpu" or "cuda" if there are samples for that only.
        symbol: what Thunder calls the operator, as in "torch.add"; "" if that is not known.
    """

    name: str
    draw: Draw
    dtype: str = "float32"
    differentiable: bool = True
    defined: bool = True
    executors: tuple[str, ...] = ()
    device: str = ""
    symbol: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A sample with `DRAWS` sets of values, all laid out alike: what is no tensor is the same in all of them."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    draws: tuple[tuple[torch.Tensor, ...], ...]
    defined: bool

    @property
    def is_stale(self) -> bool:
        """Whether all sets of values are the same: there are no elements, or none that may change."""
        return all(_equal(self.draws[0], draw) for draw in self.draws[1:])

    def with_one_draw(self) -> Call:
        return replace(self, draws=self.draws[:1] * DRAWS)

    def arguments(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these in the places of the tensors."""
        new = iter(tensors)
        leaves = [next(new) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs


def calls(case: Case, device: str, grad: bool) -> list[Call]:
    """All samples of a case, each with several sets of values."""
    draws = []
    for seed in range(DRAWS):
        seed_everything(seed)
        draws.append(list(case.draw(device, grad)))
    return [_call(samples, case.defined) for samples in zip(*draws)]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def _call(samples: tuple[Sample, ...], defined: bool) -> Call:
    first, *others = samples
    leaves, tree = tree_flatten((tuple(first.args), first.kwargs))
    tensors = _tensors(leaves)
    draws = [tensors]
    for seed, other in enumerate(others):
        fresh = _tensors(tree_flatten((tuple(other.args), other.kwargs))[0])
        fits = len(fresh) == len(tensors) and all(map(_alike, fresh, tensors))
        fresh = fresh if fits and not _equal(fresh, tensors) else _permuted(tensors, seed)
        draws.append(fresh)
    return Call(first.fn, tuple(leaves), tree, tuple(draws), defined)


def _tensors(leaves: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.layout == b.layout and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    strides = a.layout != torch.strided or (a.stride() == b.stride() and a.storage_offset() == b.storage_offset())
    return same and strides and a.requires_grad == b.requires_grad


def _equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(a.layout != torch.strided or torch.equal(a.detach(), b.detach()) for a, b in zip(some, others))


def _permuted(tensors: Iterable[torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
    """The same elements in another order, so that they still are what the operator takes: indices, probabilities."""
    fresh = tuple(twins(tensors))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in fresh:
            if tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == 0:
                order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
                tensor.copy_(tensor.reshape(-1)[order].reshape(tensor.shape))
    return fresh


def twins(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that are laid out alike, overlaps included; those that share memory share it."""
    memo: dict[int, torch.UntypedStorage] = {}
    return [_twin(tensor, memo) for tensor in tensors]


def _twin(tensor: torch.Tensor, memo: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage = tensor.untyped_storage()
    if storage._cdata not in memo:
        memo[storage._cdata] = storage.clone()
    plain = tensor.detach()
    plain = plain._neg_view() if plain.is_neg() else plain
    plain = plain.conj() if plain.is_conj() else plain
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(memo[storage._cdata], plain.storage_offset(), plain.size(), plain.stride())
    made = made.conj() if tensor.is_conj() else made
    made = made._neg_view() if tensor.is_neg() else made
    return made.detach().requires_grad_(tensor.requires_grad)


# ----------------------------------------------------------------------------------------------------------------------
# PyTorch's table
# ----------------------------------------------------------------------------------------------------------------------


@cache
def table() -> tuple[Any, ...]:
    """``op_db``. The package of PyTorch's tests asks for `expecttest`, of which nothing here has a need, and forbids
    the process to set any flag of ``torch.backends``, which is ignored."""
    if "expecttest" not in sys.modules and find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    with patch.object(torch.backends, "disable_global_flags", lambda: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages that it imports where there are any
        from torch.testing._internal import common_methods_invocations as source

    source.wrapper_set_seed = _unseeded  # type: ignore[attr-defined]
    return tuple(source.op_db)


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of what seeds before each call, which Thunder cannot trace: here every run is seeded as a whole."""
    return op(*args, **kwargs)


def cases(device: str) -> dict[str, Case]:
    """All cases by name, in the order in which they are run."""
    from thunder_cg.tools.operators.calls import BY_HAND

    found: dict[str, Case] = {}
    for op in table():
        dtype = next((d for d in DTYPES if d in op.supported_dtypes(device)), None)
        if dtype is None:
            continue
        found[op.formatted_name] = _case(op, op.formatted_name, op.op, dtype)
        if op.inplace_variant is not None:
            name = f"{op.formatted_name} in place"
            found[name] = _case(op, name, op.inplace_variant, dtype, inplace=True)
    for case in _other_names(device):
        found[case.name] = case
    for case in BY_HAND:
        if case.device in ("", device):
            found[case.name] = case
    return found


def _case(op: Any, name: str, fn: Callable[..., Any], dtype: torch.dtype, inplace: bool = False) -> Case:
    return Case(
        name,
        partial(_samples, op, fn, dtype, inplace),
        str(dtype).removeprefix("torch."),
        differentiable=op.supports_autograd and not inplace and (dtype.is_floating_point or dtype.is_complex),
        defined=not op.name.startswith(("empty", "new_empty")),
        symbol="" if inplace or op.name.startswith("sparse.") else symbol_of(_known_as(fn) or op.name),
    )


def _known_as(fn: Callable[..., Any]) -> str:
    return getattr(known_to_thunder.get(fn), "name", "")


def exists(name: str) -> bool:
    """Whether the torch executor has a symbol of that name. It has no derivatives of what Thunder derives itself."""
    return name in torchex.ex.opmap


def symbol_of(name: str) -> str:
    """The torch executor's symbol for an operator that is called so, or ""."""
    last = name.rsplit(".", 1)[-1]
    return next((f"torch.{n}" for n in (last, last.removeprefix("linalg_")) if exists(n)), "")


def _samples(
    op: Any, fn: Callable[..., Any], dtype: torch.dtype, inplace: bool, device: str, grad: bool
) -> Iterator[Sample]:
    for sample in op.sample_inputs(device, dtype, requires_grad=grad, set_seed=False):
        if not (inplace and sample.broadcasts_input):
            yield Sample(fn, (sample.input, *sample.args), sample.kwargs)


def _other_names(device: str) -> Iterator[Case]:
    """What Thunder knows and the table does not name: aliases, methods, and forms that copy instead of viewing."""
    reached = {id(known_to_thunder[op.op]) for op in table() if op.op in known_to_thunder}
    entries: dict[str, Any] = {}
    for op in table():
        names = [op.name, op.aten_name, *(alias.name for alias in op.aliases)]
        for name in names:
            entries.setdefault(name.rsplit(".", 1)[-1], op)
            entries.setdefault(name.removeprefix("linalg_").removeprefix("special_").removeprefix("fft_"), op)
    for fn, symbol in known_to_thunder.items():
        name = getattr(fn, "__name__", "")
        op = entries.get(name) or entries.get(name.removesuffix("_copy"))
        if id(symbol) in reached or op is None or name.endswith("_"):
            continue
        reached.add(id(symbol))
        dtype = next((d for d in DTYPES if d in op.supported_dtypes(device)), None)
        if dtype is not None:
            yield _case(op, f"{op.formatted_name} as {_qualified(fn)}", fn, dtype)


def _qualified(fn: Any) -> str:
    module = getattr(fn, "__module__", None) or getattr(getattr(fn, "__objclass__", None), "__name__", "") or "torch"
    return f"{module}.{fn.__name__}".replace("torch._C.", "torch.").replace("torch._", "torch.")
