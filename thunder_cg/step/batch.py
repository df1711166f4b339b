"""The arguments of one call of a step: how they are nested, and what tells them from those of another call.

A graph is for batches of one layout. Tensors are copied in, and all else of the arguments is baked in: numbers, keys of
dictionaries, classes. Equal values may differ, as 1 and True do, so facts of them are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from thunder_cg.compat.tensors import has_storage, is_size, is_zero_tensor, path_of_leaf, tree_flatten, tree_unflatten
from thunder_cg.errors import CaptureRefused
from thunder_cg.runtime.tensors import layout, same_tensors
from thunder_cg.step.collector import facts_of
from thunder_cg.step.facts import ATOMS, Difference, fact_of
from thunder_cg.step.fixes import fix_of_argument
from thunder_cg.step.gradients import is_changed, place_of
from thunder_cg.step.structure import Structure

_PLACE = re.compile(r"^\[[01]\]\[(?:(\d+)|'(\w+)')\]")  # the beginning of a path to a leaf of args and kwargs
_TENSOR = object()
_WITHOUT_IDENTITY = Tensor, tuple, *ATOMS
TAKE_ANOTHER = "take another tensor of its content, as in x = x.detach().requires_grad_()"
COPY_CONTAINER = "pass a copy of it, as by copy.copy(batch)"


@dataclass(frozen=True)
class Batch:
    """The arguments of one call: tensors on the device of the graphs, and the rest."""

    tensors: list[Tensor]
    same: dict[int, int]  # positions of tensors that are the same one as an earlier one, and its position
    constants: tuple[Any, ...]  # the fact of each leaf, and those of what it has; `_TENSOR` for a tensor
    structure: Structure
    leaves: list[Any]
    containers: dict[int, Any]  # lists, dictionaries and the like, by identity

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Batch:
        """Raises `CaptureRefused` for an argument that no graph can have."""
        if not kwargs and all(type(each) is Tensor for each in args):
            leaves, tree, containers = [*args], None, dict[int, Any]()  # which takes a third of the time
        else:
            leaves, tree, containers = _flattened((args, kwargs))
        structure = Structure(tree, facts_of)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.device.type != device_type:
                name = _name(tensor, leaves, structure)
                problem = f"{name} is on {tensor.device}, and the step's graph on {device_type}"
                raise CaptureRefused(problem, "move the batch to the device before the call")
            has_memory = has_storage(tensor) and not is_zero_tensor(tensor)
            has_gradient = tensor.requires_grad or tensor.grad is not None
            if type(tensor) is not Tensor or has_gradient or tensor.is_nested or not has_memory or tensor.has_names():
                kind = "tensor that has a gradient" if has_gradient else type(tensor).__name__
                kind = "tensor that requires grad" if tensor.requires_grad else kind
                kind = "nested tensor" if tensor.is_nested else "named tensor" if tensor.has_names() else kind
                fix = "pass it detached, or have the step read it from outside"
                name = _name(tensor, leaves, structure)
                raise CaptureRefused(f"{name} is a {kind}, not a plain tensor of a batch", fix)
            if attributes := vars(tensor):
                problem = f"{_name(tensor, leaves, structure)} has the attribute {next(iter(attributes))}"
                fix = "pass its value as an argument, and the tensor as x.detach()"
                raise CaptureRefused(f"{problem}, which a graph would have baked in", fix)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *ATOMS)):
                name = _name(leaf, leaves, structure)
                raise CaptureRefused(f"{name} is a {type(leaf).__name__}", fix_of_argument(leaf))
        constants = tuple(_TENSOR if isinstance(leaf, Tensor) else _fact_of(leaf) for leaf in leaves)
        return cls(tensors, same_tensors(tensors), constants, structure, leaves, containers)

    @property
    def layout(self) -> Any:
        """What has to be equal for two batches to be laid out alike."""
        return tuple(map(layout, self.tensors)), self.constants, (self.structure, *self.same.items())

    def call(self, fn: Callable[..., Any], tensors: Iterable[Tensor]) -> tuple[Any, Any]:
        """Calls ``fn`` with other tensors in the places of the batch's; returns the result and the arguments.

        `CaptureRefused` if it changes an argument: a replay would change nothing of the arguments.
        """
        found = iter(tensors)
        leaves = [next(found) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        passed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = [*map(place_of, passed)]
        tree = self.structure.tree
        args, kwargs = (leaves, {}) if tree is None else tree_unflatten(leaves, tree)
        result = fn(*args, **kwargs)
        for tensor, before in zip(passed, places):
            if is_changed(tensor, before):
                raise CaptureRefused(f"the step changes {_name(tensor, leaves, self.structure)}", TAKE_ANOTHER)
        if tree is not None:
            left, tree = tree_flatten((args, kwargs), is_size)
            if Structure(tree, facts_of) != self.structure or not all(map(is_, left, leaves)):
                fix = "copy it first, as in batch = dict(batch)"
                raise CaptureRefused("the step changes a dictionary or a list among its arguments", fix)
        return result, (args, kwargs)


def _fact_of(value: Any) -> tuple[Any, tuple[Any, ...]]:
    """That of a plain value, and those of what a value of a class of the user's has, and the class itself."""
    return fact_of(value), () if type(value) in ATOMS else facts_of(value)


def _flattened(arguments: Any) -> tuple[list[Any], Any, dict[int, Any]]:
    """The leaves, PyTorch's tree of the rest, and what can be told from an equal one, such as a list, by identity.

    `CaptureRefused` for one that is there twice, since the step is captured with two of it.
    """
    seen: dict[int, Any] = {}

    def is_leaf(node: Any) -> bool:
        if not isinstance(node, _WITHOUT_IDENTITY):
            if id(node) in seen:
                raise CaptureRefused(f"a {type(node).__name__} is twice among the arguments", COPY_CONTAINER)
            seen[id(node)] = node
        return is_size(node)

    return *tree_flatten(arguments, is_leaf), seen


def changed_argument(before: Any, after: Any) -> Difference | None:
    """The first argument that differs in two layouts of batches that are alike in all else; of a tensor its shape."""
    (shapes, then, *rest), (now_shapes, now, *now_rest) = before, after
    if rest != now_rest:
        return None
    (structure, *_), pairs = rest[0], zip(shapes, now_shapes)
    for i, (a, b) in enumerate(zip(then, now)):
        if a is b is _TENSOR:
            (old, *_), (new, *_) = next(pairs)
            if old != new:
                return Difference(f"the shape of {argument_at(structure, i)}", old, new)
        elif _TENSOR in (a, b):
            return None
        elif a != b:
            changed = (pair for pair in zip(a[1], b[1]) if pair[0] != pair[1])  # in what a value has
            then, now = next(changed, (a[0], b[0])) if a[0] == b[0] else (a[0], b[0])
            return Difference(argument_at(structure, i), then, now)
    return None


def argument_at(structure: Structure, position: int) -> str:
    """``"argument 1['labels']"``: where the leaf at a position is in arguments of this structure."""
    if (tree := structure.tree) is None:
        return f"argument {position}"
    return _PLACE.sub(r"argument \1\2", path_of_leaf(tree, position))


def _name(leaf: Any, leaves: Sequence[Any], structure: Structure) -> str:
    return argument_at(structure, next(i for i, each in enumerate(leaves) if each is leaf))
