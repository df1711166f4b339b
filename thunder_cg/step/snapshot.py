"""What a step may change in Python, as it is before a capture, to be given back if the capture fails.

Note [Effects once]
    A capture runs the step's Python. If it fails, the step runs in Python, so what the capture has done by then has to
    be undone: the step may have set a flag that it would have set back, frozen parameters for a while, or drawn random
    numbers. What it has printed, written to a file or sent elsewhere cannot be undone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import sys
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, starmap
from typing import Any

import torch
from torch import Tensor

from thunder_cg.compat.guards import dictionary_of, names_of
from thunder_cg.compat.settings import default_device_is_set
from thunder_cg.step.lookups import MISSING, Path, slots_of
from thunder_cg.step.packages import may_change
from thunder_cg.step.places import Place, places_of, plain_copy

Undo = Callable[[], object]
_CData: Any = ctypes.Structure.__base__


class Snapshot:
    """Values as they are now: those of `undos_of`, and settings."""

    def __init__(self, holders: Iterable[Any], paths: Iterable[Path], tensors: Iterable[Tensor]) -> None:
        self._undos: list[Undo] = [*undos_of(holders, paths, tensors), *starmap(_undo_of_setting, _settings())]

    def take(self, undos: list[Undo]) -> None:
        """Adds what has been noted since, which is undone first."""
        self._undos += undos
        undos.clear()

    def restore(self) -> None:
        """Gives everything back that is not what it was."""
        for undo in reversed(self._undos):
            undo()


def undos_of(holders: Iterable[Any], paths: Iterable[Path], tensors: Iterable[Tensor]) -> Iterator[Undo]:
    """How to give them what they hold now.

    Args:
        holders: of values: containers, objects, classes, modules, arrays, generators of random numbers.
        paths: what names lead to.
        tensors: where their memory is, and whether they get gradients.
    """
    yield from chain.from_iterable(map(_undos_of_holder, {id(each): each for each in holders}.values()))
    for place in {place.key: place for path in paths for place in places_of(path)}.values():
        yield partial(place.put, place.get())
    yield from map(_undo_of_tensor, tensors)


def _undos_of_holder(value: Any) -> Iterator[Undo]:
    if isinstance(value, (type, types.ModuleType)):
        yield partial(_restore_names, value, dictionary_of(value).copy())
        return
    if isinstance(value, dict):
        yield partial(_restore_dictionary, value, plain_copy(value))
    elif isinstance(value, (list, deque, set)):
        yield partial(_restore_container, value, plain_copy(value))
    elif (undo := _undo_of_content(value)) is not None:
        yield undo
    yield partial(_restore_dictionary, names := names_of(value), names.copy())
    for slot in slots_of(type(value)) if may_change(type(value)) else ():
        place = Place(value, slot)
        yield partial(place.put, place.get())


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
        Place(owner, name).put(then.get(name, MISSING))


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
    if (data := data_of_c(value)) is not None:
        return partial(ctypes.memmove, ctypes.addressof(data), bytes(memoryview(data)), ctypes.sizeof(data))
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


def data_of_c(value: Any) -> Any:
    """A value of `ctypes`, also one that processes share; None if it is neither, or refers to an object."""
    if (shared := sys.modules.get("multiprocessing.sharedctypes")) is not None:
        value = value.get_obj() if isinstance(value, shared.SynchronizedBase) else value
    return value if isinstance(value, _CData) and not isinstance(value, ctypes.py_object) else None


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
    yield _anomaly_detection, lambda state: torch.autograd.set_detect_anomaly(*state)
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for kind in ("cuda", "cpu"):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    yield random.getstate, random.setstate
    yield lambda: dict(os.environ), _set_environment
    if (numpy := sys.modules.get("numpy")) is not None:
        yield lambda: pickle.dumps(numpy.random.get_state()), lambda state: numpy.random.set_state(pickle.loads(state))


def _anomaly_detection() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _set_environment(variables: dict[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
