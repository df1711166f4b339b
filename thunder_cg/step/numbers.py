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
from operator import is_
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

    def tensors(self) -> list[Tensor]:
        """The parameters and their state."""
        parameters = self.group["params"]
        states = (value for each in parameters for value in self.optimizer.state.get(each, {}).values())
        return [*parameters, *(value for value in states if isinstance(value, Tensor))]


def _keys(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    if type(group) is not dict or group.get("fused") is not True:
        return ()
    return tuple(key for key in FUSED.get(type(optimizer), ()) if _are_numbers(key, group.get(key)))


def _are_numbers(key: str, value: Any) -> bool:
    are = all(isinstance(each, float) or type(each) is int for each in _each(value))
    return are and (key != "momentum" or value != 0)  # without one, there is no buffer


def _each(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


class KernelNumbers:
    """Those of several groups, and the scalars that kernels get for them."""

    def __init__(self, groups: Sequence[GroupNumbers] = ()) -> None:
        self.groups = groups
        self._at = [(each.group, key) for each in groups for key in each.keys]
        self._values: list[Any] = []
        self._scalars: tuple[int, ...] | None = ()

    def __bool__(self) -> bool:
        return bool(self.groups)

    def scalars(self) -> tuple[int, ...] | None:
        """Those of now; None if something else than such numbers is there. Steady calls ask for them."""
        values = [group.get(key) for group, key in self._at]
        if not (len(values) == len(self._values) and all(map(is_, values, self._values))):
            self._values, self._scalars = values, None
            if all(_are_numbers(key, value) for (_, key), value in zip(self._at, values)):
                numbers = [number for value in values for number in _each(value)]
                self._scalars = bits_of([float.__float__(n) if isinstance(n, float) else float(n) for n in numbers])
        return self._scalars


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

    def __init__(self, numbers: KernelNumbers) -> None:
        self._groups = numbers.groups
        self._sentinels = sentinels(len(numbers.scalars() or ()))
        self._of_group: list[dict[int, str]] = []  # with the keys

    def captured(self, pool: Pool, run: Function, targets: Sequence[Tensor], copied_out: CopiedOut) -> Graph:
        """What the pool captures while the groups hold them."""
        with self._there():
            return pool.capture(run, [], targets, copied_out, self._sentinels, may_miss=True)[0]

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Inside, the groups hold the sentinels. `NumbersRead` if they do not at the end."""
        found, left = [], iter(self._sentinels)
        for each in self._groups:
            own: dict[int, str] = {}
            for key in each.keys:
                then = each.group[key]
                own |= (bits := {next(left): key for _ in _each(then)})
                values = tuple(map(number_of, bits))
                found.append((each.group, key, then, values if type(then) is tuple else values[0]))
            self._of_group.append(own)
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

    def taken(self, reader: str, touched: Sequence[Tensor], missing: Set[int]) -> tuple[str, ...]:
        """The keys of the numbers that kernels take. `NumbersRead` if something else may read them.

        Args:
            reader: a function that names the groups, in words; "" if none does.
            touched: the tensors that the step writes to.
            missing: sentinels that no kernel got.
        """
        if reader and self._groups:
            raise NumbersRead(f"{reader} names {_NAME}")
        written = {*map(id, touched)}
        for each, own in zip(self._groups, self._of_group):
            if own.keys() & missing and any(id(tensor) in written for tensor in each.tensors()):
                raise NumbersRead("no kernel takes a number of an optimizer as it is")
        return tuple(dict.fromkeys(key for own in self._of_group for each, key in own.items() if each not in missing))
