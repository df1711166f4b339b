"""Compares the results of two variants: their relative error, and whether they are equal in every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from thunder_cg.compat.tensors import tree_leaves
from thunder_cg.tools.bench.variants import Step, Subject, step_of
from thunder_cg.verify.compare import same_bits

SEED = 1
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of a step, by name. They are copies, so that no later call overwrites them."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]


def step_results(step: Step, subject: Subject) -> StepResults:
    """The results of a step from a fixed seed."""
    torch.manual_seed(SEED)
    outputs = {f"output {i}": t.clone() for i, t in enumerate(tree_leaves(step())) if isinstance(t, Tensor)}
    gradients = {
        f"gradient of {name}": parameter.grad.clone()
        for name, parameter in subject.model.named_parameters()
        if parameter.grad is not None
    }
    return StepResults(outputs, gradients)


def reference(subject: Subject) -> StepResults:
    """The results of eager PyTorch, in float64 if the case is exact."""
    model = copy.deepcopy(subject.model)
    inputs = subject.inputs
    if subject.case.exact:
        model = model.double()
        inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    alone = Subject(subject.case, model, inputs)
    return step_results(step_of(alone, model), alone)


def relative_error(found: StepResults, exact: StepResults) -> float:
    """The largest |found - exact| over the largest |exact|: of all outputs or of all gradients, whichever is larger.

    Raises:
        ValueError: the results cannot be compared.
    """
    return max(_error(found.outputs, exact.outputs), _error(found.gradients, exact.gradients))


def same(found: StepResults, other: StepResults) -> bool:
    """Whether all results are equal in every bit."""
    a, b = found.outputs | found.gradients, other.outputs | other.gradients
    return a.keys() == b.keys() and all(a[n].shape == b[n].shape and same_bits(a[n], b[n]) for n in a)


def bits(
    found: R,
    thunder: Sequence[R],
    uncaptured: Callable[[], R],
    is_same: Callable[[R, R], bool],
    all_agree: Callable[[bool], bool] = bool,
) -> str:
    """What results are beside those of plain Thunder: see `BenchmarkRow.bits`.

    Args:
        thunder: plain Thunder's results, twice.
        uncaptured: computes the results anew, without graphs.
        is_same: compares two results.
        all_agree: whether it is so on all ranks, which compute anew together or not at all.
    """
    found_there = any(is_same(found, one) for one in thunder)
    if all_agree(found_there):
        return "same"
    with without_graphs():
        computed = uncaptured()
    if found_there or not is_same(*thunder):
        return "same" if found_there else "thunder varies"
    return "other kernels" if is_same(found, computed) else "different"


def without_graphs() -> AbstractContextManager[None]:
    """Inside, calls that train run the compiled functions without graphs, as hooks on saved tensors are active."""
    return torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    if found.keys() != exact.keys():
        missing = ", ".join(sorted(found.keys() ^ exact.keys())[:3])
        raise ValueError(f"only one of the two has {missing}")
    furthest = largest = 0.0
    for name, a in found.items():
        b = exact[name]
        if a.shape != b.shape:
            raise ValueError(f"{name} has the shape {tuple(a.shape)}, not {tuple(b.shape)}")
        if a.numel():
            furthest = max(furthest, float((a.double() - b.double()).abs().max()))
            largest = max(largest, float(b.double().abs().max()))
    return furthest / largest if largest else furthest
