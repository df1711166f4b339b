"""Numbers of optimizers that fused kernels take as they are: learning rates, betas, momentum, weight decay.

Note [Numbers of fused optimizers]
    Schedulers set these between steps, and the fused kernels of Adam, AdamW and SGD take them unchanged. So they are no
    facts of the state: each replay sets those of now among the arguments of the kernels, see Note [Kernel scalars] in
    runtime/backend.py. That is right if nothing else in the step reads them. In a capture, the groups hold sentinels,
    and it fails if

    -   a function runs that names ``param_groups``, other than those of PyTorch that are known;
    -   the step has put other numbers there;
    -   the step writes to a parameter of a group, or to its state, and no kernel got one of the group's sentinels.

    Then the step compares the numbers from there on, as all else. It does so from the start if anything but the
    optimizer leads to a group, such as a variable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from thunder_cg.compat.torch import code_of_fused_steps
from thunder_cg.errors import CaptureLater
from thunder_cg.runtime.backend import CopiedOut, Function, Graph, Pool, bits_of, number_of, sentinels
from thunder_cg.step.facts import Atom

TAKEN = Atom(float, "a number for kernels")  # the fact of any such number
_OF_ADAM = ("lr", "betas", "weight_decay", "eps")
FUSED: Mapping[type, tuple[str, ...]] = {  # what their kernels take
    Adam: _OF_ADAM,
    AdamW: _OF_ADAM,
    SGD: ("lr", "momentum", "weight_decay", "dampening"),
}
_NAME = "param_groups"
_KNOWN = frozenset(code_of_fused_steps())


class NumbersRead(CaptureLater):
    """See Note [Numbers of fused optimizers]."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupNumbers:
    """Those of a group of an optimizer, by its keys."""

    optimizer: Optimizer
    group: dict[str, Any]
    keys: tuple[str, ...]

    @classmethod
    def all_of(cls, optimizer: Optimizer) -> list[GroupNumbers]:
        """Of all groups."""
        groups = (cls(optimizer, group, _keys(optimizer, group)) for group in optimizer.param_groups)
        return [each for each in groups if each.keys]

    def by_key(self) -> Iterator[tuple[str, Sequence[float]]]:
        for key in self.keys:
            value = self.group[key]
            yield key, value if isinstance(value, (tuple, list)) else (value,)

    def tensors(self) -> list[Tensor]:
        """The parameters and their state."""
        parameters = self.group["params"]
        states = (value for each in parameters for value in self.optimizer.state.get(each, {}).values())
        return [*parameters, *(value for value in states if isinstance(value, Tensor))]


def are_there(numbers: GroupNumbers) -> bool:
    """Whether a group has such numbers by the same keys."""
    return _keys(numbers.optimizer, numbers.group) == numbers.keys


def _keys(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    if group.get("fused") is not True:
        return ()
    return tuple(key for key in FUSED.get(type(optimizer), ()) if _are_numbers(key, group.get(key)))


def _are_numbers(key: str, value: Any) -> bool:
    numbers = value if type(value) in (tuple, list) else (value,)
    are = all(isinstance(each, float) or type(each) is int for each in numbers)
    return are and (key != "momentum" or value != 0)  # without one, there is no buffer


def scalars_of(numbers: Sequence[GroupNumbers]) -> tuple[int, ...]:
    """What the kernels get in the next replay."""
    return bits_of([float.__float__(n) if isinstance(n, float) else float(n) for n in _flat(numbers)])


def _flat(numbers: Sequence[GroupNumbers]) -> list[float]:
    return [number for each in numbers for _, found in each.by_key() for number in found]


def are_found_elsewhere(numbers: Sequence[GroupNumbers], of_roots: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether anything but its optimizer leads to a group.

    Args:
        of_roots: the containers that modules and optimizers lead to, each as often as they do.
        others: those that anything else leads to.
    """
    found = Counter([*map(id, of_roots), *map(id, others)]) if numbers else Counter[int]()
    return any(found[id(each.group)] > 1 for each in numbers)


def name_groups(code: CodeType) -> bool:
    """Whether a function may read them, and is none of those that only pass them to kernels."""
    return code not in _KNOWN and (_NAME in code.co_names or _is_in(code.co_consts))


def _is_in(constant: Any) -> bool:
    return constant == _NAME or (isinstance(constant, (tuple, frozenset)) and any(map(_is_in, constant)))


class StandIns:
    """Sentinels in the place of the numbers, for the time of a capture."""

    def __init__(self, numbers: Sequence[GroupNumbers]) -> None:
        self._numbers = numbers
        self._sentinels = sentinels(len(_flat(numbers)))
        self._of_group: list[Set[int]] = []

    def captured(self, pool: Pool, run: Function, targets: Sequence[Tensor], copied_out: CopiedOut) -> Graph:
        """What the pool captures while the groups hold them."""
        with self._there():
            return pool.capture(run, [], targets, copied_out, self._sentinels, may_miss=True)[0]

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Inside, the groups hold the sentinels. `NumbersRead` if they do not at the end."""
        found, left = [], iter(self._sentinels)
        for each in self._numbers:
            own = []
            for key, numbers in each.by_key():
                own += (bits := [next(left) for _ in numbers])
                values = tuple(map(number_of, bits))
                then = each.group[key]
                found.append((each.group, key, then, values if isinstance(then, (tuple, list)) else values[0]))
            self._of_group.append(frozenset(own))
        for group, key, _, stand_in in found:
            group[key] = stand_in
        try:
            yield
            for group, key, _, stand_in in found:
                if group.get(key) is not stand_in:
                    raise NumbersRead(f"the step sets the {key} of an optimizer")
        finally:
            for group, key, then, _ in found:
                group[key] = then

    def check(self, reader: str, touched: Sequence[Tensor], missing: Set[int]) -> None:
        """Raises `NumbersRead` if something else than kernels reads the numbers.

        Args:
            reader: a function that names the groups, in words; "" if none does.
            touched: the tensors that the step writes to.
            missing: sentinels that no kernel got.
        """
        if not self._numbers:
            return
        if reader:
            raise NumbersRead(f"{reader} names {_NAME}")
        written = {*map(id, touched)}
        for each, own in zip(self._numbers, self._of_group):
            if own & missing and any(id(tensor) in written for tensor in each.tensors()):
                raise NumbersRead("no kernel takes a number of an optimizer as it is")
