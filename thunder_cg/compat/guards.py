"""Guards of Dynamo, which check tensors, dictionaries and attributes in C++, and the dictionaries that they look at."""

from __future__ import annotations

import gc
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch._C._dynamo import guards as _guards
from torch._C._dynamo.guards import TensorGuards
from torch._dynamo.guards import GuardManagerType

# ``addresses_equal(tensors, addresses, indices)``: whether the tensors at the indices have the addresses there.
addresses_equal: Callable[..., bool] = torch._C._tensors_data_ptrs_at_indices_equal


def tensor_guards(tensors: Sequence[torch.Tensor], *, strides: bool = True) -> TensorGuards:
    """A check of type, dtype, device, shape, strides, dispatch keys and ``requires_grad``: ``.check(*tensors)``.

    No tensor may occur twice.
    """
    shapes: list[Any] = [list(t.size()) for t in tensors]
    dim_strides: list[Any] = [list(t.stride()) if strides else [None] * t.dim() for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=dim_strides)


def dictionary_guard(watched: Sequence[Any]) -> Callable[[], bool]:
    """A check that objects have their types and their dictionaries, that nothing was written to a dictionary, and that
    lists have their lengths.

    The check owns what it watches, except for objects that ``watched`` has weak references to. Where CPython does not
    report writes to attributes, the check is always False unless only dictionaries are watched.
    """
    if any(isinstance(item, ref) and item() is None for item in watched):  # a copy of the module lives longer
        return lambda: False
    if attribute_writes_are_reported() or all(isinstance(item, (dict, list)) for item in watched):
        return _dictionary_guard(watched)
    return lambda: False


def _dictionary_guard(watched: Sequence[Any]) -> Callable[[], bool]:
    scope = tuple(watched)
    manager = _guards.RootGuardManager()
    kind = GuardManagerType.GUARD_MANAGER
    for i, item in enumerate(scope):
        guard: Any = manager.tuple_getitem_manager(i, str(i), item, kind)
        if isinstance(item, ref):
            item = item()
            guard = guard.weakref_call_manager(f"{i}()", item, kind)
        if isinstance(item, list):
            _add_guard(guard.add_length_check_guard, len(item))
            continue
        if not isinstance(item, dict):
            _add_guard(guard.add_type_match_guard, id(type(item)))
            guard, item = guard.get_generic_dict_manager(f"{i}.__dict__", vars(item), kind), vars(item)
        _add_guard(guard.add_dict_version_guard, item)
    return partial(manager.check, scope)


def attribute_guard(values: Sequence[tuple[Any, Mapping[str, Any]]], missing: object) -> Callable[[], bool]:
    """A check that objects have their types, and these very values as attributes of their own or as items.

    The values have to be kept alive. Classes with a lookup of their own are not supported. Where CPython does not
    report writes to attributes, the check is always False unless there are only dictionaries: guards skip those that no
    write was reported of.

    Args:
        values: objects, each with the attributes in its dictionary and its slots; dictionaries, each with items.
        missing: stands for an attribute that an object does not have.
    """
    scope = tuple(value for value, _ in values)
    if not (attribute_writes_are_reported() or all(type(value) is dict for value in scope)):
        return lambda: False
    manager = _guards.RootGuardManager()
    kind = GuardManagerType.GUARD_MANAGER
    for i, (value, attributes) in enumerate(values):
        guard: Any = manager.tuple_getitem_manager(i, str(i), value, kind)
        is_dictionary = type(value) is dict
        if not is_dictionary:
            _add_guard(guard.add_type_match_guard, id(type(value)))
        dictionary = names_of(value) if type(value).__dictoffset__ else None
        inner = guard if is_dictionary else None
        for name, attribute in attributes.items():
            source = f"{i}.{name}"
            if not is_dictionary and inspect.ismemberdescriptor(inspect.getattr_static(type(value), name, None)):
                if attribute is missing:
                    _add_guard(guard.add_no_hasattr_guard, name)
                else:
                    _add_guard(guard.getattr_manager(name, source, attribute, kind).add_id_match_guard, id(attribute))
            elif is_dictionary or dictionary is not None:
                inner = inner or guard.get_generic_dict_manager(f"{i}.__dict__", dictionary, kind)
                if attribute is missing:
                    _add_guard(inner.add_dict_contains_guard, False, name)
                else:
                    item = inner.dict_getitem_manager(name, source, attribute, kind)
                    _add_guard(item.add_id_match_guard, id(attribute))
    return partial(manager.check, scope)


def _add_guard(add: Callable[..., None], *values: Any) -> None:
    try:
        add(*values, [], None)
    except TypeError:  # torch before 2.11
        add(*values, [])


def dictionary_of(value: type | types.ModuleType) -> dict[str, Any]:
    """The dictionary of a class, which Python shows as a proxy, or of a module."""
    names = vars(value)
    return names if isinstance(names, dict) else gc.get_referents(names)[0]


def names_of(value: object) -> dict[str, Any]:
    """The dictionary of an object, whatever its class does when somebody asks for it; an empty one if it has none."""
    try:
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return names if isinstance(names, dict) else {}


def variables_of(environ: Any) -> dict[Any, Any]:
    """The dictionary behind `os.environ`."""
    variables: dict[Any, Any] = environ._data
    return variables


def module_dictionaries(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dictionaries with a module's attributes, parameters, buffers and children."""
    return vars(module), module._parameters, module._buffers, module._modules


@cache
def attribute_writes_are_reported() -> bool:
    """Whether a write to an attribute shows as a write to the object's dictionary. CPython 3.13.0 has a bug there."""

    class Probe:
        attribute: int

    probe = Probe()
    unchanged = _dictionary_guard([probe])
    probe.attribute = 0
    return not unchanged()
