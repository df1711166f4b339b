"""One call of an operator with several sets of values: samples, and the cases that they belong to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from thunder_cg.compat.tensors import may_overlap_itself, read_as, storage_id, tree_flatten, tree_unflatten
from thunder_cg.compat.thunder import torch_executor_has

DRAWS = 5  # a warm-up, a capture, and three replays


@dataclass(frozen=True, slots=True)
class Sample:
    """One call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


Draw = Callable[[str, bool], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """Calls of one operator.

    Attributes:
        draw: makes all samples for a device, with or without gradients. Their values come from the generators of
            PyTorch, NumPy and Python.
        differentiable: whether the operator has a backward.
        defined: whether results have defined values; those of `torch.empty` do not.
        executors: Thunder's executors to put before the default ones.
        device: "cpu" or "cuda" if the case has samples for that device only.
        symbol: Thunder's name of the operator, as in "torch.add"; "" if it is not known.
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
class SampledCall:
    """A sample with `DRAWS` sets of tensors of one layout. The other arguments are the same in all sets."""

    fn: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    draws: tuple[tuple[torch.Tensor, ...], ...]
    defined: bool

    @property
    def is_stale(self) -> bool:
        """Whether all sets of values are equal: there are no elements, or no other values that the operator takes."""
        return all(_equal(self.draws[0], draw) for draw in self.draws[1:])

    def arguments(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with `tensors` in place of the sample's tensors."""
        new = iter(tensors)
        leaves = [next(new) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return args, kwargs


def calls(case: OperatorCase, device: str, grad: bool) -> list[SampledCall]:
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


def _call(samples: tuple[Sample, ...], defined: bool) -> SampledCall:
    first, *others = samples
    leaves, tree = tree_flatten((tuple(first.args), first.kwargs))
    tensors = _tensors(leaves)
    draws = [tensors]
    for seed, other in enumerate(others):
        fresh = _tensors(tree_flatten((tuple(other.args), other.kwargs))[0])
        fits = len(fresh) == len(tensors) and all(map(_alike, fresh, tensors))
        fresh = fresh if fits and not _equal(fresh, tensors) else _permuted(tensors, seed)
        draws.append(fresh)
    return SampledCall(first.fn, tuple(leaves), tree, tuple(draws), defined)


def _tensors(leaves: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.layout == b.layout and a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    strides = a.layout != torch.strided or (a.stride() == b.stride() and a.storage_offset() == b.storage_offset())
    return same and strides and a.requires_grad == b.requires_grad


def _equal(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    return all(a.layout != torch.strided or torch.equal(a.detach(), b.detach()) for a, b in zip(some, others))


def _permuted(tensors: Iterable[torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
    """The same elements in another order, so that they stay valid arguments: indices, probabilities."""
    fresh = tuple(twins(tensors))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in fresh:
            if tensor.layout == torch.strided and not may_overlap_itself(tensor):
                order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
                tensor.copy_(tensor.reshape(-1)[order].reshape(tensor.shape))
    return fresh


def twins(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the same layout, overlaps included. Copies share memory where the originals do."""
    memo: dict[int, torch.UntypedStorage] = {}
    return [_twin(tensor, memo) for tensor in tensors]


def _twin(tensor: torch.Tensor, memo: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage = storage_id(tensor)
    if storage not in memo:
        memo[storage] = tensor.untyped_storage().clone()
    plain = read_as(tensor.detach(), conj=tensor.is_conj(), neg=tensor.is_neg())
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    twin.set_(memo[storage], plain.storage_offset(), plain.size(), plain.stride())
    twin = read_as(twin, conj=tensor.is_conj(), neg=tensor.is_neg())
    return twin.detach().requires_grad_(tensor.requires_grad)


def symbol_of(name: str) -> str:
    """The torch executor's symbol for an operator of that name, as in "torch.add", or ""."""
    last = name.rsplit(".", 1)[-1]
    return next((f"torch.{n}" for n in (last, last.removeprefix("linalg_")) if torch_executor_has(n)), "")
