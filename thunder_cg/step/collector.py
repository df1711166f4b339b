"""Collects the facts of values: what is in them, and which tensors, modules, optimizers and hooks they lead to.

Note [Objects]
    The bytecode tells which attributes the step's code reads of an object. Where an object is passed on, it does not.
    Then the attributes that a run has looked up are facts (see attributes.py), and all if the class cannot be watched;
    and so is what a class or a module of the user's defines. Of an object of a package that is constant, only numbers,
    strings and flags are, or its items, if it is a mapping or a sequence; those of PyTorch, such as schedulers, and of
    `contextlib` are like the user's. Modules and optimizers that any of these lead to are looked at, optimizers whole.
    An optimizer may wrap another one, as those of Lightning and Accelerate do.
"""

from __future__ import annotations

import argparse
import contextvars
import enum
import gc
import io
import os
import pickle
import random
import sys
import threading
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from decimal import Decimal, getcontext
from functools import lru_cache, partial, singledispatchmethod
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from thunder_cg.compat.autograd import hooks_of
from thunder_cg.compat.distributed import layout_of_dtensor, local_tensor, makes_dtensors, why_not_in_step
from thunder_cg.compat.guards import dictionary_of, module_dictionaries, names_of
from thunder_cg.compat.tensors import has_storage, version
from thunder_cg.compat.torch import OPERATORS
from thunder_cg.errors import SkipReason
from thunder_cg.step.attributes import Names, hides_state
from thunder_cg.step.facts import ATOMS, Content, Facts, Same, fact_of
from thunder_cg.step.lookups import MISSING, content_of_cell, own, own_attributes, slots_of
from thunder_cg.step.numbers import TAKEN, GroupNumbers
from thunder_cg.step.packages import CONSTANT_PACKAGES, is_installed, is_users, may_change
from thunder_cg.step.places import Carried, CarriedPlace, Place, plain_copy
from thunder_cg.step.reads import compiled_modules, is_data
from thunder_cg.step.snapshot import data_of_c
from thunder_cg.step.watch import Watch

CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_COLLECTIONS = (Mapping, Sequence, Set, ValuesView)
_MAX_ITEMS = 10_000  # of a container that can be compared before each replay
_MAX_ARRAY = 2**16  # bytes of an array that can
_MAX_DEPTH = 8
_MAX_CONSTANTS = 256  # members of enumerations, and classes, of which the facts are kept
_NAMESPACES = types.SimpleNamespace, argparse.Namespace
_LOCKS = type(threading.Lock()), type(threading.RLock()), threading.Condition
_OF_MODULES = ("training", "_parameters", "_buffers", "_modules")  # that each module has in its dictionary
_SLOT = types.MemberDescriptorType
# Modules and packages whose classes in C are looked at, or constant.
_KNOWN_IN_C = {*CONSTANT_PACKAGES, "builtins", "collections", "datetime", "functools", "operator", "pybind11_builtins"}
_KNOWN_IN_C |= {"_abc", "_collections", "_ctypes", "_struct", "_thread", "re", "types", "typing", "weakref", "zoneinfo"}
_NOT_COMPARED = "is not compared before a replay"
_NAME = "name the attribute"
_IMPORT = "import those that the step needs"
_NEXT = "take the next item outside of the step, and pass it as an argument"
_OF_FILE = "read what the step needs, and write what it returns, outside of the step"
PASS = "read what the step needs of it outside of the step, and pass that"
_DEEP = "have the step name what it needs, and not pass on all of {}"
_SCRIPTED = torch.jit.ScriptModule, torch.ScriptModule, torch.ScriptMethod, torch.ScriptObject
_OPAQUE = types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType, type

_DEFINE: Sequence[type | types.ModuleType] = torch, Tensor, nn.Module, Optimizer, nn.functional
_Cached = type(lru_cache(len))
_Link = next(each for each in object.__subclasses__() if each.__name__ == "_lru_list_elem")  # of a bounded cache
_METHODS = staticmethod, classmethod
_FUNCTIONS = types.FunctionType, singledispatchmethod, _Cached, partial, *_METHODS
_random: Any = random.random  # of the generator of the process
_OF_TENSORS = {"grad", "_grad", "_version"}
_WARNED = "__warningregistry__"  # which warnings write
_PARTIAL = "func", "args", "keywords"
_FIELDS_OF_CLASS = attrgetter("__mro__", "__name__", "__qualname__")
_CONTEXT = attrgetter("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


class Collector:
    """Collects the facts of values, and which tensors, modules, optimizers and hooks they lead to."""

    def __init__(
        self, device_type: str, names: Names, carried: Mapping[Any, Place], *, takes_numbers: bool = False
    ) -> None:
        self._device_type, self._names, self._to_carry = device_type, names, carried
        self._takes_numbers = takes_numbers
        self._taken: set[tuple[int, Any]] = set()  # groups and keys, while their optimizer is looked at
        self.kernel_numbers: list[GroupNumbers] = []  # that count as `TAKEN`
        self.facts = Facts()
        self.places: dict[str, list[tuple[Place, Any]]] = {}  # of tensors: where each is, or what it is a part of
        self.carried: dict[Any, CarriedPlace] = {}  # by the place's key
        self.tensors: dict[int, Tensor] = {}
        self.roots: dict[int, tuple[str, Any]] = {}  # modules and optimizers, whose facts are many
        self.averages: list[AveragedModel] = []  # see averages.py
        self.watch = Watch()
        self.holders: list[Any] = []  # of values, which a step may change
        self.kinds: dict[type, None] = {}  # of the user's objects
        self.compiled_kinds: dict[type, None] = {}  # those of them that what is compiled may read
        self.objects: list[Any] = []
        self.in_compiled = False
        self.objections: list[SkipReason] = []  # why no graph would be right
        self.hooked: list[SkipReason] = []  # the same of hooks and wrappers, whose Python may be why something changes
        self._hooks = 0
        self._forwards: set[type] = set()
        self._objects: set[int] = set()  # that have been looked at, since they may refer to each other

    def begin(self) -> Watch:
        """Watches what facts were collected from."""
        names = [each for each in map(names_of, self.holders) if each]
        self.watch.holders = {*map(id, self.holders), *map(id, names)}
        return self.watch.begin(self.facts)

    def add(self, label: str, value: Any, depth: int = 0, places: tuple[Place, ...] = ()) -> None:
        """Adds a value.

        Args:
            places: where it is. The last one is its own, unless it is an item of a tuple.
        """
        if not (self._to_carry and self.add_carried(label, value, places)):
            self._add(label, value, depth, places)

    def _add(self, label: str, value: Any, depth: int, places: tuple[Place, ...]) -> None:
        add, *fix = next(row for is_of, *row in _KINDS if is_of(value))
        if depth >= _MAX_DEPTH and add in _DEEPER and (self._is_compared_whole(value) or _is_users(value)):
            end = label.partition(".")[0].partition("[")[0]
            problem = f"is {depth} levels below what the step reads, and fewer are compared before a replay"
            self._refuse(label, value, problem, _DEEP.format(end))
        elif fix:
            self._refuse(label, value, add.format(type(value).__name__), *fix)
        else:
            add(self, label, value, depth, places)

    def _refuse(self, label: str, value: Any, problem: str, fix: str) -> None:
        self.facts[label] = Same(value)
        self._object(f"{label} {problem}", fix)

    def _object(self, problem: str, fix: str) -> None:
        self.objections.append(SkipReason(problem, fix))

    def _is_compared_whole(self, value: Any) -> bool:
        """Whether it is a container, or an attribute of an object of its class has been looked up."""
        return isinstance(value, CONTAINERS) or _is_collection(value) or bool(self._names.get(type(value)))

    def _add_other(self, label: str, value: Any, *_: Any) -> None:
        self.facts[label] = fact_of(value)

    def _add_atom(self, label: str, value: Any, depth: int, *_: Any) -> None:
        self.facts[label] = fact_of(value)
        if _is_users_atom(value):
            self._add_own_attributes(label, value, depth)
            if not isinstance(value, enum.Enum):
                self.add_class(label, value, depth)

    def _add_found_root(self, label: str, value: Any, *_: Any) -> None:
        self.facts[label] = Same(value)
        self.roots.setdefault(id(value), (label, value))

    def _add_collection(self, label: str, value: Any, depth: int, *_: Any) -> None:
        self.facts[label] = Same(value)
        copied: Any = dict if isinstance(value, Mapping) else list
        if len(value) <= _MAX_ITEMS:
            self.watch.value(partial(_items_of, value))
        self._add_container(label, value if len(value) > _MAX_ITEMS else copied(value), depth)

    def _add_function(self, label: str, value: Any, depth: int, *_: Any) -> None:
        self.facts[label] = Same(value)
        if isinstance(value, types.FunctionType):
            if not is_installed(value.__code__.co_filename):
                self.facts[f"the name of {label}"] = Content(self.watch.function(value))
                self._add_own_attributes(label, value, depth)
            elif isinstance(vars(value).get("registry"), types.MappingProxyType):  # of singledispatch
                self._add_own_attributes(label, value, depth)
            return
        if isinstance(value, singledispatchmethod):
            self.add(label, value.dispatcher, depth)
        elif isinstance(value, _Cached):
            self._add_cached(label, value, depth)
        elif isinstance(value, partial):
            for name, field in zip(_PARTIAL, self.watch.fields(attrgetter(*_PARTIAL), value)):
                self.add(f"{label}.{name}", field, depth + 1)
        elif isinstance(value, _METHODS):
            self.add(f"{label}.__func__", value.__func__, depth + 1)
        else:  # a method of C
            self.add(f"{label}.__self__", value.__self__, depth + 1)
        if isinstance(value, (_Cached, partial, *_METHODS)):
            self._add_own_attributes(label, value, depth)

    def _add_referent(self, label: str, value: Any, depth: int, *_: Any) -> None:
        self.facts[label] = Same(value)
        refers_to = _referent_of(value)
        assert refers_to is not None
        referent = refers_to()
        self.watch.value(lambda: Same(refers_to()))  # an identity may be another object's later
        self.add(f"what {label} refers to", referent, depth + 1)
        self.add_class(label, value, depth)

    def add_carried(self, label: str, value: Any, places: tuple[Place, ...]) -> bool:
        """Whether the value is carried: see Note [Carried tensors] in places.py."""
        if not places or places[-1].key not in self._to_carry or places[-1].get() is not value:
            return False
        if (carried := Carried.of(value, self._device_type)) is None:
            return False
        self.facts[label] = carried.fact
        self.facts[f"what {label} is in"] = Same(places[-1].holder)
        self.carried[places[-1].key] = CarriedPlace(label, places[-1], carried.fact)
        return True

    def _add_cached(self, label: str, value: Any, depth: int) -> None:
        """What a function of `lru_cache` has cached: Python does not run for it, so nobody sees what it has read."""
        is_bounded = value.cache_parameters()["maxsize"] is not None
        for cached in gc.get_referents(value):
            if type(cached) is not dict or cached is vars(value):
                continue
            if is_bounded and not all(isinstance(each, _Link) for each in cached.values()):
                continue  # it is a result
            self.watch.names(cached)
            self.facts[f"what {label} has cached"] = Content([(fact_of(k), fact_of(v)) for k, v in cached.items()])
            results = [*cached.values()]
            if results and is_bounded:
                if value.cache_parameters()["typed"]:
                    self._object(f"what {label} has cached is not compared before a replay", "drop typed=True")
                    continue
                results = [_call_by_key(value, key) for key in cached]
            for i, result in enumerate(results):
                self.add(f"what {label} has cached ({i})", result, depth + 1)

    def _add_tensor(self, label: str, tensor: Tensor, depth: int, places: tuple[Place, ...]) -> None:
        self.facts[label] = Same(tensor)
        if type(tensor) is Tensor:
            self.places[label] = [(place, place.get()) for place in places]
        self._add_own_attributes(label, tensor, depth)
        if local_tensor(tensor) is not tensor:
            parts = self.watch.value(partial(_parts_of, tensor))
            self.facts[f"the part of {label} on this rank"] = Content(parts)
        if tensor.device.type == self._device_type:
            self.tensors.setdefault(id(tensor), tensor)
        elif not tensor.is_inference():  # a graph has its values baked in
            self.facts[f"{label} (version)"] = self.watch.value(partial(version, tensor))
        if tensor.device.type == "cpu" != self._device_type and has_storage(tensor):  # its memory may be an array's
            self._add_tensor_on_host(label, tensor, depth)
        self.note_hooks(label, hooks_of(tensor))

    def _add_tensor_on_host(self, label: str, tensor: Tensor, depth: int) -> None:
        if tensor.nbytes <= _MAX_ARRAY:
            self._add_content(label, tensor, partial(_bytes_of, tensor))
        elif depth == 0:
            problem = f"{label} is a tensor of {tensor.nbytes:,} bytes on the CPU, of which a graph has the values"
            limit = f"up to {_MAX_ARRAY:,} are compared before a replay"
            self._object(f"{problem} baked in, and {limit}", f"move it to {self._device_type}")

    def _add_own_attributes(self, label: str, value: Any, depth: int) -> None:
        """Those that somebody has given to a tensor, a function, or a value of a class of its own."""
        attributes = own(value, "__dict__")  # if it is empty, somebody may give it the first one
        if id(value) in self._objects:
            return
        if may_change(type(value)) or (attributes is not MISSING and attributes):  # somebody may give it others
            self.watch.fields(_class_and_attributes, value)
        if attributes is MISSING or attributes is value:  # a dictionary, whose items are its attributes
            return
        self._objects.add(id(value))
        self.holders.append(attributes)
        self.watch.given_attributes(attributes)
        for name, attribute in attributes.items():
            self.add(f"{label}.{name}", attribute, depth + 1)

    def _add_value(self, label: str, value: Any, depth: int, *_: Any) -> None:
        """See Note [Values that nobody reports] in watch.py."""
        self.facts[label] = Same(value)
        data = data_of_c(value)
        if data is None or data is value:  # else `multiprocessing` shares it, and has a lock among its attributes
            self._add_own_attributes(label, value, depth)
        if (nbytes := getattr(value, "nbytes", 0)) > _MAX_ARRAY:
            problem = f"is an array of {nbytes:,} bytes, and up to {_MAX_ARRAY:,} are compared before a replay"
            self._refuse(label, value, problem, "make it a tensor before the step")
            return
        if getattr(getattr(value, "dtype", None), "hasobject", False):
            problem = "is an array of objects, which are not compared before a replay"
            self._refuse(label, value, problem, "make it a list")
        get = _content_of(value)
        assert get is not None
        self._add_content(label, value, get)

    def _add_content(self, label: str, value: Any, get: Callable[[], Any]) -> None:
        self.holders.append(value)
        self.facts[f"what {label} holds"] = Content(self.watch.value(get))

    def _add_object(self, label: str, value: Any, depth: int, *_: Any) -> None:
        """See Note [Objects]."""
        self.facts[label] = Same(value)
        is_open = _may_change(value)
        is_looked_at = is_open or depth == 0 or _package_of(type(value)) in sys.stdlib_module_names
        if id(value) in self._objects or depth >= _MAX_DEPTH or not is_looked_at:
            return
        self._objects.add(id(value))
        self.holders.append(value)
        self.add_class(label, value, depth)
        attributes = own_attributes(value)
        if is_open and (names := self._names_of(value)) is not None:
            attributes = self._only(names, value, attributes)
        else:
            self._watch_slots(value)
            if own(value, "__dict__") is not MISSING:
                self._watch(value, names_of(value))
        for name, attribute in attributes.items():
            if is_open or isinstance(attribute, ATOMS):
                self.add(f"{label}.{name}", attribute, depth + 1, (Place.of(value, name),))

    def _names_of(self, value: Any) -> Iterable[str] | None:
        """The attributes of a user's object that count; None for all of them."""
        (self.compiled_kinds if self.in_compiled else self.kinds)[type(value)] = None
        self.objects.append(value)
        return self._names.get(type(value))

    def _watch_slots(self, value: Any) -> None:
        """Nobody reports what is written to them."""
        if slots := slots_of(type(value)):
            self._only(slots, value, own_attributes(value))

    def _only(self, names: Iterable[str], value: Any, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Those of an object's attributes with these names, which are compared one by one before a replay."""
        found = {name: attributes.get(name, MISSING) for name in names}
        to_carry = self._to_carry
        not_carried = {n: v for n, v in found.items() if not (to_carry and self._carries(Place.of(value, n).key))}
        self.watch.attributes(value, not_carried)
        return {name: attribute for name, attribute in found.items() if attribute is not MISSING}

    def _carries(self, key: tuple[int, Any]) -> bool:
        """Whether what is at a place is carried. Anything else there is compared, as it is elsewhere."""
        place = self._to_carry.get(key)
        return place is not None and Carried.of(place.get(), self._device_type) is not None

    def _watch(self, value: Any, names: dict[Any, Any]) -> None:
        """Has a replay notice what is written to an object or a dictionary, besides what may change there."""
        may_change = {name for name in names if (id(names), name) in self._taken}
        may_change |= {name for name in names if self._carries((id(names), name))} if self._to_carry else set()
        if not may_change:
            self.watch.names(value)
            return
        self.watch.attributes(value, {name: each for name, each in names.items() if name not in may_change})
        self.watch.value(partial(list, names))

    def add_class(self, label: str, value: Any, depth: int = 0) -> None:
        """What an object has of its class."""
        if may_change(type(value)):
            self._add_names(f"type({label})", type(value), depth)

    def _add_names(self, label: str, value: types.ModuleType | type, depth: int, *_: Any) -> None:
        """A class or a module, and what it defines; of a class of a package its data, of a module plain values."""
        self.facts[label] = Same(value)
        if isinstance(value, type) and may_change(value):
            bases, *called = self.watch.fields(_FIELDS_OF_CLASS, value)
            self.facts[f"the bases of {label}"] = Content([*map(Same, bases)])
            self.facts[f"the name of {label}"] = (*called,)
        kinds = (value, type(value)) if isinstance(value, type) else ()
        defined: list[Any] = [each for kind in kinds for each in kind.__mro__] or [value]
        new = [each for each in defined if id(each) not in self._objects and may_change(each)]
        self._objects.update(map(id, new))  # what one of them leads to may lead to the next one, at a greater depth
        for each in new:
            self.holders.append(each)
            names = dictionary_of(each)
            self.watch.names(names)
            where = label if each is value else f"{each.__name__} of {label}"
            counts = (lambda _: True) if is_users(each) else is_data if isinstance(each, type) else _is(*ATOMS)
            for name, member in [*names.items()]:
                is_lock = isinstance(member, _LOCKS) and name not in self._names.get(each, ())
                if is_lock or isinstance(member, _SLOT):  # others may take a lock; what the step names is found by that
                    continue
                if isinstance(member, types.FunctionType) if name.startswith("__") else counts(member):
                    self.add(f"{where}.{name}", member, depth + 1)

    def _add_container(self, label: str, value: Any, depth: int, places: tuple[Place, ...] = ()) -> None:
        self.facts[f"type({label})"] = Same(type(value))
        self.facts[f"len({label})"] = len(value)
        if len(value) > _MAX_ITEMS:
            problem = f"{label} has {len(value):,} items, and up to {_MAX_ITEMS:,} are compared before a replay"
            self._object(problem, "read what the step needs of it before the step")
            return
        self.holders.append(value)
        self.add_class(label, value, depth)
        if isinstance(value, deque):
            self.facts[f"{label}.maxlen"] = value.maxlen
        self.watch.container(value, [i for i in range(len(value)) if self._carries((id(value), i))])
        self._add_own_attributes(label, value, depth)
        if isinstance(value, dict):
            self._watch(value, value)
            if isinstance(value, defaultdict):
                self.watch.value(partial(getattr, value, "default_factory"))
                self.add(f"{label}.default_factory", value.default_factory, depth + 1)
            if isinstance(value, OrderedDict):  # which nobody reports if only the order changes
                self.watch.value(lambda: [*map(id, OrderedDict.keys(value))])
            items = plain_copy(value)
            keys = [Same(key, is_key=True) if isinstance(key, Tensor) else fact_of(key) for key in items]
            self.facts[f"the order of {label}"] = Content(keys)
            for i, (key, item) in enumerate(items.items()):
                name = f"{label}[{key!r}]" if isinstance(key, ATOMS) else f"{label}[{i}]"
                if (id(value), key) in self._taken:
                    self.facts[name] = TAKEN
                    continue
                self.add(name, item, depth + 1, (*places, Place(value, key)))
                if isinstance(key, Tensor):
                    self.facts[f"key {i} of {label}"] = Same(key)
                    if key.device.type == self._device_type:
                        self.tensors.setdefault(id(key), key)
                elif not isinstance(key, (Tensor, *ATOMS)) or _is_users_atom(key):
                    self.add(f"key {i} of {label}", key, depth + 1)
        else:
            for i, item in enumerate(value):
                own_place = (Place(value, i),) if isinstance(value, list) else ()
                self.add(f"{label}[{i}]", item, depth + 1, (*places, *own_place))

    def add_root(self, label: str, root: Any) -> None:
        """All facts of a module or an optimizer."""
        if isinstance(root, Optimizer):
            self.holders.append(root)
            self.watch.names(root)
            self.note_hooks(label, hooks_of(root))
            numbers = GroupNumbers.all_of(root) if self._takes_numbers else []
            self.kernel_numbers += numbers
            self._taken = {(id(each.group), key) for each in numbers for key in each.keys}
            self._add_attributes(label, vars(root), vars(root), ())
            self._taken = set()
            return
        compiled = compiled_modules(root)
        for path, module in root.named_modules():
            self.in_compiled = id(module) in compiled
            where = f"{label}.{path}" if path else label
            if isinstance(module, torch.jit.ScriptModule):
                self._add(where, module, 0, ())
                continue
            self.facts[f"type({where})"] = Same(type(module))
            self.add_class(where, module)
            self._add_forward(type(module))
            self.facts[f"{where}.training"] = fact_of(module.training)
            attributes, parameters, buffers, modules = module_dictionaries(module)
            looked_up: Mapping[str, Any] = attributes
            if may_change(type(module)) and (names := self._names_of(module)) is not None:
                looked_up = self._only({*_OF_MODULES, *names}, module, attributes)
            else:
                self._watch_slots(module)
                self._watch(module, attributes)
            self._watch(buffers, buffers)
            self.watch.names(parameters, modules)
            self.holders += [attributes, parameters, buffers, modules]
            if (reason := why_not_in_step(module)) is not None:
                self.hooked.append(reason._replace(problem=f"{where}: {reason.problem}"))
            self.note_hooks(where, hooks_of(module))
            for names in (parameters, buffers):
                for name, tensor in names.items():
                    self.add(f"{where}.{name}", tensor, 0, (Place(names, name),))
            if isinstance(module, AveragedModel):
                self._add_averages(where, module)
            self._add_attributes(where, attributes, looked_up, (parameters, buffers, modules))
        self.in_compiled = False

    def add_definitions(self) -> None:
        """What PyTorch's classes define, and its functions that modules call. Somebody may replace one."""
        self.watch.names(*map(dictionary_of, _DEFINE))
        self.facts |= _definitions()

    def _add_forward(self, kind: type) -> None:
        """What a class of modules runs. Somebody may replace that of a package, too."""
        if kind in self._forwards:
            return
        self._forwards.add(kind)
        forward = None
        for each in kind.__mro__:
            names = dictionary_of(each)
            self.watch.names(names)
            if "forward" in names:
                forward = names["forward"]  # to look it up may run Python
                break
        self.facts[f"{kind.__name__}.forward (the {len(self._forwards)}. class)"] = Same(forward)

    def _add_attributes(self, where: str, own: Any, attributes: Mapping[str, Any], besides: Sequence[Any]) -> None:
        for name, attribute in attributes.items():
            if "hooks" in name or name in ("training", "_opt_called") or any(attribute is each for each in besides):
                continue  # other facts, or none that a step depends on
            self.add(f"{where}.{name}", attribute, 1, (Place(own, name),))

    def _add_averages(self, label: str, averages: AveragedModel) -> None:
        counter = averages.n_averaged
        is_positive = self.facts[f"{label}.n_averaged > 0"] = bool(counter > 0)
        self.watch.value(partial(version, counter))
        if is_positive:
            self.averages.append(averages)

    def note_hooks(self, where: str, hooks: Iterable[Any]) -> None:
        """Why each of them keeps the step in Python."""
        for hook in hooks:
            self.facts[f"hook {self._hooks} of {where}"] = Same(hook)
            self._hooks += 1
            if makes_dtensors(hook):
                continue
            code = getattr(hook, "__code__", None)
            at = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
            fix = "remove it, and do in the step what it does"
            if "torch/distributed/" in at:
                fix = "take thunder.distributed.ddp or fsdp instead"
            elif type(hook).__module__ in ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"):
                fix = f"take torch.nn.utils.parametrizations.{type(hook).__module__.rpartition('.')[2]} instead"
            elif isinstance(hook, BasePruningMethod):
                fix = "take torch.nn.utils.parametrize with a module that multiplies by the mask instead"
            self.hooked.append(SkipReason(f"{where} has a hook{at}, which runs Python in each step", fix))


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_graph(value: Any) -> bool:
    return isinstance(value, Node) and type(value).__name__ != "AccumulateGrad"


# What a value is, and the method that collects its facts, or why no graph would be right, with the fix. The first one
# counts.
_KINDS: Sequence[tuple[Any, ...]] = (
    (lambda value: type(value) in weakref.ProxyTypes, Collector._add_referent),  # it passes for what it refers to
    (lambda value: value is MISSING or isinstance(value, ATOMS), Collector._add_atom),
    (_is(Tensor), Collector._add_tensor),
    (lambda value: value is sys.modules, "leads to all modules, which are not compared before a replay", _IMPORT),
    (_is(*_SCRIPTED), f"is of TorchScript, whose content {_NOT_COMPARED}", "take the Python that it was made of"),
    (_is(nn.Module, Optimizer), Collector._add_found_root),
    (_is(*CONTAINERS), Collector._add_container),
    (_is(types.ModuleType, type), Collector._add_names),
    (lambda value: isinstance(value, _FUNCTIONS) or _is_bound(value), Collector._add_function),
    (_is(*_LOCKS), "is a lock, which no replay would take", "call what takes it outside of the step"),
    (_is(_SLOT), f"is a slot, and what objects have there {_NOT_COMPARED}", _NAME),
    (lambda value: _referent_of(value) is not None, Collector._add_referent),
    (lambda value: _content_of(value) is not None, Collector._add_value),
    (lambda value: _is_collection(value), Collector._add_collection),
    (lambda value: _is_read(value), "is a {}, which no replay would advance", _OF_FILE),
    (lambda value: _is_iterator(value), "is a {}, which no replay would advance", _NEXT),
    (lambda value: _looks_up_gradients(value), f"is an attrgetter of what {_NOT_COMPARED}", f"{_NAME} in the step"),
    (_is_graph, f"is a node of autograd's graph, whose content {_NOT_COMPARED}", "make the graph in the step"),
    (lambda value: _is_opaque(value), f"is a {{}}, whose content {_NOT_COMPARED}", PASS),
    (lambda value: is_object(value), Collector._add_object),
    (lambda _: True, Collector._add_other),
)
_DEEPER = {Collector._add_container, Collector._add_collection, Collector._add_object}


def facts_of(value: Any) -> tuple[tuple[str, Any], ...]:
    """Those of a value, and of what it has. The same ones, if nothing of an enumeration or a class has changed."""
    facts, watch, _ = _of_constants.get(id(value), ((), None, None))
    if watch is not None and watch.is_untouched():
        return facts
    collector = Collector("", {}, {})
    collector.add("value", value)
    facts = (*collector.facts.items(),)
    if isinstance(value, (enum.Enum, type)):
        if len(_of_constants) == _MAX_CONSTANTS:
            _of_constants.clear()
        _of_constants[id(value)] = facts, collector.watch.begin(collector.facts), value
    return facts


def _definitions() -> Facts:
    """What PyTorch's classes and functions are. The same facts, if nothing of it has changed since."""
    if not (_defined and _defined[-1].is_untouched()):
        watch, facts = Watch(), Facts()
        for each in _DEFINE:
            watch.names(names := dictionary_of(each))
            found = [(n, Same(v)) for n, v in names.items() if not isinstance(v, types.ModuleType) and n != _WARNED]
            facts[f"what {each.__name__} defines"] = Content(found)
        _defined[:] = [watch.begin(facts)]
    return _defined[-1].facts


_defined: list[Watch] = []  # the last one
_of_constants: dict[int, tuple[tuple[tuple[str, Any], ...], Watch, Any]] = {}  # by identity


def is_simple(value: Any, device_type: str) -> bool:
    """Whether the value's identity, or an equal value, says all that a step can read of it."""
    if type(value) in weakref.ProxyTypes:
        return False
    if isinstance(value, Tensor):
        return value.device.type == device_type and not vars(value)
    if isinstance(value, types.FunctionType):
        return not vars(value)
    if _is_users_atom(value) or _is_bound(value):
        return False
    if isinstance(value, (_Cached, singledispatchmethod, Decimal, *_METHODS)):
        return False
    if value is MISSING:
        return True
    if isinstance(value, (nn.Module, Optimizer)):
        return True  # its facts are those of a root
    is_bare = isinstance(value, (types.ModuleType, type))
    return not (isinstance(value, CONTAINERS) or is_object(value) or (is_bare and may_change(value)))


def _content_of(value: Any) -> Callable[[], Any] | None:
    """How to get what a value holds, if that changes without a trace: an array, or a generator of random numbers.

    Python's generator of the process has `random_states`.
    """
    if isinstance(value, random.Random) and value is not _random.__self__:
        return value.getstate
    is_of_cpu = isinstance(value, torch.Generator) and value.device.type == "cpu"  # a graph draws from no other of GPUs
    if is_of_cpu and value is not torch.default_generator:
        return lambda: value.get_state().numpy().tobytes()
    if isinstance(value, array):
        return value.tobytes
    if isinstance(value, Decimal):
        return lambda: (str(value), _CONTEXT(getcontext()))
    if isinstance(value, (bytearray, memoryview)):
        return lambda: bytes(value)
    if (data := data_of_c(value)) is not None:
        return lambda: bytes(memoryview(data))
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return lambda: (value.shape, value.dtype, value.tobytes())
    generators = numpy.random.Generator, numpy.random.RandomState
    if isinstance(value, generators):
        return lambda: pickle.dumps(value)
    return None


def _bytes_of(tensor: Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _referent_of(value: Any) -> Callable[[], Any] | None:
    """How to get what a value only refers to."""
    if type(value) in weakref.ProxyTypes:
        return partial(_proxied, value)
    if isinstance(value, contextvars.ContextVar):
        return partial(_get, value)
    if isinstance(value, types.CellType):
        return partial(content_of_cell, value)
    if isinstance(value, threading.local):
        return partial(vars, value)  # of this thread
    return value if type(value) is weakref.ref else None


def _get(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return MISSING


def _looks_up_gradients(value: Any) -> bool:
    """Whether nothing in bytecode says that it is called for the gradient, or the version, of a tensor."""
    return type(value) is attrgetter and not _OF_TENSORS.isdisjoint(".".join(value.__reduce__()[1]).split("."))


def _is_collection(value: Any) -> bool:
    return isinstance(value, _COLLECTIONS) and value is not os.environ and not _is_users(value)


def _proxied(proxy: Any) -> Any:
    try:
        return proxy.__init__.__self__
    except ReferenceError:  # it is gone
        return None


def _is_opaque(value: Any) -> bool:
    """Whether a value may hold anything that is not looked at, in C of Python's library or of a package."""
    if not is_object(value) or isinstance(value, (io.IOBase, BaseException, random.Random)):
        return False
    kind = hides_state(type(value))
    return kind is not None and _package_of(kind) not in _KNOWN_IN_C


def _is_read(value: Any) -> bool:
    """Whether it is a file, or what passes for one, from which somebody may read. Others are for what is written."""
    if not isinstance(value, io.IOBase) or value in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        return False
    return not value.closed and value.readable()


def _is_iterator(value: Any) -> bool:
    """Whether somebody else's code keeps how far the value has been read."""
    is_queue = hasattr(type(value), "get_nowait")
    return (is_queue or isinstance(value, Iterator)) and not isinstance(value, io.IOBase) and not _is_users(value)


def _call_by_key(function: Any, key: Any) -> Any:
    """What a function of `lru_cache` has cached for a key, since the dictionary of a bounded one shows no results."""
    values = iter(key if type(key) is tuple else (key,))
    args = [*takewhile(lambda value: type(value) is not object, values)]  # this stands before the keywords
    return function(*args, **dict(zip(values, values)))


def is_object(value: Any) -> bool:
    """Whether a value has attributes that can be looked at: it is no function, operator, class or module."""
    has_name = callable(value) and own(value, "__qualname__") is not MISSING
    return not (has_name or isinstance(value, (*_OPAQUE, *ATOMS, *OPERATORS)))


def _is_users_atom(value: Any) -> bool:
    """Whether its class may have attributes, and give it some."""
    return isinstance(value, ATOMS) and type(value) not in ATOMS and may_change(type(value))


def _is_bound(value: Any) -> bool:
    """Whether a value is a method of C with its object, such as that of a dictionary."""
    is_method = isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType))
    return is_method and not isinstance(value.__self__, (types.ModuleType, type, type(None)))


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_users(value: Any) -> bool:
    """Whether a value is a namespace, or its class is not of an installed package."""
    return isinstance(value, _NAMESPACES) or is_users(type(value))


def _may_change(value: Any) -> bool:
    """Whether the attributes of a value are looked at, as those of a GradScaler and a `nullcontext` are, too."""
    is_of_library = _package_of(type(value)) in ("torch", "contextlib") and own(value, "__dict__") is not MISSING
    return isinstance(value, _NAMESPACES) or may_change(type(value)) or is_of_library


def _class_and_attributes(value: Any) -> tuple[Any, Any]:
    return type(value), own(value, "__dict__")


def _items_of(value: Any) -> list[Any]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return [(fact_of(key), fact_of(item)) for key, item in items]


def _parts_of(tensor: Tensor) -> list[Any]:
    """What a DTensor is made of."""
    return [Same(local_tensor(tensor)), Same(layout_of_dtensor(tensor))]
