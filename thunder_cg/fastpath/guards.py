"""The checks of a Thunder prologue, made once over and cheaper: what may a call's arguments and global_state be?

Note [Cheaper, not fewer]
    - Parameters and buffers are looked up again only when the module's dictionaries have changed since they were; what
      they are is checked in C++ with a recording's guard.
    - Attributes of modules are checked again only when the module, or its class, has changed since they were.
    - Thunder's cache info (grad mode, autocast, default dtype and device, aliases of arguments) is compared directly.
    - Every other check is made as Thunder makes it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from thunder.core import dtypes, prims
from thunder.core.module import ThunderModule
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from torch._C._dynamo import guards as _c_guards
from torch._dynamo.guards import GuardManagerType

from thunder_cg.executor import executor
from thunder_cg.prologue import Metadata, ParameterCheck
from thunder_cg.runtime.code import Code

_MAX_CHANGES = 64  # of modules' attributes; past it they are checked at every call
_LITERALS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_SCALARS = (*_LITERALS, torch.nn.Parameter)
_BOOKKEEPING = frozenset({"alias_tensor_indices", "no_grad_sync"})
_AUTOCAST = (
    "autocast_config_torch_enabled",
    "autocast_config_torch_cpu_enabled",
    "autocast_gpu_dtype",
    "autocast_cpu_dtype",
    "autocast_thunder_dtype",
)


class Unsupported(Exception):
    """The prologue holds something that has no cheaper form: such calls keep to Thunder's way."""


class GuardMismatch(Exception):
    """The call that was to be learnt from is not what the cache entry is for: another one may be."""


class GlobalStateGuard:
    """What Thunder's cache info holds of the thread's state."""

    def __init__(self, expected: Mapping[str, Any]) -> None:
        unknown = set(expected) - {"default_dtype", "default_device", "is_autocast_enabled", "is_grad_enabled"}
        if unknown - _BOOKKEEPING - set(_AUTOCAST):
            raise Unsupported(f"cache info {sorted(unknown)}")
        if expected.get("no_grad_sync"):
            raise Unsupported("its gradients are synchronized")
        if {key: value for key, value in self._now().items() if key in expected} != {
            key: value for key, value in expected.items() if key not in _BOOKKEEPING
        }:
            raise GuardMismatch("they have changed since the call")
        self._device = expected.get("default_device", torch.get_default_device())
        self._state = self._read()

    @staticmethod
    def _now() -> dict[str, Any]:
        gpu, cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
        found: dict[str, Any] = {
            "default_dtype": torch.get_default_dtype(),
            "default_device": torch.get_default_device(),
            "is_autocast_enabled": gpu or cpu,
            "is_grad_enabled": torch.is_grad_enabled(),
        }
        if gpu or cpu:
            names = [str(dtypes.to_dtype(torch.get_autocast_dtype(kind))) for kind in ("cuda", "cpu")]
            found.update(zip(_AUTOCAST, (gpu, cpu, *names, names[1] if cpu else names[0])))
        return found

    @staticmethod
    def _read() -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        )

    def conditions(self, code: Code) -> list[str]:
        """That they `hold`, as expressions."""
        name = code.name
        dtype, grad, gpu, cpu = self._state
        found = [
            f"{name(torch.get_default_dtype, 'default_dtype')}() is {name(dtype, 'dtype')}",
            f"{name(torch.is_grad_enabled, 'grad_enabled')}() is {grad}",
        ]
        if gpu or cpu:
            found.append(f"{name(self._read, 'global_state')}() == {name(self._state, 'expected')}")
        else:
            found.append(f"not {name(torch._C._is_any_autocast_enabled, 'autocast')}()")
        plain = f"not {name(_function_modes, 'function_modes')}()"
        plain += f" and 'device_context' not in {name(torch._GLOBAL_DEVICE_CONTEXT, 'devices')}.__dict__"
        if self._device != _CPU:
            return [*found, f"{name(self.hold, 'state_holds')}()"]
        return [*found, f"({plain} or {name(self.hold, 'state_holds')}())"]

    def hold(self) -> bool:
        """Whether they are as expected."""
        if self._read() != self._state:
            return False
        if _function_modes() or "device_context" in torch._GLOBAL_DEVICE_CONTEXT.__dict__:
            return bool(torch.get_default_device() == self._device)
        return self._device == _CPU


_CPU = torch.device("cpu")
_function_modes = torch._C._len_torch_function_stack


def _unchanged(watched: Sequence[Any]) -> Callable[[], bool]:
    """A check of dictionaries and objects by their `_versions`, or `_never`, where that would miss what changes."""
    may = _attributes_show or all(isinstance(item, dict) for item in watched)
    return _versions(watched) if may else _never


def _versions(watched: Sequence[Any]) -> Callable[[], bool]:
    """One C++ check that objects have their types and dictionaries, and that no dictionary was written to."""
    scope = tuple(watched)
    manager = _c_guards.RootGuardManager()
    kind = GuardManagerType.GUARD_MANAGER
    for i, item in enumerate(scope):
        guard: Any = manager.tuple_getitem_manager(i, str(i), item, kind)
        if not isinstance(item, dict):
            _add(guard.add_type_match_guard, id(type(item)))
            guard, item = guard.get_generic_dict_manager(f"{i}.__dict__", vars(item), kind), vars(item)
        _add(guard.add_dict_version_guard, item)
    return partial(manager.check, scope)


def _never() -> bool:
    return False


def _add(guard: Callable[..., None], value: Any) -> None:
    try:
        guard(value, [], None)
    except TypeError:  # torch before 2.11
        guard(value, [])


class _Probe:
    attribute: int


def _do_attributes_show() -> bool:
    """Whether a write to an attribute is seen as one to the object's dictionary: not in CPython 3.13.0, by a bug."""
    probe = _Probe()
    unchanged = _versions([probe])
    probe.attribute = 0
    return not unchanged()


_attributes_show = _do_attributes_show()


class _Attributes:
    """The checks of modules' attributes, skipped while neither modules nor their classes change."""

    def __init__(self, check: Callable[..., Any], watched: Sequence[Any]) -> None:
        self._check = check
        self._watched = watched
        self.unchanged: Callable[[], bool] = _never
        self._changes = 0

    def hold(self) -> bool:
        if self.unchanged():
            return True
        self._changes += 1
        # The versions are read first: a change during the check shows at the next call.
        unchanged = _unchanged(self._watched) if self._changes <= _MAX_CHANGES else _never
        try:
            self._check()
        except Exception:  # as Thunder: the prologue of another cache entry may pass
            return False
        self.unchanged = unchanged
        return True


class ParameterCache(dict[int, list[torch.Tensor]]):
    """A compiled module's parameters and buffers, looked up again only when its dictionaries have changed.

    By the key that `add` gave: the tensors of those names, in their order. Only if it is `unchanged`: after a change it
    has to be `renewed` first. All guards of a module share one, so that none keeps tensors that the module has not.
    """

    def __init__(self, module: ThunderModule) -> None:
        super().__init__()
        self._module = module
        self._getters: list[tuple[Callable[[Any], Sequence[Any]], Callable[[Any], Sequence[Any]]]] = []
        self.unchanged: Callable[[], bool] = _never
        self._changes = 0

    def add(self, parameters: Sequence[str], buffers: Sequence[str]) -> int:
        """The key of these."""
        self._getters.append((_getter(parameters), _getter(buffers)))
        return len(self._getters) - 1

    def renewed(self) -> ParameterCache:
        """Itself, with nothing kept from before."""
        module = self._module
        self._changes += 1
        self.clear()
        watched = [module, module._overrides_parameters, module._overrides_buffers]
        self.unchanged = _unchanged(watched) if self._changes <= _MAX_CHANGES else _never
        return self

    def __missing__(self, key: int) -> list[torch.Tensor]:
        parameters, buffers = self._getters[key]
        module = self._module
        self[key] = [*parameters(module._overrides_parameters), *buffers(module._overrides_buffers)]
        return self[key]


class PrologueGuard:
    """All checks of one prologue but those of tensors' metadata, and the look-up of what it returns.

    Args:
        module: whose calls it guards.
        prologue: its last trace.
        order: names of tensors, in the order that the caller would like best.
        parameters_cache: the module's.

    Raises:
        Unsupported: it cannot be guarded this way.
    """

    def __init__(
        self, module: ThunderModule, prologue: TraceCtx, order: Sequence[str], parameters_cache: ParameterCache
    ) -> None:
        reader = _Reader(module, prologue)
        self.metadata = reader.metadata
        inputs, passed_on = prologue.bound_symbols[-1].args[0]
        self.inputs = _names(inputs)
        self.passed_on = _names(passed_on)
        wanted = [*order, *self.inputs, *self.passed_on, *self.metadata]
        tensors = [name for name in dict.fromkeys(wanted) if name in reader.sources]
        arguments = [name for name in dict.fromkeys(wanted) if name not in reader.sources]
        if missing := [name for name in arguments if name not in reader.proxies]:
            raise Unsupported(f"values {missing} that the prologue does not make")
        parameters, buffers, others = (
            [name for name in tensors if reader.home(name) is home]
            for home in (module._overrides_parameters, module._overrides_buffers, None)
        )
        names = [*arguments, *parameters, *buffers, *others]
        self.place = {name: i for i, name in enumerate(names)}
        self._arguments = reader.arguments(arguments)
        shared = reader.cache_info.get("alias_tensor_indices")
        self._sharing = partial(_shares, shared) if shared else _nothing_is_shared
        self._arity = reader.arity()
        self._plain_arguments = reader.plain_arguments(arguments)
        self._homes = parameters_cache
        self._key = parameters_cache.add(*([reader.sources[name] for name in names] for names in (parameters, buffers)))
        self._has_tensors = bool(parameters or buffers)
        self._others = [reader.sources[name] for name in others]
        self._buffer_names = frozenset(reader.sources[name] for name in others if reader.is_buffer[name])
        self._module = module
        self.global_state = GlobalStateGuard(reader.cache_info)
        self._attributes = reader.attributes()

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """The values that the prologue would return, at their ``place``; None if a check fails."""
        if not (self.global_state.hold() and self._attributes.hold() and self._sharing(args, kwargs)):
            return None
        try:
            return self._look_up(args, kwargs)
        except Exception:  # as Thunder: the prologue of another cache entry may pass
            return None

    def _look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Makes the remaining checks, which raise, and gets the values."""
        module = self._module
        parameters_cache = self._homes
        found = [
            *self._arguments(*args, **kwargs),
            *(parameters_cache if parameters_cache.unchanged() else parameters_cache.renewed())[self._key],
        ]
        for name in self._others:
            found.append(module.get_buffer(name) if name in self._buffer_names else module.get_parameter(name))
        return found

    def attributes_condition(self, code: Code) -> str:
        """That modules have the attributes that they had, as an expression."""
        attributes = code.name(self._attributes, "attributes")
        return f"({attributes}.unchanged() or {attributes}.hold())"

    def arity_conditions(self, code: Code) -> list[str]:
        """That there are as many arguments, which share memory as they did, as expressions."""
        found = []
        if self._plain_arguments is not None:
            found += [f"len({name}) == {length}" for name, length in self._arity.items()]
        if self._plain_arguments is None or len(self._plain_arguments) != 1 or sum(self._arity.values()) != 1:
            found.append(f"{code.name(self._sharing, 'sharing')}(args, kwargs)")
        return found

    def look_up(self, code: Code) -> str:
        """What `values` returns, as an expression, which may raise."""
        if self._plain_arguments is None or self._others:
            return f"{code.name(self._look_up, 'look_up')}(args, kwargs)"
        parts = [*self._plain_arguments]
        if self._has_tensors:
            parameters_cache = code.name(self._homes, "parameters_cache")
            parts.append(
                f"*({parameters_cache} if {parameters_cache}.unchanged() else {parameters_cache}.renewed())[{code.name(self._key, 'key')}]"
            )
        return f"[{', '.join(parts)}]"

    def are_all(self, names: Sequence[str]) -> bool:
        """Whether these are all the values, in their order."""
        return list(names) == list(self.place)

    def picker(self, names: Sequence[str]) -> Callable[[list[Any]], Sequence[Any]]:
        """What picks the values called ``names`` out of ``values()``."""
        if missing := [name for name in names if name not in self.place]:
            raise Unsupported(f"values {missing} that the prologue does not make")
        return _all if self.are_all(names) else _getter([self.place[name] for name in names])


def _all(values: list[Any]) -> list[Any]:
    return values


def _nothing(values: Any) -> tuple[()]:
    return ()


def _getter(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What gets all ``keys`` of a mapping or sequence as a tuple."""
    if not keys:
        return _nothing
    if len(keys) == 1:
        (key,) = keys
        return lambda values: (values[key],)
    return itemgetter(*keys)


def _nothing_is_shared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no two tensors among the arguments share memory."""
    if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
        return True
    addresses = [address for _, address in _addresses((*args, *kwargs.values()), {})]  # in whatever order
    return len(set(addresses)) == len(addresses)


def _shares(expected: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether exactly these arguments share memory: positions by commas, groups by hyphens, as Thunder writes them."""
    groups: dict[int, list[str]] = {}
    for position, address in _addresses(args, kwargs):
        groups.setdefault(address, []).append(str(position))
    return "-".join(",".join(group) for group in groups.values() if len(group) > 1) == expected


def _addresses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, int]]:
    """Of each plain tensor among the flattened arguments: its position, and where its memory begins."""
    leaves: Sequence[Any] = args
    if kwargs or not all(type(leaf) is torch.Tensor or isinstance(leaf, _SCALARS) for leaf in args):
        leaves = tree_flatten((args, kwargs))[0]
    return [
        (i, leaf.untyped_storage().data_ptr())
        for i, leaf in enumerate(leaves)
        if type(leaf) is torch.Tensor and leaf.layout is torch.strided
    ]


def _is_arity(symbol: BoundSymbol) -> bool:
    """Whether it checks how many arguments a call has."""
    return symbol.sym.id == "check_len" and getattr(symbol.args[0], "name", None) in ("args", "kwargs")


def _is_literal(value: Any) -> bool:
    """Whether the value, and all in it, can only be replaced, never changed."""
    return isinstance(value, _LITERALS) or (isinstance(value, tuple) and all(map(_is_literal, value)))


def _names(tree: Any) -> list[str]:
    return [leaf.name if isinstance(leaf, Proxy) else "" for leaf in tree]


class _Reader:
    """Sorts the symbols of a prologue by what they check."""

    def __init__(self, module: ThunderModule, prologue: TraceCtx) -> None:
        self._module = module
        self._trace = prologue
        self.proxies: dict[str, Proxy] = {}
        self.sources: dict[str, str] = {}  # tensor -> the parameter's or buffer's name in the module
        self.is_buffer: dict[str, bool] = {}
        self.metadata: dict[str, Metadata] = {}
        self.cache_info: dict[str, Any] = {}
        self._producers: dict[str, BoundSymbol] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._watched: dict[int, Any] = {}
        self._literals: set[str] = set()  # attributes that change only together with what is watched
        self._of_cache_info: dict[str, str] = {}
        self._rest: list[BoundSymbol] = []
        self._of_attributes: list[BoundSymbol] = []
        for symbol in prologue.bound_symbols[:-1]:
            self._read(symbol)

    def home(self, name: str) -> dict[str, Any] | None:
        """The dictionary that the tensor is looked up in; None if the module has to search for it."""
        key = self.sources[name]
        home = self._module._overrides_buffers if self.is_buffer[name] else self._module._overrides_parameters
        return home if key in home else None

    def arguments(self, names: Sequence[str]) -> Callable[..., Sequence[Any]]:
        """The function that makes all remaining checks and returns the values called ``names``."""
        return self._function(self._rest, tuple(self.proxies[name] for name in names))

    def arity(self) -> dict[str, int]:
        """The lengths that ``args`` and ``kwargs`` must have."""
        return {symbol.args[0].name: symbol.args[1] for symbol in self._rest if _is_arity(symbol)}

    def plain_arguments(self, names: Sequence[str]) -> list[str] | None:
        """Expressions for the values called ``names``, if nothing but the arity is left to check."""
        if not all(map(_is_arity, self._rest)) or len(self.arity()) != 2:
            return None
        found = []
        for name in names:
            symbol = self._producers[name]
            if symbol.sym.id is not PrimIDs.UNPACK_GETITEM or symbol.args[0].name not in ("args", "kwargs"):
                return None
            found.append(f"{symbol.args[0].name}[{symbol.args[1]!r}]")
        return found

    def attributes(self) -> _Attributes:
        """The checks of modules' attributes. The compiled module itself is always watched."""
        model = self._module._model
        self._watch(model)
        check = self._function(self._of_attributes, ())

        def check_all() -> None:
            if getattr(model, "use_ddp", False) or getattr(model, "use_fsdp", False):
                raise Unsupported("its gradients are synchronized")
            check()

        return _Attributes(check_all, list(self._watched.values()))

    def _watch(self, item: Any) -> None:
        """Has a dictionary, or an object and its classes, watched for changes."""
        self._watched[id(item)] = item
        for kind in type(item).__mro__[:-1] if not isinstance(item, dict) else ():
            (dictionary,) = gc.get_referents(vars(kind))  # that its mapping proxy stands for
            self._watched[id(dictionary)] = dictionary

    def _read(self, symbol: BoundSymbol) -> None:
        for proxy in symbol.flat_proxy_outs:
            self._producers[proxy.name] = symbol
            self.proxies[proxy.name] = proxy
        prim = symbol.sym.id
        inputs = [proxy.name for proxy in symbol.flat_proxy_args]
        if prim in (PrimIDs.UNPACK_PARAMETER, PrimIDs.UNPACK_BUFFER):
            self._tensor(symbol, prim is PrimIDs.UNPACK_BUFFER)
        elif prim == "check_tensor_metadata":
            self._check_of_tensor(symbol)
        elif isinstance(check := (symbol._call_ctx or {}).get(symbol.sym.name), ParameterCheck):
            self.metadata.update(zip(inputs, check.expected))
        elif prim is PrimIDs.UNPACK_CACHE_INFO:
            self._of_cache_info[symbol.output.name] = ""
        elif inputs and inputs[0] in self._of_cache_info:
            self._check_of_cache_info(symbol, inputs[0])
        elif symbol.flat_proxy_outs:
            if inputs:
                self._value(symbol, inputs)
        elif inputs and self._literals.issuperset(inputs):
            self._of_attributes.append(symbol)
        else:
            self._rest.append(symbol)

    def _tensor(self, symbol: BoundSymbol, is_buffer: bool) -> None:
        owner, key = symbol.args
        if self._modules.get(owner.name) is not self._module:
            raise Unsupported("parameters of a module that is not the compiled one")
        self.sources[symbol.output.name] = key
        self.is_buffer[symbol.output.name] = is_buffer

    def _check_of_tensor(self, symbol: BoundSymbol) -> None:
        tensor, shape, *rest = symbol.args
        if not all(type(size) is int for size in shape):
            raise Unsupported("sizes known only at run time")
        self.metadata[tensor.name] = Metadata(tuple(shape), *rest)

    def _check_of_cache_info(self, symbol: BoundSymbol, name: str) -> None:
        key = self._of_cache_info[name]
        if symbol.sym.id is PrimIDs.UNPACK_GETITEM and not key:
            self._of_cache_info[symbol.output.name] = symbol.args[1]
        elif key and not symbol.flat_proxy_outs:
            self.cache_info[key] = symbol.args[1]
        else:
            raise Unsupported("cache info in a form that is not known")

    def _value(self, symbol: BoundSymbol, inputs: Sequence[str]) -> None:
        prim = symbol.sym.id
        (output, *_) = symbol.flat_proxy_outs
        if prim is PrimIDs.UNPACK_THUNDER_MODULE:
            self._modules[output.name] = self._module
        elif prim is PrimIDs.UNPACK_SUBMODULE and inputs[0] in self._modules:
            module = self._module._module_cache.get(symbol.args[1])
            if module is not None:  # otherwise it is looked up at each call, and may be another one then
                self._modules[output.name] = module
        elif self._is_literal(symbol, inputs):
            self._literals.add(output.name)

    def _is_literal(self, symbol: BoundSymbol, inputs: Sequence[str]) -> bool:
        """Whether the value can change only by a write to a dictionary, which is watched then."""
        if symbol.sym.id is PrimIDs.UNPACK_GETITEM:
            return self._literals.issuperset(inputs)
        module = self._modules.get(inputs[0]) if symbol.sym.id is PrimIDs.UNPACK_ATTR else None
        return module is not None and self._is_in_dictionary(module, symbol.args[1])

    def _is_in_dictionary(self, module: Any, key: str) -> bool:
        """Whether the attribute is a literal in one of the module's dictionaries."""
        if isinstance(module, ThunderModule):
            self._watch(module)
            if key in vars(module) or hasattr(ThunderModule, key):
                return False
            module = module._model
        kind: Any = type(module)
        if hasattr(kind, key) or kind.__getattribute__ is not object.__getattribute__:
            return False
        self._watch(module)
        for dictionary in (vars(module), module._parameters, module._buffers):
            if dictionary is not vars(module):
                self._watch(dictionary)
            if key in dictionary:
                return _is_literal(dictionary[key])
        return False

    def _function(self, checks: Sequence[BoundSymbol], results: Sequence[Proxy]) -> Callable[..., Any]:
        """The prologue with only ``checks``, what they need, and what makes ``results``."""
        needed = {proxy.name for symbol in checks for proxy in symbol.flat_proxy_args} | {p.name for p in results}
        kept = {id(symbol) for symbol in checks}
        symbols: list[BoundSymbol] = []
        for symbol in reversed(self._trace.bound_symbols[:-1]):
            if id(symbol) in kept or any(proxy.name in needed for proxy in symbol.flat_proxy_outs):
                if symbol.sym.id is PrimIDs.UNPACK_THUNDER_MODULE:  # which Thunder looks up in a context of its own
                    symbol = executor.bind("thunder_module", lambda: self._module, [], symbol.output)
                needed.update(proxy.name for proxy in symbol.flat_proxy_args)
                symbols.append(symbol)
        trace = from_trace(self._trace)
        with tracectx(trace):
            trace.bound_symbols = symbols[::-1]
            prims.python_return(tuple(results))
        return trace.python_callable(include_decorators=False)
