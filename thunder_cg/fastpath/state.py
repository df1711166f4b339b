"""State outside of a call's arguments that a prologue checks: of the thread, of modules, and their parameters.

Thunder checks all of this at each call. Here parameters and buffers are looked up again only when the module's
dictionaries have changed; attributes of modules are checked again only when a module, or its class, has changed; and
Thunder's cache info (grad mode, autocast, default dtype and device) is compared directly.

Nothing here owns the compiled module, which owns all of this: the module is freed without the garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any
from weakref import ref

import torch

from thunder_cg.compat.compiled import module_buffers, module_cache, module_parameters, original_module
from thunder_cg.compat.guards import dictionary_guard
from thunder_cg.compat.settings import any_autocast_enabled, default_device_is_set
from thunder_cg.compat.thunder import ThunderModule, dtypes, skips_grad_sync
from thunder_cg.compat.torch import composable_states, fully_sharded_modules
from thunder_cg.errors import ShardedModuleError

_MAX_CHANGES = 64  # of what is watched; past it, it is checked at every call
_CPU = torch.device("cpu")
_BOOKKEEPING = frozenset({"alias_tensor_indices", "no_grad_sync"})
_AUTOCAST_ENABLED = ("autocast_config_torch_enabled", "autocast_config_torch_cpu_enabled")
_AUTOCAST = (*_AUTOCAST_ENABLED, "autocast_gpu_dtype", "autocast_cpu_dtype", "autocast_thunder_dtype")
MISS = object()  # what a fast path returns that is not for the call; it has done nothing that anybody can see


class Unsupported(Exception):
    """Calls of the cache entry keep to Thunder's dispatch, for the reason that the message gives."""


class GuardMismatch(Exception):
    """The call from which a fast path was to be made is not one that the cache entry, or the recording, is for."""


class GlobalStateGuard:
    """What Thunder's cache info holds of the thread's state.

    `Unsupported` if it holds something else; `GuardMismatch` if the state differs now.

    Args:
        synchronizes: whether gradients are synchronized between processes, except in ``no_sync()``.
    """

    def __init__(self, expected: Mapping[str, Any], *, synchronizes: bool) -> None:
        now = _cache_info()
        if unknown := set(expected) - set(now) - _BOOKKEEPING - set(_AUTOCAST):
            raise Unsupported(f"Thunder checks {sorted(unknown)} of the thread, which is not known here")
        self._skips_sync = bool(expected.get("no_grad_sync")) if synchronizes else None
        if any(now.get(key) != value for key, value in expected.items() if key not in _BOOKKEEPING):
            raise GuardMismatch("the state of the thread has changed since the call")
        self._default_device = expected.get("default_device", torch.get_default_device())
        self._default_dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._autocast = _autocast()

    def holds(self) -> bool:
        if torch.get_default_dtype() is not self._default_dtype or torch.is_grad_enabled() is not self._grad:
            return False
        if (any_autocast_enabled() or self._autocast is not None) and _autocast() != self._autocast:
            return False
        if self._skips_sync is not None and skips_grad_sync() is not self._skips_sync:
            return False
        if default_device_is_set():
            return bool(torch.get_default_device() == self._default_device)
        return self._default_device == _CPU


def _cache_info() -> dict[str, Any]:
    """The state as Thunder's cache info has it."""
    gpu, cpu = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    info: dict[str, Any] = {
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device(),
        "is_autocast_enabled": gpu or cpu,
        "is_grad_enabled": torch.is_grad_enabled(),
    }
    if gpu or cpu:
        names = [str(dtypes.to_dtype(torch.get_autocast_dtype(kind))) for kind in ("cuda", "cpu")]
        info.update(zip(_AUTOCAST, (gpu, cpu, *names, names[1] if cpu else names[0])))
    return info


def _autocast() -> tuple[Any, ...] | None:
    """The dtypes of autocast on GPU and CPU, False where it is off; None if it is off on both."""
    gpu, cpu = (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu"))
    return (gpu, cpu) if gpu or cpu else None


def refuse_fully_sharded(module: ThunderModule) -> None:
    """Raises `ShardedModuleError` where Thunder's parameters are not those that ``fully_shard`` synchronizes."""
    parts = {id(part) for part in (module, *module_cache(module).values())}
    if any(id(each) in parts for each in fully_sharded_modules()):
        raise ShardedModuleError(original_module(module))


def _changed() -> bool:
    """Stands for a check of what has never been read, or changes too often to be watched: it is not unchanged."""
    return False


class AttributeGuard:
    """The checks of modules' attributes, skipped while neither the modules nor their classes change.

    ``check`` makes them, and raises if one fails; ``watched`` are the dictionaries and objects with the attributes.
    """

    def __init__(self, check: Callable[[], Any], watched: Sequence[Any]) -> None:
        self._check = check
        self._watched = watched
        self.unchanged: Callable[[], bool] = _changed  # since the checks were made: one C++ call, new after a change
        self._changes = 0

    def holds(self) -> bool:
        if self.unchanged():
            return True
        self._changes += 1
        # The versions are read first: a change during the check shows at the next call.
        unchanged = dictionary_guard(self._watched) if self._changes <= _MAX_CHANGES else _changed
        try:
            self._check()
        except Exception:  # as in Thunder: the prologue of another cache entry may pass
            return False
        self.unchanged = unchanged
        return True


class ParameterCache(dict[int, list[torch.Tensor]]):
    """A compiled module's parameters and buffers by the key that `add` gave, in the order of the names.

    After a change of the module's dictionaries, when it is not `unchanged`, it has to be `renewed` first. All guards of
    a module share one cache, so that none keeps tensors that the module no longer has.
    """

    def __init__(self, module: ThunderModule) -> None:
        super().__init__()
        self._module = ref(module)
        self._getters: list[tuple[Callable[[Any], Sequence[Any]], Callable[[Any], Sequence[Any]]]] = []
        self.unchanged: Callable[[], bool] = _changed
        self._changes = 0

    def add(self, parameters: Sequence[str], buffers: Sequence[str]) -> int:
        self._getters.append((getter(parameters), getter(buffers)))
        return len(self._getters) - 1

    def renewed(self) -> ParameterCache:
        """Itself, with nothing kept from before."""
        module = self._module()
        assert module is not None
        refuse_fully_sharded(module)  # fully_shard writes to `composable_states`, and so comes here
        self._changes += 1
        self.clear()
        watched = [self._module, module_parameters(module), module_buffers(module), composable_states]
        self.unchanged = dictionary_guard(watched) if self._changes <= _MAX_CHANGES else _changed
        return self

    def __missing__(self, key: int) -> list[torch.Tensor]:
        module = self._module()
        assert module is not None
        parameters, buffers = self._getters[key]
        self[key] = [*parameters(module_parameters(module)), *buffers(module_buffers(module))]
        return self[key]


def getter(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    """What gets all ``keys`` of a mapping or sequence as a tuple."""
    if not keys:
        return lambda values: ()
    if len(keys) == 1:
        (key,) = keys
        return lambda values: (values[key],)
    return itemgetter(*keys)
