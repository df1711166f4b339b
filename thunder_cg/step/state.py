"""The state of a training step: all that it depends on besides its arguments, as facts that can be compared.

A graph bakes in what Python decided: a learning rate that is a number, a flag, which tensor a name stood for. Each of
these is a fact with a name. A recording is for one set of facts, and what differs names what changed.

Note [Cheap checks of a state]
    To look at each attribute of a large model would take longer than its step. So a replay compares the values that the
    step's own code reads, and asks one C++ guard whether any dictionary of an object, a module or an optimizer was
    written to. Only then are the facts collected again.
"""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import CellType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_cg.compat.autograd import global_hooks, hooks_of, is_leaf, registered_hooks
from thunder_cg.compat.distributed import local_tensor
from thunder_cg.compat.guards import addresses_equal, attribute_guard, names_of, tensor_guards
from thunder_cg.compat.settings import inside_autocast
from thunder_cg.compat.tensors import has_storage, is_wrapper, storage_id, tensors_in
from thunder_cg.errors import CaptureRefused, SkipReason
from thunder_cg.runtime.tensors import has_history, is_whole, layout, same_tensors
from thunder_cg.step.attributes import Attributes, Names, only_sets
from thunder_cg.step.collector import CONTAINERS, PASS, Collector, is_simple
from thunder_cg.step.facts import Content, Facts, Same, is_equal, subject
from thunder_cg.step.gradients import place_of
from thunder_cg.step.lookups import MISSING, content_of_cell, links_of, own, own_attributes
from thunder_cg.step.numbers import KernelNumbers, are_alike
from thunder_cg.step.other_memory import can_move
from thunder_cg.step.outside import shared_generator
from thunder_cg.step.places import Carried, Place, place_of_read
from thunder_cg.step.reads import GROWING, Called, Read, is_compiled, reads_in, reads_of
from thunder_cg.step.snapshot import Snapshot, Undo, undos_of

_MAX_REPLACED = 2**20  # bytes that are copied in and out in each call, rather than captured again
_MOST_LINES = 3  # of those that name a container


class StepState:
    """The state as it is now.

    Args:
        fn: the step's function.
        roots: modules and optimizers by name, besides those that the function reads.
        device_type: of the graphs. Tensors elsewhere have their values baked in.
        called: functions of the user's that the step has been seen to call.
        attributes: of the user's objects that count; None for all of them.
        carried: places by their keys: see Note [Carried tensors] in places.py.
        takes_numbers: whether nothing but kernels is known to read numbers of fused optimizers.

    Attributes:
        facts: of everything.
        kinds, compiled_kinds: classes of the user's objects, and those of objects that what is compiled may read.
        objects: of all of these classes.
        tensors: all that were found on the graphs' device.
        memory: what has the memory of each: of a DTensor, its part on this rank.
        with_memory: all of both.
        parameters: those of them that get gradients, or may have one: frozen ones, what an optimizer has, and those
            that the step names.
        averages: moving averages of models that have been updated once.
        kernel_numbers: those that may change between replays: see Note [Numbers of fused optimizers] in numbers.py.
        objection: why no graph would be right; None if one may be.
        hooked: the same, if it is a hook or a wrapper of PyTorch's, whose Python may be why something changes.

    Raises:
        CaptureRefused: an object raises an error when it is looked at.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        roots: Mapping[str, Any],
        device_type: str,
        called: Sequence[Called] = (),
        attributes: Attributes | None = None,
        carried: Mapping[Any, Place] = MappingProxyType({}),
        *,
        takes_numbers: bool = True,
    ) -> None:
        self._to_carry, self._takes_numbers = carried, takes_numbers
        self._fn, self._given, self._device_type, self._called = fn, roots, device_type, called
        self.attributes = attributes
        self._names: Names
        self._seen, self._names = (0, {}) if attributes is None else (attributes.seen, attributes.by_class())
        self._at = "what the step reads"  # which is looked at
        self._lines: list[_NamedAt] = []
        try:
            self._collect()
        except Exception as error:  # of an object's class
            raised = f"{type(error).__name__}: {error}".removesuffix(": ")
            problem = f"{self._at}{self.line_of(self._at)} cannot be compared before a replay, since it raises {raised}"
            raise CaptureRefused(problem, PASS) from error

    def _collect(self) -> None:
        # Of what is compared by itself, of what other names lead to, and of modules and optimizers.
        simple = self._sort_reads([(read, read.get()) for read in self._reads(self._called)])
        self._link()
        others = self._collect_others()
        given = {id(root): (name, root) for name, root in self._given.items()}
        roots_found = {**others.roots, **simple.roots, **given}
        self._roots = [*roots_found.values()]
        self._of_simple = simple.begin()
        heavy = self._collect_roots()
        self.kernel_numbers = KernelNumbers(heavy.kernel_numbers)
        self._behind_names, self._of_roots = others.begin(), heavy.begin()
        self._hooks_registered = registered_hooks()
        self.objects = [*others.objects, *heavy.objects]
        self._growing += self._reads_of_objects()
        self._then_growing = self._facts_of_growing()
        self.facts = Facts.of(simple.facts, others.facts, heavy.facts, self._then_growing)
        self.hooked = self._first(*simple.hooked, *others.hooked, *heavy.hooked)
        self.objection = self.hooked or self._first(*simple.objections, *others.objections, *heavy.objections)
        self.tensors = [*{**simple.tensors, **others.tensors, **heavy.tensors}.values()]
        self.memory = [*map(local_tensor, self.tensors)]
        self.with_memory = [*{id(tensor): tensor for tensor in (*self.tensors, *self.memory)}.values()]
        named = simple.tensors | others.tensors
        trained = {id(each) for root in self.optimizers() for group in root.param_groups for each in group["params"]}
        trained |= {i for i, each in named.items() if not each.is_inference()}
        self.parameters = [each for each in self.tensors if _may_get_gradient(each, id(each) in trained)]
        self._holders = [*others.holders, *heavy.holders]
        self.averages = heavy.averages
        self.places_named = simple.places | others.places
        self.places = self.places_named | heavy.places
        self.carried = [*{**simple.carried, **others.carried, **heavy.carried}.values()]
        self.kinds, self.compiled_kinds = others.kinds | heavy.kinds, others.compiled_kinds | heavy.compiled_kinds

    def _sort_reads(self, reads: Sequence[tuple[Read, Any]]) -> Collector:
        """Tells what only grows and what is carried from the rest, of which some values can be compared by themselves.

        Returns the facts of these and of what is carried.
        """
        collector = Collector(self._device_type, self._names, self._to_carry)
        self._places = {read.place for read, _ in reads}
        self._paths = [read.path for read, _ in reads if read.path is not None]
        self._lines = [_NamedAt.of(read, value) for read, value in reads if read.line]
        self._growing = [read for read, value in reads if _grows(read, value)]
        self._lead_to: list[tuple[Read, Any]] = []  # names of what is carried, with the key of its place
        self._simple: list[tuple[Read, Any]] = []
        self._others: list[tuple[Read, Any]] = []
        for read, value in reads:
            self._at = read.label
            if not (_grows(read, value) or self._is_carried(read, value, collector)):
                are_like = self._simple if read.is_owner or is_simple(value, self._device_type) else self._others
                are_like.append((read, value))
        for read, value in self._simple:
            if read.is_owner and not isinstance(value, (nn.Module, Optimizer)):
                collector.facts[read.label] = Same(value)
            else:
                collector.add(read.label, value, 0, place_of_read(read))
        return collector

    def _reads_of_objects(self) -> list[Read]:
        """Lists and numbers of objects that the step passes on, to which functions only append or add."""
        reads: list[Read] = []
        objects, attributes = {*map(id, self.objects)}, self.attributes
        if attributes is None:
            return reads
        for value, name in attributes.grows.values():
            if id(value) not in objects or name in self._names.get(type(value), (name,)):
                continue
            label, get = f"{type(value).__name__}.{name}", partial(own, value, name)
            read = Read(label, get, path=(value, (name,)), only_grows=True)
            if _grows(read, get()):
                reads.append(read)
            else:
                attributes.add(type(value), name)
        return reads

    def _is_carried(self, read: Read, value: Any, collector: Collector) -> bool:
        """Whether what a name leads to is carried, which is checked by itself."""
        if not self._to_carry or read.is_owner:
            return False
        if is_carried := collector.add_carried(read.label, value, places := place_of_read(read)):
            self._lead_to.append((read, places[-1].key))
        return is_carried

    def _link(self) -> None:
        """One check in C++ of the functions and methods that names lead to, in the place of one for each."""
        self._cells: dict[int, tuple[types.CellType, Any]] = {}
        self._others_simple: list[tuple[Read, Any]] = []
        found: dict[int, tuple[Any, dict[str, Any]]] = {}
        for read, value in self._simple:
            links = links_of(read.path) if read.path and read.is_code and read.get() is not MISSING else None
            if links is None:
                self._others_simple.append((read, value))
                continue
            for container, name, found_there in links:
                if isinstance(container, types.CellType):
                    self._cells[id(container)] = container, found_there
                else:
                    found.setdefault(id(container), (container, {}))[1][name] = found_there
        self._links = [*found.values()]  # which keeps what is compared by identity
        self._are_linked = attribute_guard(self._links, MISSING)

    def again(self) -> StepState:
        """The state as it is by now."""
        return self._anew(self._called, self.attributes)

    def with_called(self, called: Sequence[Called]) -> StepState:
        """The state with all that these functions read as well."""
        return self._anew([*self._called, *called], None)

    def _anew(self, called: Sequence[Called], attributes: Attributes | None) -> StepState:
        given = self._fn, self._given, self._device_type
        return StepState(*given, called, attributes, self._to_carry, takes_numbers=self._takes_numbers)

    def _reads(self, called: Sequence[Called]) -> list[Read]:
        return reads_of(self._fn, [root for root in self._given.values() if isinstance(root, nn.Module)], called)

    def first_unknown(self, called: Sequence[Called]) -> str | None:
        """Something that these functions read, or that was looked up, and that is no part of the state."""
        reads = self._reads([*self._called, *called])
        new = next((read.label for read in reads if read.place not in self._places), None)
        if self.attributes is None or new is not None:
            return new
        self.attributes.add_grown({place.key for read in self._growing for place in place_of_read(read)}, self.objects)
        return self.attributes.newest if self.attributes.seen != self._seen else None

    @property
    def device(self) -> torch.device:
        """That of the graph: the state's, or the current one if the step reads no tensor from outside."""
        return self.tensors[0].device if self.tensors else torch.empty(0, device=self._device_type).device

    def _collect_others(self) -> Collector:
        collector = Collector(self._device_type, self._names, self._to_carry)
        for read, _ in self._others:
            collector.in_compiled, self._at = read.is_compiled, read.label
            collector.add(read.label, read.get(), 0, place_of_read(read))
        collector.in_compiled = False
        for read, value in self._simple:
            if read.is_owner:
                collector.add_class(read.label, value)
        return collector

    def _collect_roots(self) -> Collector:
        collector = Collector(self._device_type, self._names, self._to_carry, takes_numbers=self._takes_numbers)
        waiting = [*self._roots]
        seen = {id(root) for _, root in waiting}
        while waiting:
            self._at, root = waiting.pop(0)
            collector.add_root(self._at, root)
            waiting += [found for i, found in collector.roots.items() if i not in seen]
            seen.update(collector.roots)
        collector.add_definitions()
        for name, hooks in global_hooks():
            collector.facts[f"how many hooks {name} has"] = len(hooks)
            collector.note_hooks(name, hooks.values())
        return collector

    def guard_tensors(self, arguments: Sequence[Tensor]) -> None:
        """Notes where the tensors are and what they are like, for `carried_if_unchanged`.

        Raises:
            CaptureRefused: one has no memory, or not on the device, or one of the step's arguments is elsewhere.
        """
        device = self.device
        if (other := next((t.device for t in (*self.tensors, *arguments) if t.device != device), None)) is not None:
            raise CaptureRefused(f"the step uses tensors on {device} and on {other}, and a graph is on one device")
        for tensor, memory in zip(self.tensors, self.memory):
            if (reason := _why_not_in_graph(memory)) is not None:
                name = self.name_of(tensor)
                problem = f"the step uses {name}{self.line_of(name)}, {reason.problem}"
                raise CaptureRefused(problem, reason.fix)
        self._metadata = tensor_guards(self.with_memory)
        self._addresses: list[int | None] = [tensor.data_ptr() for tensor in self.memory]
        self._indices = [*range(len(self.memory))]
        self._same_carried = same_tensors(self.carried_tensors())

    def carried_if_unchanged(self) -> list[Tensor] | None:
        """The tensors that are carried now, if nothing has changed. See Note [Cheap checks of a state]."""
        try:
            if not self.holds():
                return None
        except Exception:  # of an object's class; a new state says of which one
            return None
        values = self.carried_values()
        are_alike = [value.fact for value in values] == [each.fact for each in self.carried]
        tensors = [tensor for value in values for tensor in value.tensors]
        return tensors if are_alike and same_tensors(tensors) == self._same_carried else None

    def let_move(self, positions: Collection[int]) -> None:
        """Has some of the tensors be anywhere."""
        self._indices = [i for i in self._indices if i not in positions]

    def holds(self) -> bool:
        """Whether nothing has changed, besides what is carried."""
        reads = self._others_simple
        if not (self._are_linked() and all(content_of_cell(cell) is then for cell, then in self._cells.values())):
            reads = self._simple
        for read, value in reads:
            if (now := read.get()) is not value and not is_equal(now, value):
                return False
        if not (
            self._of_simple.is_untouched() and self._are_facts_same() and self.kernel_numbers.scalars() is not None
        ):
            return False
        if any([place.key for place in place_of_read(read)] != [key] for read, key in self._lead_to):
            return False
        if self._growing and self._facts_of_growing() != self._then_growing:
            return False
        if not self.tensors:
            return True
        same = addresses_equal(self.memory, self._addresses, self._indices)
        return bool(same and self._metadata.check(*self.with_memory))

    def _are_facts_same(self) -> bool:
        """Collects the facts again where something was written to. Those of roots are many."""
        is_new_hook = registered_hooks() != self._hooks_registered
        if is_new_hook and any(hook for tensor in self.tensors for hook in hooks_of(tensor)):
            return False
        are_same = all(read.get() is value for read, value in self._others)
        if is_new_hook or not are_same or not self._behind_names.is_untouched():
            others = self._collect_others()
            if others.facts != self._behind_names.facts:
                return False
            self._others = [(read, read.get()) for read, _ in self._others]
            self._behind_names = others.begin()
        if is_new_hook or not self._of_roots.is_untouched():
            heavy = self._collect_roots()
            if heavy.facts != self._of_roots.facts or not are_alike(heavy.kernel_numbers, self.kernel_numbers.groups):
                return False
            self._of_roots, self.kernel_numbers = heavy.begin(), KernelNumbers(heavy.kernel_numbers)
        self._hooks_registered = registered_hooks()
        return True

    def _first(self, *objections: SkipReason) -> SkipReason | None:
        """The first one, with the line of the user's code that names what it is about."""
        if not objections:
            return None
        problem, fix = objections[0]
        return SkipReason(problem if re.search(r":\d", problem) else problem + self.line_of(problem), fix)

    def line_of(self, label: str) -> str:
        """The line of the user's code that names what a fact is about: " (see train.py:31)"; "" if none is known.

        Of an attribute it is the one that writes it, if one does; of a container it is each, as any may write it.
        """
        named = [each for each in self._lines if re.match(rf"{re.escape(each.name)}(?!\w)", subject(label))]
        if not named or not (longest := max(named, key=lambda each: len(each.name))).line:
            return ""
        same = [each for each in self._lines if each.container is not None and each.container == longest.container]
        grown = next((each.line for each in same if each.grows), None)
        other = next((each.line for each in same if not each.grows), None)
        if grown is None or other is None:
            lines = list(dict.fromkeys(each.line for each in same or [longest]))
            return f" (see {' and '.join(lines[:_MOST_LINES])})"
        return f" (see {grown}, and {other}, which reads it: a graph can append to a list that the step does not read)"

    def name_of(self, tensor: Tensor) -> str:
        """What names a tensor of the state, in few words."""
        names = [label for label, fact in self.facts.items() if isinstance(fact, Same) and fact.value is tensor]
        return min(names, key=len, default="a tensor")

    def kept_by_autocast(self) -> str | None:
        """The name of a weight that an autocast around the step may keep cast for later calls; None if there is none.

        Also one with enabled=False, if the step enters another in it. No object of Python holds what it keeps, so that
        nothing else shows that a graph reads it. What Thunder or Dynamo compiles casts weights by itself.
        """
        if not (inside_autocast() and torch.is_autocast_cache_enabled()):
            return None
        modules = [module for _, root in self._roots if isinstance(root, nn.Module) for module in root.modules()]
        compiled = {id(each) for module in modules if is_compiled(module) for each in module.parameters()}
        casts = (each for each in self.parameters if each.requires_grad and each.dtype is torch.float32)
        kept = next((each for each in casts if id(each) not in compiled), None)
        return None if kept is None else self.name_of(kept)

    def optimizers(self) -> list[Optimizer]:
        return [root for _, root in self._roots if isinstance(root, Optimizer)]

    def places_of_tensors(self) -> list[Any]:
        """Where each is, and how it is laid out."""
        return [place_of(t) if has_storage(t) and not t.is_nested else None for t in self.memory]

    def moved_since(self, places: Sequence[Any], *, may_move: bool = False) -> SkipReason | None:
        """What is said of the first tensor that is not where it was, with the fix; None if all are.

        Args:
            may_move: whether one may be elsewhere, and laid out alike: see Note [Replaced storages] in storages.py.
        """
        for tensor, then, now in zip(self.tensors, places, self.places_of_tensors()):
            if now != then and not (may_move and _is_alike(tensor, then, now)):
                name = self.name_of(tensor)
                problem = f"{name} got other memory or another shape"
                fix = f"write {name} in place, such as by .data.copy_(), or set it outside of the step"
                return SkipReason(problem + self.line_of(name), fix)
        return None

    def carried_values(self) -> list[Carried]:
        """What is carried by now."""
        places = (each.place for each in self.carried if each.place.is_there())
        values = (Carried.of(place.get(), self._device_type) for place in places)
        return [value for value in values if value is not None]

    def carried_tensors(self) -> list[Tensor]:
        return [tensor for value in self.carried_values() for tensor in value.tensors]

    def lists(self) -> dict[int, tuple[Read, Any]]:
        """Those to which the step only appends, and deques, by identity."""
        return {id(value): (read, value) for read in reversed(self._growing) if type(value := read.get()) in GROWING}

    def numbers(self) -> dict[Any, tuple[Read, int]]:
        """Those to which the step only adds, by the keys of their places."""
        numbers = [(read, value) for read in reversed(self._growing) if type(value := read.get()) is int]
        return {place.key: (read, value) for read, value in numbers for place in place_of_read(read)}

    def _facts_of_growing(self) -> Facts:
        """See Note [What only grows] in reads.py. Where names lead to the same list or number is a fact."""
        facts = Facts()
        names: dict[Any, str] = {}  # by identity or place, the first
        for read in self._growing:
            value = read.get()
            key = [place.key for place in place_of_read(read)] if type(value) is int else id(value)
            first = names.setdefault(str(key), read.label)
            kind = type(value) if _grows(read, value) else None
            facts[f"type({read.label})"] = Content((kind, first, getattr(value, "maxlen", None)))
        return facts

    def snapshot(self) -> Snapshot:
        """All that the step may change of it."""
        self._undone = {*self._places, *map(id, self._holders)}
        owners = [value for read, value in self._simple if read.is_owner]
        passed_on = [each for value in self.objects for each in own_attributes(value).values()]
        lists = [*passed_on, *(value for _, value in self.lists().values())]
        lists = [each for each in lists if type(each) in GROWING]  # to which it may only append
        return Snapshot([*self._holders, *owners, *lists], self._paths, self.with_memory)

    def undos_of(self, called: Called) -> list[Undo]:
        """How what a function reads gets back what it holds now, where `snapshot` and earlier calls do not have it."""
        reads = {place: read for place, read in reads_in(*called) if place not in self._undone}
        collector = Collector(self._device_type, self._names, {})
        for read in reads.values():
            value = read.get()
            collector.add(read.label, value.__self__ if isinstance(value, types.MethodType) else value)
        for label, root in [*collector.roots.values()]:
            if self._undone.isdisjoint((id(root), id(names_of(root)))):
                collector.add_root(label, root)
        owner = [] if called.owner is None or isinstance(called.owner, Tensor) else [called.owner]
        holders = [each for each in (*owner, *collector.holders) if id(each) not in self._undone]
        self._undone.update(reads, map(id, holders))
        paths = [read.path for read in reads.values() if read.path is not None]
        known = {*map(id, self.parameters)}
        others = [each for each in collector.tensors.values() if id(each) not in known and is_leaf(each)]
        gradients = (partial(setattr, each, "grad", each.grad) for each in others if not each.is_inference())
        return [*undos_of(holders, paths, collector.tensors.values()), *gradients]

    def tensors_in_holders(self) -> list[Tensor]:
        """What is in containers and objects that the state had, though they may have been replaced since."""
        return tensors_in([each if isinstance(each, CONTAINERS) else names_of(each) for each in self._holders])

    def has_holder(self, value: Any) -> bool:
        """Whether a value is one of the containers and objects that hold the state."""
        watches = self._of_simple, self._behind_names, self._of_roots
        is_list = type(value) in GROWING and id(value) in self.lists()
        return is_list or any(id(value) in each.holders for each in watches)

    def release(self) -> None:
        """Nothing has to be restored any more."""
        self._holders = []


class _NamedAt(NamedTuple):
    """A line of the user's code that reads a value by a name."""

    name: str
    line: str  # "" for an optimizer, since such a line does not tell what changes in it
    grows: bool  # see Note [What only grows] in reads.py
    container: int | None  # the identity of the value, if it is a container

    @classmethod
    def of(cls, read: Read, value: Any) -> _NamedAt:
        line = "" if isinstance(value, Optimizer) else read.line
        container = id(value) if isinstance(value, CONTAINERS) else None
        return cls(shared_generator(value) or read.label, line, read.only_grows, container)


def _grows(read: Read, value: Any) -> bool:
    """Whether only what the step adds counts. A class may have a number that an object has not yet, or change it."""
    if type(value) is not int or not read.only_grows or not (places := place_of_read(read)):
        return read.only_grows and type(value) in GROWING
    owner, name = places[0].owner, places[0].name
    is_bare = isinstance(owner, (CellType, dict)) and owner is places[0].holder
    return is_bare or only_sets(owner, name)


def _is_alike(tensor: Tensor, then: Any, now: Any) -> bool:
    """Whether a tensor has other memory, and is laid out there as it was, given its places."""
    have_memory = then is not None and now is not None and then[0] and now[0]
    return bool(have_memory and can_move(tensor) and then[1][:4] == now[1][:4])


def _why_not_in_graph(tensor: Tensor) -> SkipReason | None:
    """Why no graph can have a tensor from outside of the step; None if one can."""
    kind = type(tensor)
    if is_wrapper(tensor) or not (isinstance(tensor, nn.Parameter) or kind in (Tensor, nn.Buffer)):
        return SkipReason(f"a {kind.__name__}, which is no plain tensor")
    if tensor.is_nested:
        return SkipReason("a nested tensor, which has no shape", "pad it")
    if tensor.is_inference():
        problem = "a tensor made in inference mode, which does not show who writes to it"
        return SkipReason(problem, "clone it outside of inference mode, or make it in no_grad()")
    if not has_storage(tensor):
        problem = f"a tensor with the layout {tensor.layout}, which has no address"
        return SkipReason(problem, "make it dense before the step, as in x.to_dense()")
    return None


def newly_carried(before: StepState, after: StepState, places: Sequence[Any]) -> dict[str, Place]:
    """What a call has put in the place of tensors, by label: new tensors with the same layout.

    Args:
        places: of the state's tensors before. One that got other memory may share that with what is carried.
    """
    carried_at: dict[str, Place] = {}
    same = [
        fact.value for label, fact in before.facts.items() if isinstance(fact, Same) and after.facts.get(label) == fact
    ]
    pairs = zip(before.tensors, places, before.places_of_tensors())
    moved = {id(tensor) for tensor, then, now in pairs if then != now}
    stay = [each for each in same if isinstance(each, Tensor) and has_storage(each) and id(each) not in moved]
    memory = {*map(storage_id, stay)}
    for label, found_at in before.places.items():
        then, now = before.facts[label], after.facts.get(label)
        if not (isinstance(then, Same) and isinstance(now, Same)) or then == now or type(now.value) is not Tensor:
            continue
        for place, was in reversed(found_at):
            carried = Carried.of(value := place.get(), before.device.type)
            if value is was or carried is None or not any(each is now.value for each in tensors_in(value)):
                continue
            if layout(then.value) == layout(now.value) and not any(storage_id(t) in memory for t in carried.tensors):
                carried_at[label] = place
            break
    return carried_at


def replaced_outside(before: Facts, after: StepState) -> dict[Any, Place]:
    """Where the step finds a small tensor in the place of another one that is laid out alike, by the keys of places.

    What it names counts, such as a total that a loop sets to a new zero; what optimizers and modules have may be large.
    """
    memory = Counter(storage_id(each) for each in after.memory if has_storage(each))
    keys: dict[int, set[Any]] = {}  # of places where a tensor is, by its identity
    for label, found_at in after.places.items():
        fact = after.facts[label]
        key = found_at[-1][0].key if found_at else None
        keys.setdefault(id(fact.value) if isinstance(fact, Same) else 0, set()).add(key)
    replaced: dict[Any, tuple[Place, Carried]] = {}
    for label, found_at in after.places_named.items():
        then, now = before.get(label), after.facts[label]
        if not (found_at and isinstance(then, Same) and isinstance(now, Same)) or then == now:
            continue
        place = found_at[-1][0]
        carried = Carried.of(place.get(), after.device.type)
        if carried is None or not any(each is now.value for each in carried.tensors):  # two places may have one label
            continue
        if type(then.value) is not Tensor or layout(then.value) != layout(now.value):
            continue
        is_small = sum(each.nbytes for each in carried.tensors) <= _MAX_REPLACED
        if is_small and all(is_whole(each) and memory[storage_id(each)] == 1 for each in carried.tensors):
            replaced[place.key] = place, carried
    alone = (
        (place, all(keys.get(id(each), {None}) <= replaced.keys() for each in carried.tensors))
        for place, carried in replaced.values()
    )
    return {place.key: place for place, is_alone in alone if is_alone}


def _may_get_gradient(tensor: Tensor, may: bool) -> bool:
    may = may or tensor.requires_grad or isinstance(tensor, nn.Parameter)  # one that is frozen, maybe for a while
    return not has_history(tensor) and (may or tensor.grad is not None)
