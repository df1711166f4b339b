"""Warns of a part that a model gets after Thunder has compiled it: calls of the compiled module do not see it.

PyTorch calls a hook wherever a module gets a parameter, a buffer or a submodule, and each submodule of a compiled model
is known here. Parameters and buffers count from ``thunder.jit`` on, which takes them, and submodules from the first
call on, which traces.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.modules import module as of_torch

from thunder_cg.compat.compiled import has_parameters_of, module_parameters, original_module
from thunder_cg.compat.thunder import ThunderModule, current_trace
from thunder_cg.runtime.compilation import changed_part, name_of

_logger = logging.getLogger(__name__)


class _Place(NamedTuple):
    """Where a submodule is in a model that is compiled."""

    module: ref[ThunderModule]
    path: str
    said: set[str]  # parts that a warning was about
    traced: bool  # whether Thunder has read which submodules there are


_places: WeakKeyDictionary[torch.nn.Module, list[_Place]] = WeakKeyDictionary()


def watch(module: ThunderModule, parts: Mapping[str, torch.nn.Module] | None = None) -> None:
    """Warns from now on of parameters and buffers that the model of a compiled module gets.

    Args:
        parts: the submodules that Thunder has traced: warns of new ones, too.
    """
    model = original_module(module)
    if isinstance(model, torch.fx.GraphModule):  # whose own model Dynamo guards
        return
    _hook()
    said: set[str] = set()
    for path, part in (parts if parts is not None else dict(model.named_modules())).items():
        places = [place for place in _places.get(part, ()) if place.module() not in (None, module)]
        _places[part] = [*places, _Place(ref(module), path, said, traced=parts is not None)]


@cache
def _hook() -> None:
    of_torch.register_module_parameter_registration_hook(partial(_registers, is_module=False))
    of_torch.register_module_buffer_registration_hook(partial(_registers, is_module=False))
    of_torch.register_module_module_registration_hook(partial(_registers, is_module=True))


def _registers(owner: torch.nn.Module, name: str, value: object, *, is_module: bool) -> None:
    # Dynamo or Thunder would guard all that is read here, of models that it has not met.
    if torch.compiler.is_dynamo_compiling() or current_trace() is not None:
        return
    for place in _places.get(owner, ()):
        module = place.module()
        if module is None or getattr(owner, name, None) is value:
            continue
        model, part = original_module(module), f"{place.path}.{name}".lstrip(".")
        if value is module_parameters(module).get(part):  # as PyTorch's FSDP puts it back in each call
            continue
        is_seen = not place.traced if is_module else not has_parameters_of(module, model)
        if not is_seen and part not in place.said:
            place.said.add(part)
            _logger.warning("%s", changed_part(name_of(model), part))
