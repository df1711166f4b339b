"""The checks of one prologue, made cheaper, and the look-up of the values that the prologue would return."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch

from thunder_cg.compat.compiled import (
    is_data_parallel,
    module_buffers,
    module_cache,
    module_parameters,
    original_module,
)
from thunder_cg.compat.containers import CONSTANTS, check_group, check_length
from thunder_cg.compat.guards import dictionary_of, module_dictionaries, names_of
from thunder_cg.compat.settings import without_torch_functions
from thunder_cg.compat.thunder import BoundSymbol, PrimIDs, ThunderModule, from_trace, prims, tracectx, tree_flatten
from thunder_cg.executor import executor
from thunder_cg.fastpath.prologue import Lookup, Metadata, PrologueChecks, unused_name
from thunder_cg.fastpath.state import MISS, AttributeGuard, GlobalStateGuard, ParameterCache, Unsupported, getter
from thunder_cg.runtime.tensors import addresses

_LITERALS = (bool, int, float, complex, str, *CONSTANTS)
_FLAT = {*_LITERALS, torch.nn.Parameter, torch.Tensor}  # types of arguments that are no containers


class PrologueGuard:
    """All checks of one prologue but those of tensors' metadata, and the look-up of what the prologue returns.

    It does not own the module. ``order`` has names of tensors in the order that the caller would like best.
    `Unsupported` if the prologue cannot be guarded this way.

    Attributes:
        place: the position of each value in ``values()``, by name.
        keywords: None if arguments have to be looked into. Else ``values()`` begins with all positional arguments,
            and the keyword arguments of these names follow; a call that has no others passes all checks of arguments.
        parameters_key: in ``parameters_cache``, of what follows the arguments in ``values()``.
    """

    def __init__(
        self, module: ThunderModule, checks: PrologueChecks, order: Sequence[str], parameters_cache: ParameterCache
    ) -> None:
        if not all(metadata.is_static for metadata in checks.metadata.values()):
            raise Unsupported("Thunder checks sizes that are known only at run time")
        if "" in checks.cache_info:
            raise Unsupported("Thunder checks the state of the thread in a form that is not known here")
        self._module = ref(module)
        self._checks = checks
        sorted_checks = _ModuleChecks(module, checks)
        self.metadata: Mapping[str, Metadata] = checks.metadata
        self.inputs, self.passed_on = checks.returned
        wanted = dict.fromkeys([*order, *self.inputs, *self.passed_on, *self.metadata])
        tensors = [name for name in wanted if name in sorted_checks.tensors]
        arguments = sorted((name for name in wanted if name not in sorted_checks.tensors), key=self._argument_order)
        dictionaries = module_parameters(module), module_buffers(module), None
        parameters, buffers, others = ([n for n in tensors if sorted_checks.home(n) is home] for home in dictionaries)
        self.place = {name: i for i, name in enumerate([*arguments, *parameters, *buffers, *others])}
        keys = [[checks.lookups[name].key for name in names] for names in (parameters, buffers, others)]
        self.parameters_cache = parameters_cache
        self.parameters_key = parameters_cache.add(keys[0], keys[1])
        self._others = list(zip(keys[2], [checks.lookups[name].prim is PrimIDs.UNPACK_BUFFER for name in others]))
        self._arguments = sorted_checks.function(sorted_checks.others, arguments)
        shared = checks.cache_info.get("alias_tensor_indices")
        self.sharing_is_expected = partial(_shares, shared) if shared else _nothing_is_shared
        self.keywords = None if others else self._keywords(sorted_checks.others, arguments)
        self.positional = len(arguments) - len(self.keywords or ())
        self.global_state = GlobalStateGuard(checks.cache_info, synchronizes=is_data_parallel(original_module(module)))
        self.attributes = sorted_checks.attribute_guard()

    def _argument_order(self, name: str) -> tuple[bool, Any]:
        lookup = self._checks.lookups.get(name)
        if lookup is None:
            raise Unsupported(f"Thunder takes the value {name!r} from a place that is not known here")
        is_positional = lookup.prim is PrimIDs.UNPACK_GETITEM and lookup.owner == "args"
        return not is_positional, lookup.key if is_positional else 0  # positional arguments come first, in their order

    def _keywords(self, checks: Sequence[BoundSymbol], arguments: Sequence[str]) -> tuple[str, ...] | None:
        """See the attribute."""
        checks = [each for each in checks if each.sym.name != check_group.name]  # a recording goes before its groups
        arity = {self._checks.arity_name(symbol): symbol.args[1] for symbol in checks}
        if arity.keys() != {"args", "kwargs"}:
            return None
        keys: dict[str | None, list[Any]] = {"args": [], "kwargs": []}
        for name in arguments:
            lookup = self._checks.lookups[name]
            if lookup.prim is not PrimIDs.UNPACK_GETITEM or lookup.owner not in keys:
                return None
            keys[lookup.owner].append(lookup.key)
        all_positional = keys["args"] == list(range(arity["args"]))
        return tuple(keys["kwargs"]) if all_positional and len(keys["kwargs"]) == arity["kwargs"] else None

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The values that the prologue would return, at their ``place``; None if a check fails."""
        if not (self.global_state.holds() and self.attributes.holds() and self.sharing_is_expected(args, kwargs)):
            return None
        try:
            return self.look_up(args, kwargs)
        except Exception:  # as in Thunder: the prologue of another cache entry may pass
            return None

    def look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """`values` without the checks of state, attributes and sharing. Raises if another check fails."""
        cache = self.parameters_cache
        values = [*self._arguments(*args, **kwargs)]
        values += (cache if cache.unchanged() else cache.renewed())[self.parameters_key]
        module = self._module()
        assert module is not None
        for key, is_buffer in self._others:
            values.append(module.get_buffer(key) if is_buffer else module.get_parameter(key))
        return values

    def sharing_check(self, values: list[Any], static: Sequence[str]) -> Callable[[list[Any]], bool] | None:
        """As `sharing_is_expected`, of the values of calls that have these arguments where they are in ``values``.

        Only the others are looked at: of hundreds of arguments, most are parameters and caches. None if arguments are
        expected to share memory.
        """
        if self.sharing_is_expected is not _nothing_is_shared:
            return None
        fixed = {self.place[name] for name in static}
        arguments = range(self.positional + len(self.keywords or ()))
        tensors = [i for i in arguments if type(values[i]) is torch.Tensor and values[i].layout is torch.strided]
        where = {*addresses(values[i] for i in tensors if i in fixed)}
        others = [i for i in tensors if i not in fixed]
        pick, count = getter(others), len(others)

        def are_apart(values: list[Any]) -> bool:
            with without_torch_functions():
                found = {*addresses(pick(values))}
            return len(found) == count and where.isdisjoint(found)

        return are_apart

    def picker(self, names: Sequence[str]) -> Callable[[list[Any]], Sequence[Any]]:
        """What picks the values called ``names`` out of ``values()``."""
        if missing := [name for name in names if name not in self.place]:
            raise Unsupported(f"Thunder takes the values {missing} from places that are not known here")
        return getter([self.place[name] for name in names])


def _nothing_is_shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no two tensors among the arguments share memory."""
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
        return True
    _, found = _memory((*args, *kwargs.values()), {})  # in whatever order
    return len(set(found)) == len(found)


def _shares(expected: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether exactly these arguments share memory: positions by commas, groups by hyphens, as Thunder writes them."""
    groups: dict[int, list[str]] = {}
    for position, address in zip(*_memory(args, kwargs)):
        groups.setdefault(address, []).append(str(position))
    return "-".join(",".join(group) for group in groups.values() if len(group) > 1) == expected


def _memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The positions of the plain tensors among the flattened arguments, and where their memory begins."""
    leaves = tree_flatten((args, kwargs))[0] if kwargs or not _FLAT.issuperset(map(type, args)) else args
    with without_torch_functions():  # a default device takes longer than what it looks at
        places = [i for i, leaf in enumerate(leaves) if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
        return places, addresses(map(leaves.__getitem__, places))


class _ModuleChecks:
    """Sorts what a prologue checks by what has to change before a check can fail."""

    def __init__(self, module: ThunderModule, checks: PrologueChecks) -> None:
        self._module = module
        self._checks = checks
        self._modules: dict[str, torch.nn.Module] = {}
        self._objects: dict[str, Any] = {}  # others, that are attributes of what is watched
        self._watched: dict[int, Any] = {}
        self._literals: set[str] = set()  # values that change only together with what is watched
        self._containers: dict[str, Any] = {}  # lists and dicts that can be replaced only together with it
        self.tensors: set[str] = set()  # names of the module's parameters and buffers
        for name, lookup in checks.lookups.items():
            self._read(name, lookup)
        self.others: list[BoundSymbol] = []  # checks that have to be made at each call
        self._attributes: list[BoundSymbol] = []  # checks that read only what is watched
        for symbol in checks.others:
            self._watch_container(symbol)
            names = {proxy.name for proxy in symbol.flat_proxy_args}
            (self._attributes if names and names <= self._literals else self.others).append(symbol)

    def home(self, name: str) -> Mapping[str, Any] | None:
        """The dictionary that the tensor is looked up in; None if the module has to search for it."""
        lookup = self._checks.lookups[name]
        is_buffer = lookup.prim is PrimIDs.UNPACK_BUFFER
        home: Mapping[str, Any] = (module_buffers if is_buffer else module_parameters)(self._module)
        return home if lookup.key in home else None

    def _read(self, name: str, lookup: Lookup) -> None:
        prim, owner = lookup.prim, lookup.owner
        if prim in (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER):
            if owner is None or self._modules.get(owner) is not self._module:
                raise Unsupported("Thunder reads parameters of another module than the compiled one")
            self.tensors.add(name)
        elif prim is PrimIDs.UNPACK_THUNDER_MODULE:
            self._modules[name] = self._module
        elif prim is PrimIDs.UNPACK_FUNCTION_OBJ:
            self._modules[name] = original_module(self._module)
        elif prim is PrimIDs.UNPACK_SUBMODULE and owner in self._modules:
            module = module_cache(self._module).get(lookup.key)
            if module is not None:  # otherwise it is looked up at each call, and may be another one then
                self._modules[name] = module
        elif prim is PrimIDs.UNPACK_ATTR and owner in (owners := {**self._objects, **self._modules}):
            value = self._watched_attribute(owners[owner], lookup.key)
            if _is_literal(value):
                self._literals.add(name)
            elif type(value) in (list, dict):
                self._containers[name] = value
            elif value is not MISS:
                self._objects[name] = value
        elif prim is PrimIDs.UNPACK_GETITEM and owner is not None:
            inputs = {proxy.name for proxy in lookup.symbol.flat_proxy_args}
            if inputs <= self._literals:
                self._literals.add(name)

    def _watched_attribute(self, owner: Any, key: str) -> Any:
        """An attribute that changes only by a write to one of the owner's dictionaries, which are watched from now on.

        Returns:
            the attribute; `MISS` if it may be another one without such a write.
        """
        if isinstance(owner, ThunderModule):
            self._watch(owner)
            if key in vars(owner) or hasattr(ThunderModule, key):
                return MISS
            owner = original_module(owner)
        kind: Any = type(owner)
        of_class = inspect.getattr_static(kind, key, MISS)  # such as a default of a dataclass, or a property
        is_data_descriptor = hasattr(type(of_class), "__set__") or hasattr(type(of_class), "__delete__")
        own = names_of(owner)
        if is_data_descriptor or not own or kind.__getattribute__ is not object.__getattribute__:
            return MISS
        self._watch(owner)
        is_modules = isinstance(owner, torch.nn.Module) and of_class is MISS
        for dictionary in module_dictionaries(owner)[:3] if is_modules else (own,):  # no children
            if dictionary is not own:
                self._watch(dictionary)
            if key in dictionary:
                return dictionary[key]
        return MISS if hasattr(type(of_class), "__get__") else of_class

    def _watch_container(self, check: BoundSymbol) -> None:
        """Has the list or dict of an attribute watched, if the check needs only the length of a list."""
        names = [proxy.name for proxy in check.flat_proxy_args]
        container = self._containers.get(names[0]) if len(names) == 1 else None
        if isinstance(container, dict) or (isinstance(container, list) and check.sym.name == check_length.name):
            self._watched[id(container)] = container
            self._literals.update(names)

    def _watch(self, item: Any) -> None:
        """Has a dictionary, or an object and its classes, watched for changes."""
        self._watched[id(item)] = ref(item) if item is self._module else item
        for kind in type(item).__mro__[:-1] if not isinstance(item, dict) else ():
            dictionary = dictionary_of(kind)
            self._watched[id(dictionary)] = dictionary

    def attribute_guard(self) -> AttributeGuard:
        """The checks of modules' attributes. The compiled module itself is always watched."""
        model = original_module(self._module)
        self._watch(model)
        check, synchronizes = self.function(self._attributes, ()), is_data_parallel(model)

        def check_all() -> None:
            assert is_data_parallel(model) is synchronizes
            check()

        return AttributeGuard(check_all, list(self._watched.values()))

    def function(self, checks: Sequence[BoundSymbol], results: Sequence[str]) -> Callable[..., Any]:
        """The prologue with only ``checks``, what they need, and what makes the values called ``results``."""
        needed = {proxy.name for symbol in checks for proxy in symbol.flat_proxy_args} | set(results)
        kept = set(map(id, checks))
        old = self._checks.trace
        proxies = {proxy.name: proxy for symbol in old.bound_symbols for proxy in symbol.flat_proxy_outs}
        module_name = unused_name("thunder_module", old)
        symbols: list[BoundSymbol] = []
        for symbol in reversed(old.bound_symbols[:-1]):
            if id(symbol) in kept or any(proxy.name in needed for proxy in symbol.flat_proxy_outs):
                if symbol.sym.id is PrimIDs.UNPACK_THUNDER_MODULE:  # which Thunder looks up in a context of its own
                    symbol = executor.bind(module_name, ref(self._module), [], symbol.output)
                needed.update(proxy.name for proxy in symbol.flat_proxy_args)
                symbols.append(symbol)
        trace = from_trace(old)
        with tracectx(trace):
            trace.bound_symbols = symbols[::-1]
            prims.python_return(tuple(proxies[name] for name in results))
        return trace.python_callable(include_decorators=False)


def _is_literal(value: Any) -> bool:
    """Whether the value, and all in it, can only be replaced, never changed."""
    return isinstance(value, _LITERALS) or (isinstance(value, tuple) and all(map(_is_literal, value)))
