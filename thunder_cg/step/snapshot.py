"""What a step may change in Python, as it is before a capture, to be given back if the capture fails.

Note [Effects once]
    A capture runs the step's Python. If it fails, the step runs in Python, so what the capture has done by then has to
    be undone: the step may have set a flag that it would have set back, frozen parameters for a while, or drawn random
    numbers. What it has printed, written to a file or sent elsewhere cannot be undone.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from thunder_cg.compat.torch import default_device_is_set, dictionary_of
from thunder_cg.step.attributes import slots_of
from thunder_cg.step.reads import MISSING, Path, may_change, places_of

Undo = Callable[[], object]


class Snapshot:
    """Values as they are now.

    Args:
        holders: of values: containers, objects, classes, modules, arrays, generators of random numbers.
        paths: what names lead to.
        tensors: where their memory is, and whether they get gradients.
    """

    def __init__(self, holders: Iterable[Any], paths: Iterable[Path], tensors: Iterable[Tensor]) -> None:
        self._undos: list[Undo] = []
        for each in {id(each): each for each in holders}.values():
            self._undos += _undos_of(each)
        for holder, name in {(id(place[0]), place[1]): place for path in paths for place in places_of(path)}.values():
            self._undos.append(partial(_put, holder, name, _get(holder, name)))
        self._undos += map(_undo_of_tensor, tensors)
        self._undos += starmap(_undo_of_setting, _settings())

    def restore(self) -> None:
        """Gives everything back that is not what it was."""
        for undo in self._undos:
            undo()


def _undos_of(value: Any) -> Iterator[Undo]:
    if isinstance(value, (type, types.ModuleType)):
        yield partial(_restore_names, value, dictionary_of(value).copy())
        return
    if isinstance(value, dict):
        yield partial(_restore_dictionary, value, value.copy())
    elif isinstance(value, (list, deque, set)):
        yield partial(_restore_container, value, value.copy())
    elif (undo := _undo_of_content(value)) is not None:
        yield undo
    if isinstance(names := getattr(value, "__dict__", None), dict):
        yield partial(_restore_dictionary, names, names.copy())
    for slot in slots_of(type(value)) if may_change(type(value)) else ():
        yield partial(_put, value, slot, _get(value, slot))


def _restore_dictionary(now: dict[Any, Any], then: dict[Any, Any]) -> None:
    if len(now) == len(then) and all(a is b and now[a] is then[b] for a, b in zip(now, then)):
        return
    for key in [key for key in now if key not in then]:
        del now[key]
    if [*now] != [*then]:
        now.clear()
    now.update(then)


def _restore_container(now: Any, then: Any) -> None:
    if len(now) != len(then) or any(a is not b for a, b in zip(now, then)):
        now.clear()
        (now.update if isinstance(now, set) else now.extend)(then)


def _restore_names(owner: type | types.ModuleType, then: dict[str, Any]) -> None:
    for name in {*dictionary_of(owner), *then}:
        _put(owner, name, then.get(name, MISSING))


def _get(holder: Any, name: str) -> Any:
    """What a cell holds, or a namespace, a class or an object of its own by a name."""
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:  # it is empty
            return MISSING
    if isinstance(holder, (type, types.ModuleType)):
        return dictionary_of(holder).get(name, MISSING)
    if _is_slot(holder, name):
        return getattr(holder, name, MISSING)
    return (holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})).get(name, MISSING)


def _put(holder: Any, name: str, value: Any) -> None:
    """Gives it back, whatever the class does when somebody sets it."""
    if _get(holder, name) is value:
        return
    kind: Any = type if isinstance(holder, type) else object
    if isinstance(holder, types.CellType):
        kind, name = types.CellType, "cell_contents"
    elif not (isinstance(holder, (type, types.ModuleType)) or _is_slot(holder, name)):
        names = holder if isinstance(holder, dict) else holder.__dict__
        if value is MISSING:
            del names[name]
        else:
            names[name] = value
        return
    if value is MISSING:
        kind.__delattr__(holder, name)
    else:
        kind.__setattr__(holder, name, value)


def _is_slot(holder: Any, name: str) -> bool:
    is_member = isinstance(getattr(type(holder), name, None), types.MemberDescriptorType)
    return is_member and may_change(type(holder))  # others may be read-only


def _undo_of_tensor(tensor: Tensor) -> Undo:
    memory, requires_grad, is_leaf = tensor.detach(), tensor.requires_grad, tensor.is_leaf
    place = memory.data_ptr(), memory.dtype, memory.shape, memory.stride()

    def undo() -> None:
        if (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) != place:
            tensor.data = memory
        if is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return undo


def _undo_of_content(value: Any) -> Undo | None:
    """For what holds values that no dictionary has."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, Tensor):  # on the host of a step on a GPU; it keeps its version
        return partial(value.data.copy_, value.detach().clone())
    if isinstance(value, (bytearray, array)):
        return partial(value.__setitem__, slice(None), value[:])
    if (numpy := sys.modules.get("numpy")) is None:
        return None
    if isinstance(value, numpy.ndarray):
        return partial(numpy.copyto, value, value.copy()) if value.flags.writeable else None
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def _undo_of_setting(get: Callable[[], Any], put: Callable[[Any], object]) -> Undo:
    then = get()

    def undo() -> None:
        if get() != then:
            put(then)

    return undo


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to get and to set those of PyTorch and Python for the thread and for the process."""
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.get_default_dtype, torch.set_default_dtype
    yield lambda: torch.get_default_device() if default_device_is_set() else None, torch.set_default_device
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for kind in ("cuda", "cpu"):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    yield random.getstate, random.setstate
    yield lambda: dict(os.environ), _set_environment
    if (numpy := sys.modules.get("numpy")) is not None:
        yield lambda: pickle.dumps(numpy.random.get_state()), lambda state: numpy.random.set_state(pickle.loads(state))


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
