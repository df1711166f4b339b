"""What is set for the thread and the process: a step may change it, and no replay would."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from thunder_cg.compat.distributed import allows_implicit_replication
from thunder_cg.compat.settings import Settings, kernel_settings, names_of_settings
from thunder_cg.step.facts import Content, Hash


class _Autocast(NamedTuple):
    is_on: bool
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{'on' if self.is_on else 'off'} with {self.dtype}"


def _autocast(kind: str) -> _Autocast:
    return _Autocast(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


_thread_states: dict[str, Callable[[], Any]] = {
    f"torch.{get.__name__}()": get
    for get in (
        *(torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_autocast_cache_enabled),
        *(torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled),
        *(torch.get_default_dtype, torch.get_default_device),
    )
}
_thread_states["implicit replication of DTensors"] = allows_implicit_replication
_thread_states |= {f"autocast for {kind}": partial(_autocast, kind) for kind in ("cuda", "cpu")}


def thread_states() -> tuple[Any, ...]:
    """What PyTorch has set for this thread, and for what it makes without being told of which kind."""
    return tuple(get() for get in _thread_states.values())


def named(states: Sequence[Any]) -> dict[str, Any]:
    """What `thread_states` has returned, by names."""
    return dict(zip(_thread_states, states))


def settings_of_numpy() -> dict[str, Callable[[], Any]]:
    """How to read them, by the names of the functions that set them."""
    numpy = sys.modules.get("numpy")
    return {} if numpy is None else {"np.seterr()": numpy.geterr, "np.set_printoptions()": numpy.get_printoptions}


_settings, _names_of_settings = kernel_settings(Settings.ALL), names_of_settings(Settings.ALL)


def states_outside(device: torch.device) -> dict[str, Any]:
    """What a step may change that is neither an argument nor read by a name, and that no replay would change."""
    facts: dict[str, Any] = dict(zip(_names_of_settings, _settings()))
    facts |= {name: get() for name, get in settings_of_numpy().items()}
    if device.type != "cpu":
        facts |= {"the current stream": torch.cuda.current_stream(), "the current device": torch.cuda.current_device()}
    return random_states(device) | named(thread_states()) | facts


_PYTHONS, _NUMPYS = (f"the state of {whose}'s random numbers" for whose in ("Python", "NumPy"))


def shared_generator(value: Any) -> str | None:
    """What `random_states` calls the state of a generator, if it is the one that all share; None otherwise."""
    if value is random.random.__self__:  # type: ignore[attr-defined]
        return _PYTHONS
    numpy = sys.modules.get("numpy")
    return _NUMPYS if numpy is not None and value is numpy.random.get_state.__self__ else None


def random_states(device: torch.device) -> dict[str, Any]:
    """States of random numbers that no replay draws: those of Python and NumPy, and the CPU's beside a GPU's graph."""
    facts: dict[str, Any] = {_PYTHONS: Hash(hash(random.getstate()))}
    if device.type != "cpu":
        facts["the state of PyTorch's random numbers on the CPU"] = Content(torch.get_rng_state().numpy().tobytes())
    if "numpy" in sys.modules:
        import numpy

        facts[_NUMPYS] = Hash(hash(pickle.dumps(numpy.random.get_state(legacy=False))))
    return facts
