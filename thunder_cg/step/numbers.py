"""Numbers of optimizers that fused kernels take as they are: learning rates, betas, momentum, weight decay.

Note [Numbers of fused optimizers]
    Schedulers set these between steps, and the fused kernels of Adam, AdamW and SGD take them unchanged. So they are no
    facts of the state: each replay sets those of now among the arguments of the kernels, see Note [Kernel scalars] in
    runtime/backend.py. That is right if nothing else in the step reads them. In a capture, the groups hold sentinels,
    and it fails if

    -   other facts of the state differ with the sentinels, as they do if a variable leads to a group;
    -   anything looks ``param_groups`` up, or all attributes of the optimizer, but functions of PyTorch that are known
        (see Note [How lookups are seen] in attributes.py), and code that takes only ``["params"]`` of each group;
    -   a function of the user's gets a group, or a number of it, as those may that somebody has put into PyTorch;
    -   one runs that may look attributes up unseen, or Dynamo compiles, which does;
    -   the step has put other numbers there;
    -   the step writes to a parameter of a group, or to its state, and no kernel got one of the group's sentinels.

    Whoever looks them up finds the true ones, so nobody logs or saves a sentinel. Then the step compares the numbers
    from there on, as all else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CodeType
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from thunder_cg.compat.torch import code_of_fused_steps
from thunder_cg.compat.torch_compile import before_dynamo_compiles
from thunder_cg.errors import CaptureLater
from thunder_cg.runtime.backend import CopiedOut, Function, Graph, Pool, bits_of, number_of, sentinels
from thunder_cg.step.attributes import EVERYTHING, calling_frame, can_be_hooked, hooked, is_at, unwatched
from thunder_cg.step.bytecode import taking_parameters
from thunder_cg.step.facts import Atom, Facts, difference

TAKEN = Atom(float, "a number for kernels")  # the fact of any such number
_OF_ADAM = ("lr", "betas", "weight_decay", "eps")
FUSED: Mapping[type, tuple[str, ...]] = {  # what their kernels take
    Adam: _OF_ADAM,
    AdamW: _OF_ADAM,
    SGD: ("lr", "momentum", "weight_decay", "dampening"),
}
_NAMES = {"param_groups", *EVERYTHING}
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


def are_alike(some: Sequence[GroupNumbers], others: Sequence[GroupNumbers]) -> bool:
    """Whether they are of the same optimizers, in the same order."""
    return [(each.optimizer, each.keys) for each in some] == [(each.optimizer, each.keys) for each in others]


def _keys(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    if (names := FUSED.get(type(optimizer))) is None or type(group) is not dict or group.get("fused") is not True:
        return ()
    return tuple(key for key in names if _are_numbers(key, group.get(key)))


def _are_numbers(key: str, value: Any) -> bool:
    if key == "betas":
        return type(value) is tuple and len(value) == 2 and all(map(_is_number, value))
    return _is_number(value) and (key != "momentum" or value > 0)  # no buffer is for 0, and an error below


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or type(value) is int


def _each(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)


class KernelNumbers:
    """Those of several groups, and the scalars that kernels get for them."""

    def __init__(self, groups: Sequence[GroupNumbers] = ()) -> None:
        self.groups = groups
        self._at = [(each.group, key) for each in groups for key in each.keys]
        self._values: list[Any] = []
        self._scalars: tuple[int, ...] | None = ()

    def scalars(self) -> tuple[int, ...] | None:
        """Those of now; None if something else than such numbers is there. Steady calls ask for them."""
        values = [group.get(key) for group, key in self._at]
        if not (len(values) == len(self._values) and all(map(is_, values, self._values))):
            self._values, self._scalars = values, None
            if all(_are_numbers(key, value) for (_, key), value in zip(self._at, values)):
                numbers = [number for value in values for number in _each(value)]
                self._scalars = bits_of([float.__float__(n) if isinstance(n, float) else float(n) for n in numbers])
        return self._scalars


class StandIns:
    """Sentinels in the place of the numbers, for the time of a capture."""

    def __init__(self, numbers: KernelNumbers) -> None:
        self._groups = numbers.groups
        self._sentinels = sentinels(len(numbers.scalars() or ()))
        self._of_group: list[dict[int, str]] = []  # with the keys
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []  # what is there, and what stands in for it
        left = iter(self._sentinels)
        for each in self._groups:
            own: dict[int, str] = {}
            for key in each.keys:
                own |= (bits := {next(left): key for _ in _each(each.group[key])})
                stand_in = tuple(map(number_of, bits)) if key == "betas" else number_of(*bits)
                self._places.append((each.group, key, each.group[key], stand_in))
            self._of_group.append(own)
        stand_ins = [each for *_, each in self._places]
        inner = [number for each in stand_ins if isinstance(each, tuple) for number in each]
        self._identities = {*map(id, (*stand_ins, *inner, *(each.group for each in self._groups)))}
        self._reader = ""  # the first that may read them and is no kernel, in words

    def check_facts(self, collect: Callable[[], Facts]) -> None:
        """Raises `NumbersRead` if facts change with the numbers, or another thread has read these meanwhile."""
        if not self._groups:
            return
        before = collect()
        with self._watched(), self._there(), unwatched():
            change = difference(before, collect())
        if change is not None:
            raise NumbersRead(f"{change.label} changes with a number of an optimizer")
        if self._reader:
            raise NumbersRead(self._reader)

    def captured(self, pool: Pool, run: Function, targets: Sequence[Tensor], copied_out: CopiedOut) -> Graph:
        """What the pool captures while the groups hold them."""
        try:
            with self._watched(), self._there():
                return pool.capture(run, [], targets, copied_out, self._sentinels, may_miss=True)[0]
        except Exception:
            if not (self._groups and self._reader):
                raise
            raise NumbersRead(self._reader) from None  # an error that a sentinel may have caused

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Inside, the groups hold the sentinels, until somebody reads. `NumbersRead` if the step sets other numbers."""
        try:
            for group, key, _, stand_in in self._places:
                group[key] = stand_in
            yield
            for group, key, _, stand_in in self._places if not self._reader else ():
                if group.get(key) is not stand_in:
                    raise NumbersRead(f"the step sets the {key} of an optimizer")
        finally:
            for group, key, then, _ in self._places:
                group[key] = then

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, whoever may read them is noted."""
        if not self._groups:
            yield
            return
        kinds = {type(each.optimizer) for each in self._groups}
        if not all(map(can_be_hooked, kinds)):
            raise NumbersRead("a class of optimizers looks attributes up by itself")
        with ExitStack() as hooks, before_dynamo_compiles(partial(self._give_up, hooks)):
            for kind in kinds:
                hooks.enter_context(hooked(kind, self._note_lookup))
            yield

    def _give_up(self, hooks: ExitStack) -> None:
        """Before Dynamo compiles, which does not compile what such classes do."""
        self._note("Dynamo", "compiles in the step")
        hooks.close()

    def _note_lookup(self, value: Any, name: str) -> None:
        """An attribute of an optimizer is looked up or set."""
        if name in _NAMES and any(value is each.optimizer for each in self._groups):
            frame = calling_frame()
            is_known = frame is not None and (frame.f_code in _KNOWN or is_at(frame, taking_parameters))
            if not is_known:
                self._note(None if frame is None else frame.f_code, f"looks up {name} of an optimizer")

    def note_call(self, code: CodeType, variables: Mapping[str, Any]) -> None:
        """A function of the user's is called."""
        for value in variables.values() if self._groups else ():
            inner = value.values() if type(value) is dict else value if type(value) is tuple else ()
            if any(id(each) in self._identities for each in (value, *inner)):  # of *args and **kwargs, too
                self._note(code, "gets a number of an optimizer")

    def note_unseen(self, code: CodeType) -> None:
        """A function may look any attributes up."""
        self._note(code, "may look attributes up unseen")

    def _note(self, reader: CodeType | str | None, reads: str) -> None:
        """Notes who is about to read them. It may log or save them, so the groups hold the numbers again."""
        if not self._reader:
            if isinstance(reader, CodeType):
                reader = f"{reader.co_name}() ({os.path.basename(reader.co_filename)}:{reader.co_firstlineno})"
            self._reader = f"{reader or 'a thread'} {reads}"
        for group, key, then, stand_in in self._places:
            if group.get(key) is stand_in:
                group[key] = then

    def taken(self, touched: Iterable[Tensor], missing: Set[int]) -> tuple[str, ...]:
        """The keys of the numbers that kernels take. `NumbersRead` if something else may read them.

        Args:
            touched: the tensors that the step writes to.
            missing: sentinels that no kernel got.
        """
        if self._groups and self._reader:
            raise NumbersRead(self._reader)
        written = {*map(id, touched)}
        for each, own in zip(self._groups, self._of_group):
            if own.keys() & missing and any(id(tensor) in written for tensor in each.tensors()):
                raise NumbersRead("no kernel takes a number of an optimizer as it is")
        return tuple(dict.fromkeys(key for own in self._of_group for each, key in own.items() if each not in missing))
